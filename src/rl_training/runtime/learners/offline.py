"""Offline learning: updates on a dataset, several of them in one call if the settings say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import OfflineHyper
from rl_training.data.dataset import DatasetSource
from rl_training.data.source import Sink
from rl_training.errors import UserError
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import Learner
from rl_training.runtime.learners.replay import ReplayLearner


class OfflineLearner(ReplayLearner):
    """A `ReplayLearner` whose replay is a dataset: nothing is stored, and schedules follow the gradient steps."""

    def __init__(self, algorithm: Algorithm[Any], seeds: Sequence[int], horizon: int, executor: Executor) -> None:
        hp: OfflineHyper = algorithm.hp
        if algorithm.dataset is None:
            raise UserError(f"{algorithm.name} learns from a dataset; none was given")
        own = algorithm.sources(1)
        source: Any = own.pop("replay", None) or DatasetSource(algorithm.dataset, hp.gamma, algorithm.dataset_columns)
        Learner.__init__(self, algorithm, source, seeds, horizon, executor)
        self.batch_size, self.sources = hp.batch_size, {"replay": source, **own}
        self.sinks = {k: v for k, v in own.items() if isinstance(v, Sink)}
        self.tree["sources"] = {k: v.init(len(self.seeds), self.device) for k, v in own.items()}
        self.phases = algorithm.phases()  # the last one is the update that the clock counts
        self._updates = {p.name: executor.wrap(self.update_of(p), self.small_state) for p in self.phases[:-1]}
        self._sizes = {"update": 1, "updates": hp.updates_per_call}
        self._graphs: dict[tuple[bool, ...], Callable[..., Any]] = {}
        self._steps_taken: int | None = None

    def repeated(self, due: tuple[bool, ...]) -> Callable[[dict[str, Any]], dict[str, Tensor]]:
        """Several updates as one function, so one graph. `due` tells which of them run the phase's `step`; the others
        run its `between` (a delayed policy)."""
        kinds = [self.update_of(kind) for kind in self.phases[-1].kinds.values()]
        steps = [kinds[not whole] for whole in due]

        def update(tree: dict[str, Any]) -> dict[str, Tensor]:
            metrics: dict[str, Tensor] = {}
            for single in steps:
                train = tree["train"]
                train.progress.copy_(torch.clamp(tree["env_steps"] / tree["horizon"], max=1.0))
                metrics |= single(tree)
                tree["env_steps"].add_(1)
            return metrics

        return update

    def call(self, name: str) -> dict[str, Tensor]:
        """The next update (`update`), or the next `updates_per_call` as one (`updates`)."""
        if self._steps_taken is None:
            self._steps_taken = int(self.train.step.flatten()[0])
        first, period = self._steps_taken, self.phases[-1].period
        self._steps_taken += self._sizes[name]
        due = tuple(step % period == 0 for step in range(first, self._steps_taken))
        if due not in self._graphs:
            self._graphs[due] = self.executor.wrap(self.repeated(due), self.small_state)
        metrics: dict[str, Tensor] = self._graphs[due](self.tree)
        return metrics
