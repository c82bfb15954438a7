"""Collect a rollout with the current policy, learn from it in epochs of shuffled minibatches, throw it away, repeat."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from rl_training.algorithms.hyper import RolloutHyper
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.rollout import RolloutLearner
from rl_training.runtime.loops.base import Loop


class OnPolicyLoop(Loop):
    learner: RolloutLearner

    def make_learner(self, executor: Executor) -> RolloutLearner:
        return RolloutLearner(self.algorithm, self.seeds, self.num_envs, self.total, executor)

    @staticmethod
    def planned_updates(hyper: RolloutHyper, total: int, num_envs: int) -> int:
        return total // (hyper.n_steps * num_envs) * hyper.updates_per_rollout(num_envs)

    @classmethod
    def check(cls, hyper: RolloutHyper, num_envs: int) -> None:
        hyper.check_rollout(num_envs)

    def advance(self, until: int) -> None:
        self.start()
        while self.env_steps < until and not self.should_stop():
            steps = min(self.hp.n_steps, (self.total - self.env_steps) // self.num_envs)
            self._collect(max(1, steps))
            if steps == self.hp.n_steps:
                start = perf_counter()
                metrics, updates = self.learner.learn()
                self.learn_seconds += perf_counter() - start
                self.metrics = {**self.metrics, **metrics}
                self.gradient_steps += updates
            else:  # the budget ends inside a rollout: its steps count, but they are too few to learn from
                self.learner.tree["data"]["count"].zero_()

    def _collect(self, steps: int) -> None:
        """Collect a rollout. Separate calls choose its first actions and store its last transition."""
        actions = self.learner.act()
        for i in range(steps):
            self.step_envs(actions, keep_invalid=True)
            if i < steps - 1:
                actions = self.learner.interact()
        self.learner.write()

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), "rollouts": self.learner.rollouts}

    def load_counters(self, counters: dict[str, Any]) -> None:
        super().load_counters(counters)
        self.learner.rollouts = int(counters.get("rollouts", 0))
