"""The device side of offline training: updates on a dataset, several of them in one call if wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import OfflineHyper
from rl_training.data.source import Sink
from rl_training.errors import UserError
from rl_training.runtime.executor import Executor
from rl_training.runtime.learner import Learner, ReplayLearner


class OfflineLearner(ReplayLearner):
    """`ReplayLearner` whose replay is a dataset: nothing is stored, and the schedules follow the gradient steps."""

    def __init__(self, algorithm: Algorithm[Any], seeds: Sequence[int], horizon: int, executor: Executor) -> None:
        hp: OfflineHyper = algorithm.hp
        if algorithm.dataset is None:
            raise UserError(f"{algorithm.name} learns from a dataset; none was given")
        source: Any = algorithm.offline_source()
        Learner.__init__(self, algorithm, source, seeds, horizon, executor)
        own = algorithm.sources()
        self.batch_size, self.sources = hp.batch_size, {"replay": source, **own}
        self.sinks = {k: v for k, v in own.items() if isinstance(v, Sink)}
        self.tree["sources"] = {k: v.init(len(self.seeds), self.device) for k, v in own.items()}
        self.phases = algorithm.phases()  # the last one is the update that the clock counts
        self._updates = {
            **{p.name: executor.wrap(self.update_of(p), self.small_state) for p in self.phases[:-1]},
            "update": executor.wrap(self.repeated(1), self.small_state),
            "updates": executor.wrap(self.repeated(hp.updates_per_call), self.small_state),
        }

    def repeated(self, times: int) -> Callable[[dict[str, Any]], dict[str, Tensor]]:
        """`times` updates as one function, so one graph."""
        single = self.update_of(self.phases[-1])

        def update(tree: dict[str, Any]) -> dict[str, Tensor]:
            metrics: dict[str, Tensor] = {}
            for _ in range(times):
                train = tree["train"]
                train.progress.copy_(torch.clamp(tree["env_steps"] / tree["horizon"], max=1.0))
                metrics = single(tree)
                tree["env_steps"].add_(1)
            return metrics

        return update

    def call(self, name: str) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = self._updates[name](self.tree)
        return metrics
