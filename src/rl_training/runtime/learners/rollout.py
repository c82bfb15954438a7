"""On-policy learning: `prepare` makes a batch of a complete rollout, then the phases take their steps on minibatches of
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.algorithms.hyper import RolloutHyper
from rl_training.algorithms.phases import RolloutPhase, Window, is_due
from rl_training.data.source import Source
from rl_training.data.storage import Batch, Storage, transition_columns
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_map
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import LEARN, PREPARE, SAMPLE, SHUFFLE, Learner, one_seed

MOST_DRAWN = 2**17  # numbers, at most, in the orders that are drawn together


class RolloutLearner(Learner):
    """On-policy: `learn()` prepares the full rollout and runs the algorithm's phases on it."""

    def __init__(
        self, algorithm: Algorithm[Any], seeds: Sequence[int], num_envs: int, horizon: int, executor: Executor
    ) -> None:
        hp: RolloutHyper = algorithm.hp
        columns = {**transition_columns(algorithm.spec), "valid": ((), torch.bool), **algorithm.extra_columns()}
        super().__init__(algorithm, Storage(columns, hp.n_steps, num_envs, ring=False), seeds, horizon, executor)
        self.rollouts, self.phases = 0, algorithm.rollout_phases()
        self._drawn: dict[int, dict[tuple[int, int], np.ndarray]] = {}  # for each key: orders by step and rows
        self.scratch: dict[str, Any] = {}  # each staged batch, the order of its rows, and the place of the next one
        self.prior: Source | None = algorithm.sources(num_envs).get("prior")
        self.tree["prior"] = self.prior.init(len(self.seeds), self.device) if self.prior is not None else {}
        self.tree["windows"] = {p.name: self._empty_window(p.window) for p in self.phases if p.window is not None}
        self._write = executor.wrap(self.write_fn, self.small_state)
        self._prepare = executor.wrap(self.prepare_fn, self.small_state)
        self._steps = {
            phase.name: executor.wrap(self.step_of(phase), lambda: {**self.small_state(), "scratch": self.scratch})
            for phase in self.phases
        }

    @torch.no_grad()
    def _empty_window(self, window: Window) -> Batch:
        """Room for the columns of a window: [S, rollouts, rows, ...]."""
        _, batch = self.prepare_fn(self.tree)
        rows = {name: batch[name] for name in window.columns if name in batch}
        return tree_map(lambda x: x.new_zeros(x.shape[0], window.rollouts, *x.shape[1:]), rows)

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
        """Draw a new order of the rows, for each seed. `left` orders are expected in all, `between` steps apart."""
        order, offset = scratch["order"], scratch["offset"]
        keys, steps, rows = self.tree["keys"], self.train.step, order.shape[1]
        if self.device.type == "cpu":  # on the host: the same order, without a dozen tensor operations
            offset.numpy()[:] = 0
            for place, key, step in zip(order.numpy(), keys.tolist(), steps.tolist()):
                place[:] = self._order(key, step, rows, between, left)
            return
        offset.zero_()
        shuffle = self.per_seed(lambda step, key: rng.permutation(rng.fold(rng.fold(key, SHUFFLE), step), rows))
        order.copy_(shuffle(steps, keys))

    def _order(self, key: int, step: int, rows: int, between: int, left: int) -> np.ndarray:
        """The order at one step: a function of key and step alone. The orders of the next epochs are drawn with it, all
        at once. Where those turn out to be the wrong ones, orders are drawn one at a time."""
        drawn = self._drawn.setdefault(key, {})
        if (step, rows) not in drawn:
            fits = not drawn and left * rows <= MOST_DRAWN
            steps = [step + i * between for i in range(left)] if fits else [step]
            keys = [rng.fold_int(rng.fold_int(key, SHUFFLE), s) for s in steps]
            drawn.clear()
            drawn.update(((s, rows), order) for s, order in zip(steps, rng.permutations_int(keys, rows)))
        return drawn.pop((step, rows))

    def step_of(self, phase: RolloutPhase) -> Callable[..., dict[str, Tensor]]:
        """One step on the whole batch, or on the next of its shuffled minibatches."""

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
        self, phase: RolloutPhase, train: TrainState, key: Tensor, scratch: dict[str, Any], prior: dict[str, Any]
    ) -> Batch:
        """The batch of one seed's next step: rows of the rollout, of the fixed data, or of both."""

        def fixed(rows: int) -> Batch:
            assert self.prior is not None, f"{self.algorithm.name} has no source `prior`"
            return self.prior.sample(prior, rng.fold(rng.fold(key, SAMPLE), train.step), rows, train.progress)

        if phase.source == "prior":
            return fixed(phase.prior_rows)
        batch: Batch = scratch["batch"]
        if phase.batch_size:
            order = scratch["order"]
            rows = order[scratch["offset"] + torch.arange(phase.batch_size, device=order.device)]
            batch = tree_map(lambda x: x[rows], batch)
        if phase.prior_rows:
            more = fixed(phase.prior_rows)
            batch = {k: tree_map(lambda x, y: torch.cat([x, y]), batch[k], more[k]) for k in batch if k in more}
        return batch

    def batch_of_update(self, index: int, step: int) -> Batch:
        """The rollout that the update was a part of."""
        batch: Batch = one_seed(self.scratch["rollout"]["batch"], index) if "rollout" in self.scratch else {}
        return batch

    def _next_batch(self, index: int, phase: RolloutPhase, train: TrainState, key: Tensor, *inputs: Any) -> Batch:
        (scratch,) = inputs
        return self._cut(phase, train, key, *one_seed((scratch, self.tree["prior"]), index))

    def learn(self) -> tuple[dict[str, Tensor], int]:
        """The metrics of the last steps, and how many gradient steps were taken."""
        extra, batch = self._prepare(self.tree)
        with torch.no_grad():
            copy_into(self.tree["train"].extra, extra)
            self.tree["data"]["count"].zero_()
            metrics: dict[str, Tensor] = self.per_seed(self.algorithm.rollout_metrics)(batch)
        rollout = self._stage("rollout", batch)
        updates = 0
        for phase in self.phases:
            window = phase.window
            if window is not None:
                self._keep(phase.name, window, batch)
            if is_due(phase, self.rollouts + 1, first=self.rollouts == 0):
                scratch = rollout if window is None else self._stage(phase.name, self._joined(phase.name, window))
                for epoch in range(phase.times):
                    latest, taken = self._epoch(phase, scratch, phase.times - epoch)
                    metrics, updates = {**metrics, **latest}, updates + taken * phase.learns
        self.rollouts += 1
        return metrics, updates

    @torch.no_grad()
    def _stage(self, source: str, batch: Batch) -> dict[str, Any]:
        """Copy a batch into tensors that stay in place, with room for the order of its minibatches."""
        if source not in self.scratch:
            offset = torch.zeros(len(self.seeds), dtype=torch.int64, device=self.device)
            order = torch.zeros(batch["weights"].shape[:2], dtype=torch.int64, device=self.device)
            self.scratch[source] = {"batch": tree_map(torch.clone, batch), "order": order, "offset": offset}
        copy_into(self.scratch[source]["batch"], batch)
        staged: dict[str, Any] = self.scratch[source]
        return staged

    @torch.no_grad()
    def _keep(self, name: str, window: Window, batch: Batch) -> None:
        """Write the batch over the oldest rollout of a phase's window."""
        slot = self.rollouts % window.rollouts
        for column, kept in self.tree["windows"][name].items():
            tree_map(lambda old, new: old[:, slot].copy_(new), kept, batch[column])

    @torch.no_grad()
    def _joined(self, name: str, window: Window) -> Batch:
        """The rollouts of a phase's window as one batch."""
        batch: Batch = tree_map(lambda x: x.flatten(1, 2), self.tree["windows"][name])
        return batch if window.begin is None else self.per_seed(window.begin)(self.tree["train"], batch)

    def _epoch(self, phase: RolloutPhase, scratch: dict[str, Any], left: int) -> tuple[dict[str, Tensor], int]:
        """One pass of a phase: (metrics, steps taken). `left`: passes that are left, with this one."""
        count = 1
        if phase.batch_size:
            count = scratch["order"].shape[1] // phase.batch_size
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
