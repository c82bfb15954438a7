"""Learn from a fixed dataset on the device. Steps are gradient steps; the environment is for evaluation only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import OfflineHyper
from rl_training.envs.vector import Restored, VectorEnv
from rl_training.ops.tree import fill, tree_items
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.offline import OfflineLearner
from rl_training.runtime.loops.phases import PhasedLoop


class OfflineLoop(PhasedLoop):
    def __init__(
        self, algorithm: Algorithm[Any], envs: VectorEnv, seeds: Sequence[int], total: int, executor: Executor
    ) -> None:
        super().__init__(algorithm, envs, seeds, total)
        self.num_envs = 1  # one step is one update
        self.block = algorithm.hp.updates_per_call
        self.learner: OfflineLearner = OfflineLearner(algorithm, seeds, total, executor)

    @staticmethod
    def planned_updates(hyper: OfflineHyper, total: int, num_envs: int) -> int:
        return total

    def start(self) -> None:
        """Nothing: the environments are there for their spaces only."""

    def advance(self, until: int) -> None:
        """Blocks begin at multiples of their size, so that a resumed run does the same arithmetic."""
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
        """The learner's tensors. The dataset is saved as its recipe in the config, with its hash."""
        self._env_meta = {"sub_envs": []}
        return {"state": dict(tree_items({k: v for k, v in self.learner.tree.items() if k != "data"}))}

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), **self.phase_counters()}

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> Restored:
        tree = {k: v for k, v in self.learner.tree.items() if k not in ("data", "horizon")}
        fill(tree, tensors["state"], "")
        self.load_phase_counters(counters)
        self.env_steps, self.gradient_steps = int(counters["env_steps"]), int(counters["gradient_steps"])
        device = self.learner.device
        self.metrics = {k: torch.tensor(v, device=device) for k, v in counters["metrics"].items()}
        return "exact"
