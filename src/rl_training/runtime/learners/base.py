"""The device side of training: all learning state as one tree of tensors, and the functions that advance it.

`interact` stores the last transition and chooses the next actions; the learners of each loop add how they learn. Each
of these is one function of the tree, so each is one graph, and each works on all seeds at once. Every tensor has a
leading seed axis S; algorithms never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.acting import reset_carry, start_carry
from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.algorithms.phases import Phase
from rl_training.data.storage import Batch, Storage, action_column, map_columns, observation_columns
from rl_training.ops import rng
from rl_training.ops.action_masks import random_allowed
from rl_training.ops.tree import copy_into, tree_leaves, tree_map, tree_stack
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.staging import Staging, arrays_in
from rl_training.spec import MASK

if TYPE_CHECKING:
    from rl_training.envs.vector import Step

FIXED = ("data", "prior")  # parts of the tree that are transitions; `prior` never changes and is never saved
ACT, SAMPLE, LEARN, PREPARE, SHUFFLE, WARMUP, ENVIRONMENT, RESET = range(8)  # random streams


def one_seed(tree: Any, index: int) -> Any:
    """The part of a tree that belongs to the seed at `index`."""
    return tree_map(lambda x: x[index], tree)


def first_seed(tree: Any) -> Any:
    return tree_map(lambda x: x[0], tree)


def over_seeds(fn: Callable[..., Any], seeds: int, first: Callable[[Any], Any] = first_seed) -> Callable[..., Any]:
    """A function of one seed's trees, for trees with a seed axis: vmap, or a plain call where there is one seed."""
    if seeds > 1:
        return torch.vmap(fn)

    def single(*trees: Any) -> Any:
        return tree_map(lambda x: x.unsqueeze(0), fn(*(first(tree) for tree in trees)))

    return single


class Learner:
    """The state and the functions that every loop needs."""

    phases: tuple[Any, ...] = ()  # of the kind that its loop runs (algorithms/phases.py)
    _steps: dict[str, Callable[..., Any]]  # what a step of each phase runs, by name (`Phase.kinds`)

    def __init__(
        self, algorithm: Algorithm[Any], store: Storage, seeds: Sequence[int], horizon: int, executor: Executor
    ) -> None:
        self.algorithm, self.store, self.seeds, self.executor = algorithm, store, tuple(seeds), executor
        self.device, self.num_envs = executor.device, store.num_envs
        count, envs, device, spec = len(self.seeds), store.num_envs, executor.device, algorithm.spec

        def rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros((count, envs, *shape), dtype=dtype, device=device)

        self.tree: dict[str, Any] = {
            "train": tree_stack([algorithm.init_state(seed) for seed in self.seeds]),
            "data": store.init(count, device),
            "keys": torch.stack([rng.key_from_seed(seed) for seed in self.seeds]).to(device),
            "obs": map_columns(rows, observation_columns(spec)),
            "actions": rows(*action_column(spec)),
            "extras": map_columns(rows, algorithm.extra_columns()),  # stored with the actions
            "carry": tree_stack([start_carry(algorithm, envs)] * count),
            "steps": torch.zeros(count, dtype=torch.int64, device=device),  # calls of `interact`, the clock of acting
            "env_steps": torch.zeros(count, dtype=torch.int64, device=device),
            "horizon": torch.full((count,), max(1, horizon), dtype=torch.int64, device=device),
            "bad_step": torch.full((count,), -1, dtype=torch.int64, device=device),  # first non-finite update
        }
        # What the environments returned, in static buffers that a captured graph can read.
        self.inputs: dict[str, Any] = {
            "obs": map_columns(rows, observation_columns(spec)),
            "final_obs": map_columns(rows, observation_columns(spec)),
            "scalars": rows((5,), torch.float32),  # reward, terminated, truncated, valid, advance
        }
        self._staging = Staging(self.inputs) if self.device.type == "cuda" else None
        on_host = self.inputs
        if self._staging is not None:
            self.inputs, on_host = self._staging.device, self._staging.host
        rows_of = [x.flatten(0, 1).numpy() for x in tree_leaves(on_host)]  # the same memory as [M, ...] arrays
        self._host_obs, self._scalars = rows_of[:-1], rows_of[-1]
        self._columns = [self._scalars[:, i] for i in range(5)]
        self.all_continue = False  # the loaded step has only valid rows, and no episode ended in it
        self.counts_alike = False  # either all rows of a step are transitions, or none
        self._chosen = self.tree["actions"].flatten(0, 1)
        self._chosen_array: np.ndarray | None = self._chosen.numpy() if self.device.type == "cpu" else None
        self._views: dict[int, tuple[Any, Any]] = {}
        self._interact = executor.wrap(self.interact_fn, self.small_state)

    def per_seed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, which is written for one seed, for all seeds."""
        return over_seeds(fn, len(self.seeds), self._first)

    def _first(self, tree: Any) -> Any:
        """The only seed's part of a tree. In eager mode the views of a static tree are made once (except of a single
        tensor): slicing twenty tensors again costs a tenth of an update."""
        if torch.compiler.is_compiling() or isinstance(tree, Tensor):
            return first_seed(tree)
        if isinstance(tree, dict) and all(isinstance(part, dict) for part in tree.values()):
            return {name: self._first(part) for name, part in tree.items()}  # made anew for each call, of static trees
        known = self._views.get(id(tree))
        if known is None or known[0] is not tree:
            known = self._views[id(tree)] = (tree, first_seed(tree))
        return known[1]

    @property
    def train(self) -> TrainState:
        state: TrainState = self.tree["train"]
        return state

    def small_state(self) -> Any:
        """Everything but the stored transitions. The trial runs before a capture must not change it."""
        stored = {*self.store.columns, "ring"}
        data = {k: v for k, v in self.tree["data"].items() if k not in stored}
        return {**{k: v for k, v in self.tree.items() if k not in FIXED}, "data": data}

    # --- collecting --------------------------------------------------------------------------------------------

    def write_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> None:
        """Store the transition that ended with `inputs`: last obs and action, reward, true next observation."""
        reward, terminated, truncated, valid, advance = inputs["scalars"].unbind(-1)
        row = {
            "obs": tree["obs"], "next_obs": inputs["final_obs"], "actions": tree["actions"], "rewards": reward,
            "terminated": terminated > 0.5, "truncated": truncated > 0.5, **tree["extras"],
        }  # fmt: skip
        if "valid" in self.store.columns:
            row["valid"] = valid > 0.5
        self.store.write(tree["data"], row, advance > 0.5)
        # A row that a rollout keeps although it is not a transition (a reset) is not a step. Rows on the device count
        # all or none; their sum would make one block of a GPU do all of this function.
        taken = self.num_envs * advance[..., 0] if self.counts_alike else (advance * valid).sum(-1)
        tree["env_steps"].add_(taken.to(torch.int64))
        train: TrainState = tree["train"]
        train.progress.copy_(torch.clamp(tree["env_steps"] / tree["horizon"], max=1.0))

    def act_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> Tensor:
        """Actions for the observations in `inputs`, of every seed: [S, N, ...]."""

        def one(train: TrainState, carry: Any, obs: Any, scalars: Tensor, key: Tensor, step: Tensor) -> Any:
            if tree_leaves(carry):  # an episode begins after the end of another one, and after an invalid row
                starts = (scalars[:, 1] + scalars[:, 2] > 0.5) | (scalars[:, 3] < 0.5)
                carry = reset_carry(self.algorithm, carry, starts)
            act_key = rng.fold(rng.fold(key, ACT), step)
            return self.algorithm.select_action(train, carry, obs, act_key, explore=True)

        carry, actions, extras = self.per_seed(one)(
            tree["train"], tree["carry"], inputs["obs"], inputs["scalars"], tree["keys"], tree["steps"]
        )
        copy_into(tree["carry"], carry)
        copy_into(tree["extras"], extras)
        copy_into(tree["obs"], inputs["obs"])
        tree["actions"].copy_(actions)
        tree["steps"].add_(1)
        chosen: Tensor = tree["actions"]
        return chosen

    def interact_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> Tensor:
        self.write_fn(tree, inputs)
        return self.act_fn(tree, inputs)

    def load_step(self, step: Step, *, keep_invalid: bool = False) -> None:
        """Copy a step of the environments into the input buffers."""
        if self._staging is not None:
            self._staging.wait()
        reward, terminated, truncated, valid, advance = self._columns
        reward[:] = step.rewards
        if not (step.all_continue and self.all_continue):  # in most steps, nothing changes but the reward
            terminated[:] = step.terminated
            truncated[:] = step.truncated
            valid[:] = step.valid
            advance[:] = True if keep_invalid else step.valid
            self.all_continue = step.all_continue
        self._upload(step.obs, step.final_obs)

    def load_reset(self, obs: Any, *, begins: bool = True, lost: bool = False) -> None:
        """Load observations to act on, without a transition to store.

        With `begins`, every row begins an episode. Without it, the loaded transition was stored already, and episodes
        begin where it ended one. `lost`: the running episodes are over.
        """
        if self._staging is not None:
            self._staging.wait()
        self.all_continue = False
        self._scalars[:, :1] = 0.0
        self._scalars[:, 4] = 0.0
        if begins:
            self._scalars[:, 1:4] = 0.0
            self._scalars[:, 2] = lost
        self._upload(obs, obs)

    def _upload(self, obs: Any, final_obs: Any) -> None:
        """Write the observations into the buffers with NumPy, at a tenth of the cost of a tensor copy."""
        arrays = (*arrays_in(obs), *arrays_in(final_obs)) if isinstance(obs, dict) else (obs, final_obs)
        for rows, array in zip(self._host_obs, arrays, strict=True):
            rows[...] = array
        if self._staging is not None:
            self._staging.upload()
            if self.inputs is not self._staging.device:
                copy_into(self.inputs, self._staging.device)

    def separate_inputs(self) -> None:
        """Make the inputs tensors of their own, which a graph on the device may write."""
        if self._staging is not None:
            self.inputs = tree_map(torch.clone, self.inputs)

    def store_and_act(self) -> None:
        """Store the loaded transition and choose the next actions."""
        self._interact(self.tree, self.inputs)

    def interact(self) -> np.ndarray:
        """`store_and_act`; returns the actions [M, ...] as an array."""
        self.store_and_act()
        return self.chosen_actions()

    def act(self) -> np.ndarray:
        """The next actions alone: the loaded transition was stored before. It is written again but not counted, so the
        next one replaces it."""
        self.all_continue = False
        if self.device.type == "cpu":
            self._scalars[:, 4] = 0.0
        else:
            self.inputs["scalars"][..., 4] = 0.0
        return self.interact()

    @torch.no_grad()
    def write(self) -> None:
        self.write_fn(self.tree, self.inputs)

    def random_actions(self) -> np.ndarray:
        """`choose_randomly`; returns the actions [M, ...] as an array."""
        self.choose_randomly()
        return self.chosen_actions()

    @torch.no_grad()
    def choose_randomly(self) -> None:
        """Uniform random actions, which replace those that the policy chose last."""
        spec = self.algorithm.spec.action

        def one(key: Tensor, step: Tensor, mask: Tensor | None) -> Tensor:
            u = rng.uniform(rng.fold(rng.fold(key, WARMUP), step), (self.num_envs, max(1, spec.dim)))
            if spec.kind == "box":
                return 2.0 * u - 1.0
            if mask is not None and spec.discrete:
                return random_allowed(u[:, 0], mask > 0)
            actions = (u * torch.tensor(spec.nvec, device=u.device)).to(torch.int64)
            return actions[:, 0] if spec.discrete else actions

        keys, steps = self.tree["keys"], self.tree["steps"]
        masks = self.tree["obs"][MASK] if self.algorithm.spec.masked else [None] * len(keys)
        actions = torch.stack([one(*row) for row in zip(keys, steps, masks)])
        self.tree["actions"].copy_(actions)
        if self.algorithm.recurrent:
            copy_into(self.tree["carry"], self.per_seed(self.algorithm.replace_actions)(self.tree["carry"], actions))

    def chosen_actions(self) -> np.ndarray:
        """The actions chosen last, [M, ...]. On the CPU, the next choice overwrites this array."""
        if self._chosen_array is not None:
            return self._chosen_array
        array: np.ndarray = self._chosen.cpu().numpy()
        return array

    # --- learning ----------------------------------------------------------------------------------------------

    def note_metrics(self, tree: dict[str, Any], before: Tensor, metrics: dict[str, Tensor]) -> None:
        """Note the first update whose metrics were not finite; the host checks for it now and then."""
        total = torch.stack([m.to(torch.float32) for m in metrics.values()]).sum(0)  # [S]
        bad = tree["bad_step"]
        bad.copy_(torch.where((bad < 0) & ~torch.isfinite(total), before, bad))

    # --- for diagnosis -----------------------------------------------------------------------------------------

    def batch_of_update(self, index: int, step: int) -> Batch:
        """The batch that update `step` of one seed read; empty where that is no longer known."""
        return {}

    def before_each_step(self, hook: Callable[..., None]) -> None:
        """From now on, call `hook(phase, *inputs)` before each step of a phase; `inputs` are for `next_step`."""

        def hooked(phase: Phase, run: Callable[..., Any], tree: dict[str, Any], *inputs: Any) -> Any:
            hook(phase, *inputs)
            return run(tree, *inputs)

        kinds = {name: kind for phase in self.phases for name, kind in phase.kinds.items()}
        self._steps = {name: partial(hooked, kinds[name], run) for name, run in self._steps.items()}

    def next_step(self, index: int, phase: Phase, *inputs: Any) -> tuple[TrainState, Batch, Tensor]:
        """The arguments of the next call of `phase.step`, for one seed."""
        train, key = tree_map(torch.clone, one_seed((self.train, self.tree["keys"]), index))
        return train, self._next_batch(index, phase, train, key, *inputs), rng.fold(rng.fold(key, LEARN), train.step)

    def _next_batch(self, index: int, phase: Any, train: TrainState, key: Tensor, *inputs: Any) -> Batch:
        raise NotImplementedError
