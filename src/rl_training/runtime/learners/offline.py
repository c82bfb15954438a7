"""Offline learning: updates on a dataset, several of them in one call if the settings say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import OfflineHyper
from rl_training.data.dataset import DatasetSource
from rl_training.errors import UserError
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.replay import ReplayLearner


class OfflineLearner(ReplayLearner):
    """A `ReplayLearner` that samples from a dataset. Nothing is stored; schedules follow the gradient steps. The last
    phase of the algorithm is the update that the step counter counts."""

    def __init__(self, algorithm: Algorithm[Any], seeds: Sequence[int], horizon: int, executor: Executor) -> None:
        if algorithm.dataset is None:
            raise UserError(f"{algorithm.name} learns from a dataset; none was given")
        hp: OfflineHyper = algorithm.hp
        source: Any = algorithm.sources(1).get("replay")
        source = source or DatasetSource(algorithm.dataset, hp.gamma, algorithm.dataset_columns)
        super().__init__(algorithm, seeds, source.num_envs, horizon, executor, store=source)
        self._sizes = {"update": 1, "updates": hp.updates_per_call}
        self._graphs: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def before_each_step(self, hook: Callable[..., None]) -> None:
        raise UserError(f"{self.algorithm.name} takes several updates at once, which cannot be replayed one by one")

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
        """Run the next "update", or the next block of "updates"."""
        if self._steps_taken is None:
            self._steps_taken = int(self.train.step.flatten()[0])
        first, period = self._steps_taken, self.phases[-1].period
        self._steps_taken += self._sizes[name]
        due = tuple(step % period == 0 for step in range(first, self._steps_taken))
        if due not in self._graphs:
            self._graphs[due] = self.executor.wrap(self.repeated(due), self.small_state)
        metrics: dict[str, Tensor] = self._graphs[due](self.tree)
        return metrics
