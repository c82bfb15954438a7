"""Learn from a fixed dataset on the device. The clock counts gradient steps; the environment only evaluates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import OfflineHyper
from rl_training.data.source import Sink
from rl_training.envs.vector import Restored, VectorEnv
from rl_training.errors import UserError
from rl_training.ops.tree import tree_items
from rl_training.runtime.executor import Executor
from rl_training.runtime.learner import Learner, ReplayLearner
from rl_training.runtime.loops.base import _fill
from rl_training.runtime.loops.phases import PhasedLoop


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


class OfflineLoop(PhasedLoop):
    def __init__(
        self, algorithm: Algorithm[Any], envs: VectorEnv, seeds: Sequence[int], total: int, executor: Executor
    ) -> None:
        super().__init__(algorithm, envs, seeds, total)
        self.num_envs = 1  # one step of the clock is one update
        self.block = algorithm.hp.updates_per_call
        self.learner: OfflineLearner = OfflineLearner(algorithm, seeds, total, executor)

    @staticmethod
    def planned_updates(hyper: OfflineHyper, total: int, num_envs: int) -> int:
        return total

    def advance(self, until: int) -> None:
        """Blocks begin at multiples of their size, wherever a run was cut: so the arithmetic is the same."""
        learner, preparing = self.learner, self.learner.phases[:-1]
        while self.env_steps < until and not self.should_stop():
            if preparing and not self.run_phases(learner, preparing, self.env_steps):
                return
            whole = self.env_steps % self.block == 0 and self.env_steps + self.block <= self.total
            self.keep_metrics(learner, learner.phases[-1], learner.call("updates" if whole else "update"))
            steps = self.block if whole else 1
            self.env_steps += steps
            self.gradient_steps += steps

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The learner only: the dataset is in the config as a recipe, and its hash beside it."""
        self._env_meta = {"sub_envs": []}
        return {"state": dict(tree_items({k: v for k, v in self.learner.tree.items() if k != "data"}))}

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), **self.phase_counters()}

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> Restored:
        tree = {k: v for k, v in self.learner.tree.items() if k not in ("data", "horizon")}
        _fill(tree, tensors["state"], "")
        self.load_phase_counters(counters)
        self.env_steps, self.gradient_steps = int(counters["env_steps"]), int(counters["gradient_steps"])
        device = self.learner.device
        self.metrics = {k: torch.tensor(v, device=device) for k, v in counters["metrics"].items()}
        return "exact"
