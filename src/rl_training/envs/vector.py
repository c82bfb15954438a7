"""The vector-environment interface that all training code uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from rl_training.envs.spaces import Obs
from rl_training.spec import Array, EnvSpec

Restored = Literal["exact", "restarted"]


class EnvError(RuntimeError):
    """An environment returned bad data (NaN, wrong shape) or failed repeatedly; names the sub-environment."""


class Episode(NamedTuple):
    """One finished episode of sub-environment `index`."""

    index: int  # type: ignore[assignment]  # a field, not tuple.index
    ret: float
    length: int
    success: float | None = None  # `is_success` from the info of the last step, if present


class Step(NamedTuple):
    """One transition of every sub-environment.

    `final_obs` is the true next observation of the transition; `obs` is the observation to act on next. They differ
    only in rows where an episode ended. A row with `valid` False is not a transition and must not be stored.
    The arrays are buffers: treat them as read-only. They stay intact through the next call of `step`; the call after
    that overwrites them.
    """

    obs: Obs
    final_obs: Obs
    rewards: Array  # f32[M]
    terminated: Array  # bool[M]
    truncated: Array  # bool[M]
    valid: Array  # bool[M]
    episodes: list[Episode]
    all_continue: bool = False  # True only if every row is valid and no episode ended


@dataclass
class EnvState:
    """The state of all running episodes. It consists of JSON and arrays, so checkpoints need no pickle."""

    meta: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)


class VectorEnv(ABC):
    """M sub-environments that are stepped together; see `Step` for the result of a step."""

    spec: EnvSpec
    num_envs: int
    compute_reward: Callable[..., Any] | None = None  # goal environments only: (achieved, desired, info) -> rewards
    compute_terminated: Callable[..., Any] | None = None  # likewise, where an environment has it: -> ends

    @abstractmethod
    def reset(self, *, episode: int | None = None) -> Obs:
        """Start episode 0 in every row, on later calls the next one; or `episode`, for repeatable evaluation."""

    @abstractmethod
    def step(self, actions: Array) -> Step:
        """Actions: `[M]` ints, `[M, k]` ints, or `[M, D]` floats (in [-1, 1] when the space is bounded)."""

    def restart(self, rows: Sequence[int]) -> bool:
        """Start the next episode in these rows without reporting the running one. Returns False if not supported."""
        return False

    @abstractmethod
    def current_obs(self) -> Obs:
        """The batch to act on next, as left by the last `reset`, `step` or `set_state`."""

    @abstractmethod
    def get_state(self) -> EnvState: ...

    @abstractmethod
    def set_state(self, state: EnvState) -> Restored:
        """Continue the saved episodes. "restarted" means that at least one row had to start its next episode."""

    @abstractmethod
    def close(self) -> None: ...


@lru_cache(maxsize=4096)
def _seed_block(seed: int, stream: int, n: int, block: int) -> list[int]:
    return [int(x) >> 1 for x in np.random.SeedSequence([seed, stream, n, block]).generate_state(64)]


def episode_seed(seed: int, stream: int, n: int, episode: int) -> int:
    """The reset seed (31 bits) of one episode. It depends only on these numbers, not on the other episodes.

    Seeds are generated 64 at a time, because a SeedSequence costs as much as a step of a small environment.
    """
    return _seed_block(seed, stream, n, episode // 64)[episode % 64]
