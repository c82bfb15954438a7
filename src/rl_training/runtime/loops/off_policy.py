"""Collect one step, learn from replay, repeat.

A turn first chooses the actions for the new observations, then starts the updates, then steps the environments. On a
GPU, the updates run while the environments step; the order is the same on every device.
"""

from __future__ import annotations

from typing import Any

from rl_training.algorithms.hyper import OffPolicyHyper
from rl_training.errors import UserError
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.runtime.loops.phases import PhasedLoop


class OffPolicyLoop(PhasedLoop):
    learner: ReplayLearner
    turns = 0  # steps of the vector environment
    pending = False  # a transition is loaded but not yet stored

    def make_learner(self, executor: Executor) -> ReplayLearner:
        self._check_her(executor)
        return ReplayLearner(
            self.algorithm, self.seeds, self.num_envs, self.total, executor, self.envs.compute_reward,
            compute_terminated=self.envs.compute_terminated,
        )  # fmt: skip

    @staticmethod
    def planned_updates(hyper: OffPolicyHyper, total: int, num_envs: int) -> int:
        return hyper.planned_updates(max(0, total - hyper.learning_starts) // num_envs, num_envs)

    @classmethod
    def check(cls, hyper: OffPolicyHyper, num_envs: int) -> None:
        steps = getattr(hyper, "n_step", 1)
        if hyper.buffer_size < num_envs * steps:
            raise UserError(f"buffer_size = {hyper.buffer_size} cannot hold {steps} steps of {num_envs} environments")
        length = hyper.replay_length
        if length > 1 and hyper.learning_starts < length * num_envs:
            raise UserError(
                f"learning_starts = {hyper.learning_starts} must be at least {length * num_envs}:"
                f" {' + '.join(hyper.sequence_settings)} = {length} steps of each of {num_envs} environments"
            )

    def _check_her(self, executor: Executor) -> None:
        her = getattr(self.hp, "her", None)
        if her is not None and her.distance_threshold is None and executor.mode == "cudagraph":
            raise UserError(
                f"{self.algorithm.name} with her calls the environment's compute_reward, which a captured graph cannot:"
                " describe the reward by her.distance_threshold, or use execution compile"
            )

    def advance(self, until: int) -> None:
        self.start()
        learner = self.learner
        while self.env_steps < until and not self.should_stop():
            if self.position is None:
                actions = learner.interact()  # stores the last transition
                if self.hp.random_warmup and self.env_steps < self.hp.learning_starts:
                    actions = learner.random_actions()
            else:  # it was stopped while learning: the actions of this turn are chosen already
                actions = learner.chosen_actions()
            # When a finished run is extended, nothing is pending: it has learned from its last step.
            if self.pending and not self._learn():
                return
            self.step_envs(actions)
            self.turns += 1
            self.pending = True

    def _learn(self, *, to_the_end: bool = False) -> bool:
        """Run the phases that are due in this turn. Returns False if a stop was requested on the way."""
        if self.position is None and (self.turns == 0 or self.env_steps < self.hp.learning_starts):
            return True
        return self.run_phases(self.learner, self.learner.phases, self.turns, to_the_end=to_the_end)

    def finish(self) -> None:
        if self.pending:
            self.learner.write()
            self._learn(to_the_end=True)
            self.learner.load_reset(self.envs.current_obs(), begins=False)
            self.pending = False

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), "turns": self.turns, "pending": self.pending}

    def load_counters(self, counters: dict[str, Any]) -> None:
        super().load_counters(counters)
        self.turns, self.pending = int(counters["turns"]), bool(counters["pending"])
