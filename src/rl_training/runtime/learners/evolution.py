"""Learning by evolution strategies: each environment acts with the parameters of one member of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.evolution.base import Evolution
from rl_training.algorithms.phases import RolloutPhase
from rl_training.data.storage import Batch, require_memory
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_map
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import LEARN, SAMPLE, Learner, one_seed

IDLE = -1


class Population:
    """The tensors of a generation ([S, ...] each). It takes the place of other learners' store of transitions."""

    def __init__(self, algorithm: Evolution[Any], num_envs: int) -> None:
        self.algorithm, self.num_envs, self.columns = algorithm, num_envs, dict[str, Any]()

    def init(self, seeds: int, device: torch.device) -> dict[str, Any]:
        hp, size = self.algorithm.hp, self.algorithm.nets["policy"].size
        require_memory(4 * seeds * size * (hp.n_delta + self.num_envs), device, f"a generation of {seeds} seeds")
        seen = tree_map(lambda x: torch.stack([x] * seeds).to(device), self.algorithm.no_observations())
        return {
            "noise": torch.zeros(seeds, hp.n_delta, size, device=device),
            "members": torch.zeros(seeds, self.num_envs, size, device=device),  # the parameters that each row acts with
            "episodes": torch.full((seeds, self.num_envs), IDLE, dtype=torch.int64, device=device),
            "scores": torch.zeros(seeds, hp.episodes, device=device),
            "complete": torch.zeros(seeds, dtype=torch.bool, device=device),
            "seen": seen,
        }

    def write(self, data: dict[str, Any], row: dict[str, Any], advance: Tensor) -> None:
        """Nothing: transitions are not kept."""

    def written(self, data: dict[str, Any], count: int | None = None) -> dict[str, Any]:
        """All tensors: a generation always has the same size."""
        return data

    def cut(self, data: dict[str, Any]) -> None:
        """Nothing: rows whose episode was lost play it again."""


class EvolutionLearner(Learner):
    def __init__(
        self, algorithm: Evolution[Any], seeds: Sequence[int], num_envs: int, horizon: int, executor: Executor
    ) -> None:
        store: Any = Population(algorithm, num_envs)
        super().__init__(algorithm, store, seeds, horizon, executor)
        self.evolution, self.phases = algorithm, (RolloutPhase("update", algorithm.train_step),)
        noise = [self._noise(self.train.step[i], key) for i, key in enumerate(self.tree["keys"])]
        self.tree["data"]["noise"].copy_(torch.stack(noise))
        self._assign = executor.wrap(self.assign_fn, self.small_state)
        self._steps = {"update": executor.wrap(self.update_fn, self.small_state)}

    def _noise(self, step: Tensor, key: Tensor) -> Tensor:
        return self.evolution.noise(rng.fold(rng.fold(key, SAMPLE), step))

    def act_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> Tensor:
        """The actions of the members, each in its row. Observations in rows that count enter the statistics."""

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
        """Seeds whose generation is complete learn from it and draw the next one; the others stay as they are."""

        def one(train: TrainState, data: dict[str, Any], key: Tensor) -> Any:
            step_key = rng.fold(rng.fold(key, LEARN), train.step)
            prepared, batch = self.batch(train, data, step_key)
            new, aux = self.evolution.train_step(prepared, batch, step_key)
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

    def _next_batch(self, index: int, phase: RolloutPhase, train: TrainState, key: Tensor, *inputs: Any) -> Batch:
        return self.batch(train, one_seed(self.tree["data"], index), key)[1]

    def assign(self, episodes: np.ndarray) -> None:
        self.tree["data"]["episodes"].copy_(torch.from_numpy(episodes))
        self._assign(self.tree)

    def learn(self, complete: np.ndarray, scores: np.ndarray) -> dict[str, Tensor]:
        self.tree["data"]["complete"].copy_(torch.from_numpy(complete))
        self.tree["data"]["scores"].copy_(torch.from_numpy(scores))
        metrics: dict[str, Tensor] = self._steps["update"](self.tree)
        return metrics
