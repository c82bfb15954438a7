"""Evaluation of every seed, in environments and with random streams of its own, so that it does not affect training.
Actions are the policy's best ones, or samples from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.acting import reset_carry, start_carry
from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.envs.given import GivenEnv, VectorSource
from rl_training.envs.vector import Step, VectorEnv
from rl_training.envs.vectorize import make_vector_env
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_leaves, tree_map, tree_stack
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import over_seeds
from rl_training.runtime.learners.staging import Staging, arrays_in
from rl_training.spec import EnvSource, EnvSpec

EVALUATION_STREAM = 1


def evaluation_vectorization(training: str, spec: EnvSpec) -> str:
    """Worker processes where training needs them too. Native vector environments, which training may use, are replaced
    by single ones: they cannot repeat episodes. Those that return images are too slow to step one after the other."""
    return "async" if training == "async" or (training == "vector" and spec.has_images) else "auto"


class Evaluation(NamedTuple):
    returns: list[list[float]]  # [seed][episode]
    lengths: list[list[int]]
    successes: list[list[float | None]]  # None if the environment does not report it


class Evaluator:
    """Runs the same `episodes` episodes for each seed every time."""

    def __init__(
        self, algorithm: Algorithm[Any], env_id: EnvSource | GivenEnv, seeds: Sequence[int], episodes: int,
        env_kwargs: dict[str, Any] | None = None, *, max_envs: int = 20, deterministic: bool = True,
        vectorization: str = "auto", executor: Executor | None = None,
    ) -> None:  # fmt: skip
        """`executor` runs the policy in the mode of the training, but compiles nothing: by default it is eager."""
        self.algorithm, self.env_id, self.seeds, self.episodes = algorithm, env_id, tuple(seeds), episodes
        self.env_kwargs, self.deterministic, self.vectorization = env_kwargs, deterministic, vectorization
        self.executor = executor or Executor("eager", algorithm.device)
        self._policy: _Policy | None = None
        fixed = env_id.num_envs if isinstance(env_id, VectorSource | GivenEnv) else None
        self.width = fixed or min(episodes, max_envs)
        self.quota = [episodes // self.width + (n < episodes % self.width) for n in range(self.width)]
        self._envs: VectorEnv | None = None

    @property
    def envs(self) -> VectorEnv:
        if self._envs is None:
            self._envs = make_vector_env(
                self.env_id, seeds=self.seeds, num_envs=self.width, stream=EVALUATION_STREAM,
                vectorization=self.vectorization, env_kwargs=self.env_kwargs, masks=self.algorithm.masks,
            )  # fmt: skip
        return self._envs

    @torch.no_grad()
    def run(self, train: TrainState, should_stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Evaluate states with a seed axis. Returns None if a stop was requested on the way."""
        seeds, obs = len(self.seeds), self.envs.reset(episode=0)
        if self._policy is None or self._policy.train is not train:
            self._policy = _Policy(self, train, obs)
        policy = self._policy
        policy.begin()
        returns: list[list[float]] = [[] for _ in range(seeds * self.width)]
        lengths: list[list[int]] = [[] for _ in range(seeds * self.width)]
        successes: list[list[float | None]] = [[] for _ in range(seeds * self.width)]
        missing = seeds * self.episodes
        while missing:
            if should_stop():
                return None
            step = self.envs.step(policy.act(obs))
            obs = step.obs
            policy.observe(step)
            for episode in step.episodes:
                if len(returns[episode.index]) < self.quota[episode.index % self.width]:
                    returns[episode.index].append(episode.ret)
                    lengths[episode.index].append(episode.length)
                    successes[episode.index].append(episode.success)
                    missing -= 1

        def per_seed(rows: list[list[Any]]) -> list[list[Any]]:
            return [[x for row in rows[s * self.width : (s + 1) * self.width] for x in row] for s in range(seeds)]

        return Evaluation(per_seed(returns), per_seed(lengths), per_seed(successes))

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
            self._envs = None


class _Policy:
    """The policy of every seed, as one function of static tensors."""

    def __init__(self, owner: Evaluator, train: TrainState, obs: Any) -> None:
        self.algorithm, self.train, self.explore = owner.algorithm, train, not owner.deterministic
        self.shape, device = (len(owner.seeds), owner.width), owner.algorithm.device

        def like(x: np.ndarray) -> Tensor:
            return torch.zeros(self.shape + x.shape[1:], dtype=torch.from_numpy(x).dtype, device=device)

        self.staging = Staging(tree_map(like, obs))
        self.rows = [x.flatten(0, 1).numpy() for x in tree_leaves(self.staging.host)]
        self.tree: dict[str, Any] = {
            "carry": tree_stack([start_carry(self.algorithm, owner.width)] * self.shape[0]),
            "steps": torch.zeros((), dtype=torch.int64, device=device),
        }
        self.start = tree_map(torch.clone, self.tree)
        self.first_key = rng.key_from_seed(0, EVALUATION_STREAM).to(device)
        self.carries = bool(tree_leaves(self.tree["carry"]))
        self._act = owner.executor.wrap_uncompiled(self._act_fn, lambda: self.tree)

    def _act_fn(self, tree: dict[str, Any], train: TrainState, obs: Any) -> Tensor:
        key = rng.fold(self.first_key, tree["steps"]) if self.explore else self.first_key

        def one(train: TrainState, carry: Any, obs: Any) -> Any:
            carry, action, _ = self.algorithm.select_action(train, carry, obs, key, explore=self.explore)
            return carry, action

        carry, actions = over_seeds(one, self.shape[0])(train, tree["carry"], obs)
        copy_into(tree["carry"], carry)
        tree["steps"].add_(1)
        return actions  # type: ignore[no-any-return]

    def begin(self) -> None:
        copy_into(self.tree, self.start)

    def act(self, obs: Any) -> np.ndarray:
        """Actions for the observations of all environments, [S * W, ...]."""
        for rows, array in zip(self.rows, arrays_in(obs), strict=True):
            rows[...] = array
        self.staging.upload()
        actions: Tensor = self._act(self.tree, self.train, self.staging.device)
        return actions.flatten(0, 1).cpu().numpy()

    def observe(self, step: Step) -> None:
        """What recurrent policies learn of a step: its rewards, and which episodes are over."""

        def batched(x: np.ndarray) -> Tensor:
            return torch.as_tensor(x).view(self.shape).to(self.staging.block.device)

        if self.algorithm.sees_rewards:
            rewards = batched(step.rewards).clone()  # the array is used again
            copy_into(self.tree["carry"], self.algorithm.observe(self.tree["carry"], rewards))
        if self.carries and (step.episodes or not step.valid.all()):
            starts = batched(step.terminated | step.truncated | ~step.valid)
            copy_into(self.tree["carry"], reset_carry(self.algorithm, self.tree["carry"], starts))
