"""Learn from a fixed dataset on the device. Steps are gradient steps; the environment is for evaluation only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_training.algorithms.hyper import OfflineHyper
from rl_training.envs.vector import Restored
from rl_training.ops.tree import fill, tree_items
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.offline import OfflineLearner
from rl_training.runtime.loops.phases import PhasedLoop


class OfflineLoop(PhasedLoop):
    learner: OfflineLearner

    def make_learner(self, executor: Executor) -> OfflineLearner:
        self.num_envs = 1  # one step is one update
        return OfflineLearner(self.algorithm, self.seeds, self.total, executor)

    @staticmethod
    def planned_updates(hyper: OfflineHyper, total: int, num_envs: int) -> int:
        return total

    def start(self) -> None:
        """Nothing: the environments are there for their spaces only."""

    def advance(self, until: int) -> None:
        """Blocks begin at multiples of their size, so that a resumed run does the same arithmetic."""
        learner, preparing, block = self.learner, self.learner.phases[:-1], self.hp.updates_per_call
        while self.env_steps < until and not self.should_stop():
            if preparing and not self.run_phases(learner, preparing, self.env_steps):
                return
            whole = self.env_steps % block == 0 and self.env_steps + block <= self.total
            self.keep_metrics(learner, learner.phases[-1], learner.call("updates" if whole else "update"))
            steps = block if whole else 1
            self.env_steps += steps
            self.gradient_steps += steps

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The learner's tensors. The dataset is saved as its recipe in the config, with its hash."""
        self._env_meta = {"sub_envs": []}
        return {"state": dict(tree_items({k: v for k, v in self.learner.tree.items() if k != "data"}))}

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> Restored:
        tree = {k: v for k, v in self.learner.tree.items() if k not in ("data", "horizon")}
        fill(tree, tensors["state"], "")
        self.load_counters(counters)
        return "exact"
