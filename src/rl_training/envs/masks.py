"""Action masks: the currently allowed actions, from the observation (`action_mask` in a Dict) or from info.

A mask has one entry per action, true if allowed: `[n]` for Discrete, the concatenated components for MultiDiscrete, one
entry per bit for MultiBinary (a forbidden bit is 0). It is passed on as one more array of the observation.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.spec import MASK, ActionSpec, Array


class InfoMask(gym.Wrapper[Any, Any, Any, Any]):
    """Moves `info["action_mask"]` into the observation."""

    def __init__(self, env: gym.Env[Any, Any], length: int) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict({"observation": env.observation_space, MASK: spaces.MultiBinary(length)})

    def reset(self, **arguments: Any) -> Any:
        obs, info = self.env.reset(**arguments)
        return self._with_mask(obs, info), info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(obs, info), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(info, dict) or MASK not in info:
            raise ValueError(f"info has no '{MASK}', but the first reset returned one; return it from every step")
        return {"observation": obs, MASK: flat_mask(info[MASK])}


def split_mask(obs: Any, masked: bool) -> tuple[Any, Any]:
    """(the observation without its mask, the mask as booleans); the mask is None if the environment has none."""
    if not masked:
        return obs, None
    rest = {name: x for name, x in obs.items() if name != MASK}
    return rest if len(rest) > 1 else next(iter(rest.values())), obs[MASK] > 0


def flat_mask(mask: Any) -> Array:
    """The mask as one vector of 0 and 1; a tuple of masks, one per component, is concatenated."""
    parts = mask if isinstance(mask, tuple | list) and len(mask) and np.ndim(mask[0]) else (mask,)
    return np.concatenate([np.asarray(part).reshape(-1) != 0 for part in parts]).astype(np.int8)


def info_mask_length(env: gym.Env[Any, Any]) -> int:
    """Length of the mask in the environment's info, or 0 if there is none. Resets the environment."""
    if isinstance(env.action_space, spaces.Box) or in_observation(env.observation_space):
        return 0
    _, info = env.reset(seed=0)
    return len(flat_mask(info[MASK])) if isinstance(info, dict) and MASK in info else 0


def in_observation(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Dict) and MASK in space.spaces


def mask_components(action: ActionSpec) -> list[slice]:
    """The slices of a mask in which at least one entry must be true."""
    if action.kind == "multi_binary":  # all bits 0 is a valid action
        return []
    ends = np.cumsum(action.nvec).tolist()
    return [slice(end - n, end) for end, n in zip(ends, action.nvec)]


def rows_without_actions(masks: Array, parts: list[slice]) -> Array:
    """Indices of the rows of `[M, n]` masks that allow no action."""
    bad = np.zeros(len(masks), np.bool_)
    for part in parts:
        bad |= ~masks[:, part].any(axis=1)
    return np.flatnonzero(bad)
