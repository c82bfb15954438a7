"""Collect a rollout with the current policy, learn from it in epochs of shuffled minibatches, throw it away, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import OnPolicyHyper
from rl_training.envs.vector import VectorEnv
from rl_training.errors import UserError
from rl_training.runtime.executor import Executor
from rl_training.runtime.learner import RolloutLearner
from rl_training.runtime.loops.base import Loop


class OnPolicyLoop(Loop):
    def __init__(
        self, algorithm: Algorithm[Any], envs: VectorEnv, seeds: Sequence[int], total: int, executor: Executor
    ) -> None:
        super().__init__(algorithm, envs, seeds, total)
        self.hp: OnPolicyHyper = algorithm.hp
        self.learner: RolloutLearner = RolloutLearner(algorithm, seeds, self.num_envs, total, executor)
        self.rollout_size = self.hp.n_steps * self.num_envs

    @staticmethod
    def planned_updates(hyper: OnPolicyHyper, total: int, num_envs: int) -> int:
        size = hyper.n_steps * num_envs
        return total // size * hyper.n_epochs * (size // hyper.batch_size)

    @classmethod
    def check(cls, hyper: OnPolicyHyper, num_envs: int) -> None:
        size = hyper.n_steps * num_envs
        if size % hyper.batch_size:
            raise UserError(
                f"batch_size = {hyper.batch_size} must divide n_steps x num_envs = {hyper.n_steps} x {num_envs}"
            )

    def advance(self, until: int) -> None:
        self.start()
        while self.env_steps < until and not self.should_stop():
            steps = min(self.hp.n_steps, (self.total - self.env_steps) // self.num_envs)
            self._collect(max(1, steps))
            if steps == self.hp.n_steps:
                self.metrics = self.learner.learn()
                self.gradient_steps += self.learner.updates_per_rollout
            else:  # the budget ends inside a rollout: its steps are counted, but they are too few to learn from
                self.learner.tree["data"]["count"].zero_()

    def _collect(self, steps: int) -> None:
        """A rollout: the first actions are chosen alone, the last transition is stored alone."""
        actions = self.learner.act()
        for i in range(steps):
            self.step_envs(actions, keep_invalid=True)
            if i < steps - 1:
                actions = self.learner.interact()
        self.learner.write()
