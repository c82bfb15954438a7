"""Evaluation of every seed, in environments and with random streams of its own, so that it does not affect training.
Actions are the policy's best ones, or samples from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rl_training.algorithms.acting import reset_carry, start_carry
from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.envs.given import GivenEnv, VectorSource
from rl_training.envs.vector import VectorEnv
from rl_training.envs.vectorize import make_vector_env
from rl_training.ops import rng
from rl_training.ops.tree import tree_leaves, tree_map, tree_stack
from rl_training.runtime.learners.base import over_seeds
from rl_training.spec import EnvSource

EVALUATION_STREAM = 1


class Evaluation(NamedTuple):
    returns: list[list[float]]  # [seed][episode]
    lengths: list[list[int]]
    successes: list[list[float | None]]  # None if the environment does not report it


class Evaluator:
    """Runs the same `episodes` episodes for each seed every time."""

    def __init__(
        self, algorithm: Algorithm[Any], env_id: EnvSource | GivenEnv, seeds: Sequence[int], episodes: int,
        env_kwargs: dict[str, Any] | None = None, *, max_envs: int = 20, deterministic: bool = True,
    ) -> None:  # fmt: skip
        self.algorithm, self.env_id, self.seeds, self.episodes = algorithm, env_id, tuple(seeds), episodes
        self.env_kwargs, self.deterministic = env_kwargs, deterministic
        fixed = env_id.num_envs if isinstance(env_id, VectorSource | GivenEnv) else None
        self.width = fixed or min(episodes, max_envs)
        self.quota = [episodes // self.width + (n < episodes % self.width) for n in range(self.width)]
        self._envs: VectorEnv | None = None

    @property
    def envs(self) -> VectorEnv:
        if self._envs is None:
            self._envs = make_vector_env(
                self.env_id, seeds=self.seeds, num_envs=self.width, stream=EVALUATION_STREAM,
                env_kwargs=self.env_kwargs, masks=self.algorithm.masks,
            )  # fmt: skip
        return self._envs

    @torch.no_grad()
    def run(self, train: TrainState, should_stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Evaluate states with a seed axis. Returns None if a stop was requested on the way."""
        algorithm, seeds, device = self.algorithm, len(self.seeds), self.algorithm.device
        first_key, explore, steps = rng.key_from_seed(0, EVALUATION_STREAM), not self.deterministic, 0

        def act(train: TrainState, carry: Any, obs: Any) -> Any:
            carry, action, _ = algorithm.select_action(train, carry, obs, key, explore=explore)
            return carry, action

        policy = over_seeds(act, seeds)

        def batched(x: Any) -> torch.Tensor:
            rows = torch.as_tensor(x)
            return rows.view(seeds, self.width, *rows.shape[1:]).to(device)

        carry = tree_stack([start_carry(algorithm, self.width)] * seeds)
        carries = bool(tree_leaves(carry))
        obs: Any = self.envs.reset(episode=0)
        returns: list[list[float]] = [[] for _ in range(seeds * self.width)]
        lengths: list[list[int]] = [[] for _ in range(seeds * self.width)]
        successes: list[list[float | None]] = [[] for _ in range(seeds * self.width)]
        missing = seeds * self.episodes
        while missing:
            if should_stop():
                return None
            key = (rng.fold(first_key, steps) if explore else first_key).to(device)
            steps += 1
            carry, actions = policy(train, carry, tree_map(batched, obs))
            step = self.envs.step(actions.flatten(0, 1).cpu().numpy())
            obs = step.obs
            if algorithm.sees_rewards:
                carry = algorithm.observe(carry, batched(step.rewards).clone())  # the array is used again
            for episode in step.episodes:
                if len(returns[episode.index]) < self.quota[episode.index % self.width]:
                    returns[episode.index].append(episode.ret)
                    lengths[episode.index].append(episode.length)
                    successes[episode.index].append(episode.success)
                    missing -= 1
            if carries and (step.episodes or not step.valid.all()):
                carry = reset_carry(algorithm, carry, batched(step.terminated | step.truncated | ~step.valid))

        def per_seed(rows: list[list[Any]]) -> list[list[Any]]:
            return [[x for row in rows[s * self.width : (s + 1) * self.width] for x in row] for s in range(seeds)]

        return Evaluation(per_seed(returns), per_seed(lengths), per_seed(successes))

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
            self._envs = None
