"""Play a generation of perturbed policies side by side, learn from their returns, repeat.

Each environment plays one member at a time; when an episode ends, its row takes the next episode of the queue. A row
that finds the queue empty goes on with the unperturbed policy, unheard (its steps count, for they are taken), until the
generation is complete; then it begins anew. Every seed of a study has its generations at its own pace, so that it does
what it would do alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Batch, Phase, TrainState
from rl_training.algorithms.evolution import Evolution, EvolutionHyper
from rl_training.data.storage import require_memory
from rl_training.envs.vector import Episode, Step, VectorEnv
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_map
from rl_training.runtime.executor import Executor
from rl_training.runtime.learner import LEARN, SAMPLE, Learner
from rl_training.runtime.loops.base import Loop

IDLE = -1


class Population:
    """The tensors of a generation, where other learners keep transitions: [S, ...] each."""

    def __init__(self, algorithm: Evolution[Any], num_envs: int) -> None:
        self.algorithm, self.num_envs, self.columns = algorithm, num_envs, dict[str, Any]()

    def init(self, seeds: int, device: torch.device) -> dict[str, Any]:
        hp, size = self.algorithm.hp, self.algorithm.nets["policy"].size
        require_memory(4 * seeds * size * (hp.n_delta + self.num_envs), device, f"a generation of {seeds} seeds")
        seen = tree_map(lambda x: torch.stack([x] * seeds).to(device), self.algorithm.no_observations())
        return {
            "noise": torch.zeros(seeds, hp.n_delta, size, device=device),
            "members": torch.zeros(seeds, self.num_envs, size, device=device),  # parameters that each row acts with
            "episodes": torch.full((seeds, self.num_envs), IDLE, dtype=torch.int64, device=device),
            "scores": torch.zeros(seeds, hp.episodes, device=device),
            "complete": torch.zeros(seeds, dtype=torch.bool, device=device),
            "seen": seen,
        }

    def write(self, data: dict[str, Any], row: dict[str, Any], advance: Tensor) -> None:
        """Transitions are not kept."""

    def written(self, data: dict[str, Any], count: int | None = None) -> dict[str, Any]:
        """All of it: a generation has one size."""
        return data

    def cut(self, data: dict[str, Any]) -> None:
        """Rows whose episode was lost play theirs again."""


class EvolutionLearner(Learner):
    def __init__(
        self, algorithm: Evolution[Any], seeds: Sequence[int], num_envs: int, horizon: int, executor: Executor
    ) -> None:
        store: Any = Population(algorithm, num_envs)
        super().__init__(algorithm, store, seeds, horizon, executor)
        self.evolution, self.phases = algorithm, algorithm.phases()
        noise = [self._noise(self.train.step[i], key) for i, key in enumerate(self.tree["keys"])]
        self.tree["data"]["noise"].copy_(torch.stack(noise))
        self._assign = executor.wrap(self.assign_fn, self.small_state)
        self._steps = {"update": executor.wrap(self.update_fn, self.small_state)}

    def _noise(self, step: Tensor, key: Tensor) -> Tensor:
        return self.evolution.noise(rng.fold(rng.fold(key, SAMPLE), step))

    def act_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> Tensor:
        """The actions of the members, each in its row; the states of those that count are noted."""

        def one(train: TrainState, data: dict[str, Any], obs: Any) -> Any:
            seen = self.evolution.note(data["seen"], obs, data["episodes"] >= 0)
            return self.evolution.act_as(train, data["members"], obs), seen

        actions, seen = self.per_seed(one)(tree["train"], tree["data"], inputs["obs"])
        copy_into(tree["data"]["seen"], seen)
        tree["actions"].copy_(actions)
        tree["steps"].add_(1)
        chosen: Tensor = tree["actions"]
        return chosen

    def assign_fn(self, tree: dict[str, Any]) -> dict[str, Tensor]:
        """Give each row the parameters of the member whose episode it plays."""

        def one(train: TrainState, data: dict[str, Any]) -> Tensor:
            numbers = torch.div(data["episodes"], self.evolution.hp.n_eval_episodes, rounding_mode="floor")
            return self.evolution.members(train, data["noise"], numbers)

        tree["data"]["members"].copy_(self.per_seed(one)(tree["train"], tree["data"]))
        return {}

    def batch(self, train: TrainState, data: dict[str, Any], key: Tensor) -> tuple[TrainState, Batch]:
        return self.evolution.prepare(train, data, key)

    def update_fn(self, tree: dict[str, Any]) -> dict[str, Tensor]:
        """Learn from the generations that are complete, and draw the next ones; other seeds stay as they are."""

        def one(train: TrainState, data: dict[str, Any], key: Tensor) -> Any:
            step_key = rng.fold(rng.fold(key, LEARN), train.step)
            prepared, batch = self.batch(train, data, step_key)
            new, aux = self.phases[0].step(prepared, batch, step_key)
            empty = tree_map(torch.zeros_like, data["seen"])
            after = (new, self._noise(new.step, key), empty)
            before = (train, data["noise"], data["seen"])
            return tree_map(lambda a, b: torch.where(data["complete"], a, b), after, before), aux.metrics

        data, before = tree["data"], tree["train"].step.clone()
        (train, noise, seen), metrics = self.per_seed(one)(tree["train"], data, tree["keys"])
        copy_into(tree["train"], train)
        copy_into([data["noise"], data["seen"]], [noise, seen])
        self.note_metrics(tree, before, {k: torch.where(data["complete"], v, 0.0) for k, v in metrics.items()})
        return metrics  # type: ignore[no-any-return]

    def minibatch(self, phase: Phase, *_: Any) -> Batch:
        """What the next update reads, of every seed."""
        return self.per_seed(lambda *trees: self.batch(*trees)[1])(  # type: ignore[no-any-return]
            self.train, self.tree["data"], self.tree["keys"]
        )

    def assign(self, episodes: np.ndarray) -> None:
        self.tree["data"]["episodes"].copy_(torch.from_numpy(episodes))
        self._assign(self.tree)

    def learn(self, complete: np.ndarray, scores: np.ndarray) -> dict[str, Tensor]:
        self.tree["data"]["complete"].copy_(torch.from_numpy(complete))
        self.tree["data"]["scores"].copy_(torch.from_numpy(scores))
        metrics: dict[str, Tensor] = self._steps["update"](self.tree)
        return metrics


class EvolutionLoop(Loop):
    def __init__(
        self, algorithm: Evolution[Any], envs: VectorEnv, seeds: Sequence[int], total: int, executor: Executor
    ) -> None:
        super().__init__(algorithm, envs, seeds, total)
        self.hp: EvolutionHyper = algorithm.hp
        self.learner: EvolutionLearner = EvolutionLearner(algorithm, seeds, self.num_envs, total, executor)
        count = len(self.seeds)
        self.playing = np.full((count, self.num_envs), IDLE)  # episode of the generation that each row plays
        self.scores = np.zeros((count, self.hp.episodes))
        self.taken = np.zeros(count, np.int64)  # episodes of the generation that were begun
        self.done = np.zeros(count, np.int64)  # and those that have ended
        self.generations = np.zeros(count, np.int64)

    @staticmethod
    def planned_updates(hyper: EvolutionHyper, total: int, num_envs: int) -> int:
        """How many generations fit in is not known before. Compiling gains what acting costs: about a tenth of what an
        update of other algorithms does, for each step of the environments."""
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
        """Rows whose episode begins take the next ones of their generations."""
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

    def load(self, tensors: Any, counters: dict[str, Any]) -> Any:
        for name, values in counters["population"].items():
            array: np.ndarray = getattr(self, name)
            array[...] = np.array(values, array.dtype).reshape(array.shape)
        return super().load(tensors, counters)
