"""Play a generation of perturbed policies side by side, learn from their returns, repeat.

Each environment plays one member at a time. When an episode ends, its row takes the next episode of the queue. If the
queue is empty, the row goes on with the unperturbed policy until the generation is complete; its returns are ignored,
but its steps count. Every seed of a study has generations at its own pace, so it does what it would do alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.evolution.base import Evolution, EvolutionHyper
from rl_training.envs.vector import Episode, Step
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.evolution import IDLE, EvolutionLearner
from rl_training.runtime.loops.base import Loop


class EvolutionLoop(Loop):
    algorithm: Evolution[Any]
    learner: EvolutionLearner

    def make_learner(self, executor: Executor) -> EvolutionLearner:
        count = len(self.seeds)
        self.playing = np.full((count, self.num_envs), IDLE)  # the episode of the generation that each row plays
        self.scores = np.zeros((count, self.hp.episodes))
        self.taken = np.zeros(count, np.int64)  # episodes of the generation that have begun
        self.done = np.zeros(count, np.int64)  # and those that have ended
        self.generations = np.zeros(count, np.int64)
        return EvolutionLearner(self.algorithm, self.seeds, self.num_envs, self.total, executor)

    @staticmethod
    def planned_updates(hyper: EvolutionHyper, total: int, num_envs: int) -> int:
        """The number of generations is not known in advance. What compiling saves is the cost of acting: for each step
        of the environments, about a tenth of another algorithm's update."""
        return total // num_envs // 10

    def advance(self, until: int) -> None:
        if not self.started:
            self.start()
            self._begin(range(self.playing.size))
            self.learner.assign(self.playing)
        while self.env_steps < until and not self.should_stop():
            self.step_envs(self.learner.interact())

    def finish(self) -> None:
        self.learner.write()  # counts the last step, which no action follows
        self.learner.load_reset(self.envs.current_obs(), begins=False)

    def on_step(self, step: Step) -> None:
        if step.episodes:
            self._end(step.episodes)

    def _begin(self, rows: Sequence[int]) -> None:
        """Assign the next episodes of their generations to rows that begin one."""
        for row in rows:
            seed, n = divmod(row, self.num_envs)
            left = self.taken[seed] < self.hp.episodes
            self.playing[seed, n] = self.taken[seed] if left else IDLE
            self.taken[seed] += left

    def _end(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            seed, n = divmod(episode.index, self.num_envs)
            if self.playing[seed, n] != IDLE:
                bonus = self.hp.alive_bonus_offset * episode.length
                self.scores[seed, self.playing[seed, n]] = episode.ret + bonus
                self.done[seed] += 1
        before, fresh = self.playing.copy(), [episode.index for episode in episodes]
        complete = self.done == self.hp.episodes
        if complete.any():
            self._learn(complete)
            idle = np.flatnonzero((self.playing == IDLE) & complete[:, None]).tolist()
            idle = [row for row in idle if row not in fresh]
            if idle and self.envs.restart(idle):
                fresh = sorted([*fresh, *idle])
        self._begin(fresh)
        if complete.any() or not np.array_equal(before, self.playing):
            self.learner.assign(self.playing)

    def _learn(self, complete: np.ndarray) -> None:
        metrics = self.learner.learn(complete, self.scores)
        mask = torch.from_numpy(complete).to(self.learner.device)
        self.metrics = {k: torch.where(mask, v, self.metrics.get(k, torch.zeros_like(v))) for k, v in metrics.items()}
        self.taken[complete] = self.done[complete] = 0
        self.generations += complete
        self.gradient_steps = int(self.generations.min())

    def counters(self) -> dict[str, Any]:
        names = ("playing", "scores", "taken", "done", "generations")
        return {**super().counters(), "population": {name: getattr(self, name).tolist() for name in names}}

    def load_counters(self, counters: dict[str, Any]) -> None:
        super().load_counters(counters)
        for name, values in counters["population"].items():
            array: np.ndarray = getattr(self, name)
            array[...] = np.array(values, array.dtype).reshape(array.shape)
