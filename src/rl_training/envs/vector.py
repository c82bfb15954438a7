"""The one vector-environment interface that all training code uses, and the factory that builds it."""

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
    all_continue: bool = False  # True only if every row is valid and no episode ended


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
