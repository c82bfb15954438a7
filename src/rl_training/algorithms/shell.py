"""An algorithm used on its own, without a run: it keeps the training state between calls of `update` and `act`.

The algorithm itself is pure: it takes a state and returns a new one. Everything that is remembered is here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.acting import Policy, RunningEpisodes
from rl_training.algorithms.hyper import Hyper
from rl_training.algorithms.phases import Step
from rl_training.algorithms.state import Aux, Obs, TrainState, count_rows
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.nets import Net
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import EnvSpec

_UPDATE, _ACT = 102, 103  # random streams


class UpdateResult(NamedTuple):
    metrics: dict[str, float]
    num_gradient_steps: int


class Trainable(Policy, Protocol):
    """What the shell needs of an algorithm."""

    spec: EnvSpec
    seed: int
    modules: dict[str, nn.Module]
    nets: dict[str, Net]

    @property
    def hp(self) -> Hyper: ...
    @property
    def batch_columns(self) -> tuple[str, ...]: ...

    def init_state(self, seed: int) -> TrainState: ...

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]: ...


class Shell:
    """The state of one algorithm, and the functions that change it."""

    def __init__(self, algorithm: Trainable) -> None:
        self.algorithm = algorithm
        self.state = algorithm.init_state(algorithm.seed)
        self.episodes = RunningEpisodes(algorithm)
        self.last_td_errors: Tensor | None = None
        self._calls = 0  # of `act`

    @torch.no_grad()
    def update(self, batch: Batch, step: Step | None = None) -> UpdateResult:
        """One gradient step on a batch of arrays or tensors, by `train_step` or by another step of the algorithm."""
        algorithm = self.algorithm
        key = rng.fold(rng.key_from_seed(algorithm.seed, _UPDATE).to(algorithm.device), self.state.step)
        self.state, aux = (step or algorithm.train_step)(self.state, self.standard_batch(batch), key)
        self.last_td_errors = aux.priority
        self._write_modules()
        return UpdateResult({k: float(v) for k, v in aux.metrics.items()}, 1)

    @torch.no_grad()
    def act(self, obs: Any, *, deterministic: bool = False, episode_start: Any = None) -> np.ndarray:
        """Actions for a batch of encoded observations (or one observation)."""
        algorithm = self.algorithm
        x, seen = self._observation(obs), algorithm.spec.observation
        part, like = next((x[name], like) for name, like in seen.items()) if isinstance(seen, dict) else (x, seen)
        single = part.ndim == len(like.shape)
        key = rng.fold(rng.key_from_seed(algorithm.seed, _ACT).to(algorithm.device), self._calls)
        self._calls += 1
        x = tree_map(lambda one: one.unsqueeze(0), x) if single else x
        carry = self.episodes.read(count_rows(x), episode_start)
        carry, action, _ = algorithm.select_action(self.state, carry, x, key, explore=not deterministic)
        self.episodes.write(carry)
        return (action[0] if single else action).cpu().numpy()

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the state by name; the parameters of a network are one vector."""
        return {name: leaf.clone() for name, leaf in tree_items(self.state)}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        names = dict(tree_items(self.state))
        wrong = set(names) ^ set(tensors) or {n for n, x in names.items() if tensors[n].numel() != x.numel()}
        if wrong:
            raise UserError(f"the state does not fit {type(self.algorithm).__name__}: {', '.join(sorted(wrong)[:5])}")
        items = iter([tensors[name] for name in names])
        self.state = tree_map(lambda old: next(items).to(old.device, old.dtype).reshape(old.shape).clone(), self.state)
        self._write_modules()

    def _write_modules(self) -> None:
        """Copy the parameters back into the networks that the user may hold."""
        for name, net in self.algorithm.nets.items():
            net.write_to(self.algorithm.modules[name], self.state.params[name])

    # --- a user's arrays as `train_step` reads them ----------------------------------------------------------------

    def standard_batch(self, batch: Batch) -> Batch:
        """The batch in the form that `train_step` reads: `dones` become discounts, weights default to 1."""
        out: Batch = self._tensor(batch)
        out |= {name: self._observation(out[name]) for name in ("obs", "next_obs") if name in out}
        columns, name = self.algorithm.batch_columns, self.algorithm.name
        if missing := sorted(set(columns) - set(out)):
            raise UserError(f"{name}: the batch needs {', '.join(missing)}; it has {', '.join(sorted(out))}")
        if not columns and "advantages" not in out:  # transitions; a batch that `prepare` made is complete
            out = self._standard_transitions(out)
        if "weights" not in out:
            out["weights"] = torch.ones(len(out[(*columns, "actions")[0]]), device=self.algorithm.device)
        return out

    def _standard_transitions(self, out: Batch) -> Batch:
        done = out.pop("dones", out.pop("terminated", None))
        rows = {name: count_rows(out[name]) for name in ("obs", "actions", "rewards") if name in out}
        if len(rows) < 3 or len(set(rows.values())) > 1:
            counted = ", ".join(f"{n} {name}" for name, n in rows.items())
            raise UserError(f"the batch needs as many obs as actions and rewards; it has {counted or 'none'}")
        if "discounts" not in out:
            if done is None:
                raise UserError("the batch needs 'discounts', or 'dones' (true where the episode terminated)")
            out["discounts"] = self.algorithm.hp.gamma * (1.0 - done.to(torch.float32))
        return {**out, "rewards": out["rewards"].to(torch.float32)}

    def _observation(self, x: Any) -> Obs:
        """On the device, as float32; images stay bytes."""

        def read(part: Tensor) -> Tensor:
            return part if part.dtype == torch.uint8 and part.ndim > 2 else part.to(torch.float32)

        return tree_map(read, self._tensor(x))

    def _tensor(self, x: Any) -> Any:
        """On the device; a dict part by part."""
        if isinstance(x, dict):
            return {name: self._tensor(part) for name, part in x.items()}
        tensor = torch.as_tensor(x, device=self.algorithm.device)
        return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor
