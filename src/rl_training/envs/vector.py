"""The one vector-environment interface that all training code uses, and the factory that builds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np

from rl_training.envs.spaces import Array, Obs
from rl_training.envs.spec import EnvSpec
from rl_training.errors import UserError, did_you_mean

Restored = Literal["exact", "restarted"]


class EnvError(RuntimeError):
    """An environment that broke its promises (NaN, wrong shape) or failed repeatedly; names the sub-environment."""


class Episode(NamedTuple):
    """One finished episode of sub-environment `index`."""

    index: int  # type: ignore[assignment]  # a field, not tuple.index
    ret: float
    length: int
    success: float | None = None  # `is_success` in the info of its last step, where there is one


class Step(NamedTuple):
    """One transition of every sub-environment.

    `final_obs` is the true next observation of the transition, `obs` the one to act on next; they differ only in rows
    where an episode ended. A row with `valid` False is no transition and must not be stored.
    The arrays are buffers: read-only for the caller, intact until the call of `step` after the next one begins.
    """

    obs: Obs
    final_obs: Obs
    rewards: Array  # f32[M]
    terminated: Array  # bool[M]
    truncated: Array  # bool[M]
    valid: Array  # bool[M]
    episodes: list[Episode]
    uneventful: bool = False  # True promises that every row is valid and that no episode ended


@dataclass
class EnvState:
    """Everything needed to continue all running episodes: JSON and arrays only, so no checkpoint holds a pickle."""

    meta: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)


class VectorEnv(ABC):
    """M sub-environments stepped together; see `Step` for what a step means."""

    spec: EnvSpec
    num_envs: int
    compute_reward: Callable[..., Any] | None = None  # of goal environments: (achieved, desired, info) -> rewards

    @abstractmethod
    def reset(self, *, episode: int | None = None) -> Obs:
        """Start an episode everywhere: 0 at first, then the next; or number `episode` (repeatable evaluation)."""

    @abstractmethod
    def step(self, actions: Array) -> Step:
        """Actions: `[M]` ints, `[M, k]` ints, or `[M, D]` floats (in [-1, 1] when the space is bounded)."""

    def restart(self, rows: Sequence[int]) -> bool:
        """Begin the next episode in these rows now; the running ones are not reported. False: this kind cannot."""
        return False

    @abstractmethod
    def current_obs(self) -> Obs:
        """The batch to act on next: what the last `reset`, `step` or `set_state` left."""

    @abstractmethod
    def get_state(self) -> EnvState: ...

    @abstractmethod
    def set_state(self, state: EnvState) -> Restored:
        """Continue the saved episodes; "restarted" when at least one could not be and began its next episode."""

    @abstractmethod
    def close(self) -> None: ...


@lru_cache(maxsize=4096)
def _seed_block(seed: int, stream: int, n: int, block: int) -> list[int]:
    return [int(x) >> 1 for x in np.random.SeedSequence([seed, stream, n, block]).generate_state(64)]


def episode_seed(seed: int, stream: int, n: int, episode: int) -> int:
    """The reset seed (31 bits) of one episode: a function of its place only, whatever the other episodes did.

    Drawn 64 at a time, because a SeedSequence costs as much as a step of a small environment.
    """
    return _seed_block(seed, stream, n, episode // 64)[episode % 64]


def make_vector_env(
    env_id: str | Callable[[], gym.Env[Any, Any]],
    *,
    seeds: Sequence[int],
    num_envs: int,
    stream: int = 0,
    vectorization: str = "auto",
    env_kwargs: dict[str, Any] | None = None,
    timeout: float = 60.0,
    masks: bool = False,
) -> VectorEnv:
    """`len(seeds) * num_envs` sub-environments; number i belongs to `seeds[i // num_envs]`.

    `stream` separates the episodes of training (0) from those of evaluation (1).
    "auto" means "sync": a loop in this process, fastest for steps below roughly 100 us (classic control, Box2D, small
    MuJoCo). "async" pays when a step costs more (pixels, heavy physics) and cores are free; `timeout` is how long a
    worker may take for one step. "vector" uses the environment's own vectorised implementation, "envpool" EnvPool's.
    `masks`: keep an environment's action mask apart from what networks read (`envs.masks`).
    """
    from rl_training.envs.native import make_native
    from rl_training.envs.sync import SyncVectorEnv
    from rl_training.envs.workers import AsyncVectorEnv

    modes = ("auto", "sync", "async", "vector", "envpool")
    if vectorization not in modes:
        near = did_you_mean(vectorization, modes)
        raise UserError(f"vectorization '{vectorization}' is unknown: use one of {', '.join(modes)}.{near}")
    if num_envs < 1 or not seeds:
        raise UserError(
            f"num_envs must be at least 1 and seeds not empty; got num_envs={num_envs}, seeds={list(seeds)}."
        )
    if min(seeds) < 0:
        raise UserError(f"seeds must not be negative; got {min(seeds)}.")
    if vectorization in ("vector", "envpool"):
        return make_native(env_id, vectorization, seeds, num_envs, stream, env_kwargs or {}, masks)
    places = [(int(seed), stream, n) for seed in seeds for n in range(num_envs)]
    if vectorization == "async":
        return AsyncVectorEnv(env_id, places, env_kwargs, timeout=timeout, masks=masks)
    return SyncVectorEnv(env_id, places, env_kwargs, masks)
