"""Learning from rollouts: `prepare` makes the batch of a complete one, then the phases take their steps on minibatches
of it. The tree and the functions common to every loop are in learner.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Phase, TrainState
from rl_training.algorithms.hyper import RolloutHyper
from rl_training.data.source import Source
from rl_training.data.storage import Batch, Storage, transition_columns
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_map
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import LEARN, PREPARE, SAMPLE, SHUFFLE, Learner, one_seed

MOST_DRAWN = 2**17  # numbers of all orders that are drawn together


class RolloutLearner(Learner):
    """On-policy: `learn()` prepares the full rollout and runs the algorithm's phases on it."""

    def __init__(
        self, algorithm: Algorithm[Any], seeds: Sequence[int], num_envs: int, horizon: int, executor: Executor
    ) -> None:
        hp: RolloutHyper = algorithm.hp
        columns = {**transition_columns(algorithm.spec), "valid": ((), torch.bool), **algorithm.extra_columns()}
        super().__init__(algorithm, Storage(columns, hp.n_steps, num_envs, ring=False), seeds, horizon, executor)
        self.rollouts, self.phases = 0, algorithm.phases()
        self._drawn: dict[int, dict[tuple[int, int], np.ndarray]] = {}  # of each key: orders by step and rows
        self.scratch: dict[str, Any] = {}  # the batch of each source, and where its minibatches are cut
        prior = algorithm.prior()
        self.prior: Source | None = prior[0] if prior is not None else None
        self.tree["prior"] = self.prior.init(len(self.seeds), self.device) if self.prior is not None else {}
        self.tree["windows"] = {phase.name: self._empty_window(phase) for phase in self.phases if phase.window > 1}
        self._write = executor.wrap(self.write_fn, self.small_state)
        self._prepare = executor.wrap(self.prepare_fn, self.small_state)
        self._steps = {
            phase.name: executor.wrap(self.step_of(phase), lambda: {**self.small_state(), "scratch": self.scratch})
            for phase in self.phases
        }

    @torch.no_grad()
    def _empty_window(self, phase: Phase) -> Batch:
        """Room for the phase's columns of its last rollouts: [S, window, rows, ...]."""
        _, batch = self.prepare_fn(self.tree)
        rows = {name: batch[name] for name in phase.columns if name in batch}
        return tree_map(lambda x: x.new_zeros(x.shape[0], phase.window, *x.shape[1:]), rows)

    def write(self) -> None:
        self._write(self.tree, self.inputs)

    def prepare_fn(self, tree: dict[str, Any]) -> tuple[Any, Batch]:
        def one(train: TrainState, data: dict[str, Any], key: Tensor) -> tuple[Any, Batch]:
            prepare_key = rng.fold(rng.fold(key, PREPARE), train.step)
            new, batch = self.algorithm.prepare(train, self.store.whole(data), prepare_key)
            return new.extra, batch

        # Nothing is written here: inductor of torch 2.11 may run a kernel that reads `extra` after one that writes it.
        return self.per_seed(one)(tree["train"], tree["data"], tree["keys"])  # type: ignore[no-any-return]

    def _shuffle(self, scratch: dict[str, Any], between: int = 0, left: int = 1) -> None:
        """A new order of the rows, for each seed. As far as is known, `left` orders are wanted in all, `between` steps
        apart."""
        order, offset = scratch["order"], scratch["offset"]
        keys, steps, rows = self.tree["keys"], self.train.step, order.shape[1]
        if self.device.type == "cpu":  # on the host: the same order, without a dozen operations on single numbers
            offset.numpy()[:] = 0
            for place, key, step in zip(order.numpy(), keys.tolist(), steps.tolist()):
                place[:] = self._order(key, step, rows, between, left)
            return
        offset.zero_()
        shuffle = self.per_seed(lambda step, key: rng.permutation(rng.fold(rng.fold(key, SHUFFLE), step), rows))
        order.copy_(shuffle(steps, keys))

    def _order(self, key: int, step: int, rows: int, between: int, left: int) -> np.ndarray:
        """The order at one step: a function of key and step alone. Those of the next epochs are drawn with it, all at
        once; where they turn out not to be the ones that were wanted, one at a time."""
        drawn = self._drawn.setdefault(key, {})
        if (step, rows) not in drawn:
            fits = not drawn and left * rows <= MOST_DRAWN
            steps = [step + i * between for i in range(left)] if fits else [step]
            keys = [rng.fold_int(rng.fold_int(key, SHUFFLE), s) for s in steps]
            drawn.clear()
            drawn.update(((s, rows), order) for s, order in zip(steps, rng.permutations_int(keys, rows)))
        return drawn.pop((step, rows))

    def step_of(self, phase: Phase) -> Callable[..., dict[str, Tensor]]:
        """One gradient step on the whole batch, or on the next minibatch of the shuffled one."""

        def one(train: TrainState, key: Tensor, scratch: dict[str, Any], prior: dict[str, Any]) -> Any:
            batch = self._cut(phase, train, key, scratch, prior)
            new, aux = phase.step(train, batch, rng.fold(rng.fold(key, LEARN), train.step))
            return new, aux.metrics

        def step(tree: dict[str, Any], scratch: dict[str, Any]) -> dict[str, Tensor]:
            before = tree["train"].step.clone()
            new, metrics = self.per_seed(one)(tree["train"], tree["keys"], scratch, tree["prior"])
            copy_into(tree["train"], new)
            if phase.batch_size:
                scratch["offset"].add_(phase.batch_size)
            self.note_metrics(tree, before, metrics)
            return metrics  # type: ignore[no-any-return]

        return step

    def _cut(
        self, phase: Phase, train: TrainState, key: Tensor, scratch: dict[str, Any], prior: dict[str, Any]
    ) -> Batch:
        """What one seed's next step reads: rows of the rollout, of the fixed data, or of both."""

        def fixed(rows: int) -> Batch:
            assert self.prior is not None, f"{self.algorithm.name} names no fixed data"
            return self.prior.sample(prior, rng.fold(rng.fold(key, SAMPLE), train.step), rows, train.progress)

        if phase.source == "prior":
            return fixed(phase.batch_size or self.algorithm.hp.batch_size)
        batch: Batch = scratch["batch"]
        if phase.batch_size:
            order = scratch["order"]
            rows = order[scratch["offset"] + torch.arange(phase.batch_size, device=order.device)]
            batch = tree_map(lambda x: x[rows], batch)
        if phase.also is not None:
            more = fixed(phase.also[1])
            batch = {k: tree_map(lambda x, y: torch.cat([x, y]), batch[k], more[k]) for k in batch if k in more}
        return batch

    def batch_of_update(self, index: int, step: int) -> Batch:
        """The rollout that the update was a part of."""
        batch: Batch = one_seed(self.scratch["rollout"]["batch"], index) if "rollout" in self.scratch else {}
        return batch

    def _next_batch(self, index: int, phase: Phase, train: TrainState, key: Tensor, *inputs: Any) -> Batch:
        (scratch,) = inputs
        return self._cut(phase, train, key, *one_seed((scratch, self.tree["prior"]), index))

    def learn(self) -> tuple[dict[str, Tensor], int]:
        """The metrics of the last steps, and how many gradient steps were taken."""
        extra, batch = self._prepare(self.tree)
        with torch.no_grad():
            copy_into(self.tree["train"].extra, extra)
            self.tree["data"]["count"].zero_()
        rollout = self._stage("rollout", batch)
        metrics: dict[str, Tensor] = {}
        updates = 0
        for phase in self.phases:
            if phase.window > 1:
                self._remember(phase, batch)
            if (self.rollouts + 1) % phase.every == 0 or (phase.at_start and self.rollouts == 0):
                scratch = rollout if phase.window == 1 else self._stage(phase.name, self._window(phase))
                epochs = phase.calls(0, 0)
                for epoch in range(epochs):
                    latest, taken = self._epoch(phase, scratch, epochs - epoch)
                    metrics, updates = {**metrics, **latest}, updates + taken * phase.learns
        self.rollouts += 1
        return metrics, updates

    @torch.no_grad()
    def _stage(self, source: str, batch: Batch) -> dict[str, Any]:
        """A batch in tensors that stay in place, with room for the order of its minibatches."""
        if source not in self.scratch:
            offset = torch.zeros(len(self.seeds), dtype=torch.int64, device=self.device)
            order = torch.zeros(batch["weights"].shape[:2], dtype=torch.int64, device=self.device)
            self.scratch[source] = {"batch": tree_map(torch.clone, batch), "order": order, "offset": offset}
        copy_into(self.scratch[source]["batch"], batch)
        staged: dict[str, Any] = self.scratch[source]
        return staged

    @torch.no_grad()
    def _remember(self, phase: Phase, batch: Batch) -> None:
        window, slot = self.tree["windows"][phase.name], self.rollouts % phase.window
        for name, column in window.items():
            tree_map(lambda kept, new: kept[:, slot].copy_(new), column, batch[name])

    @torch.no_grad()
    def _window(self, phase: Phase) -> Batch:
        """What the phase kept of its last rollouts, as one batch."""
        batch: Batch = tree_map(lambda x: x.flatten(1, 2), self.tree["windows"][phase.name])
        return batch if phase.begin is None else self.per_seed(phase.begin)(self.tree["train"], batch)

    def _epoch(self, phase: Phase, scratch: dict[str, Any], left: int) -> tuple[dict[str, Tensor], int]:
        """`left`: epochs of the phase that are left, with this one."""
        rows = scratch["order"].shape[1]
        if phase.source == "prior":
            return self._steps[phase.name](self.tree, scratch), 1
        count = rows // phase.batch_size if phase.batch_size else 1
        if phase.batch_size:
            self._shuffle(scratch, count, left)
        metrics: dict[str, Tensor] = {}
        for _ in range(count):
            metrics = self._steps[phase.name](self.tree, scratch)
        return metrics, count

    @property
    def updates_per_rollout(self) -> int:
        """Gradient steps for each rollout, on average."""
        count: int = self.algorithm.hp.updates_per_rollout(self.num_envs)
        return count
