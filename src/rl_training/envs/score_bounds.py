"""The smallest and largest return that an episode can have, for environments where that is known."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

UNKNOWN = (-math.inf, math.inf)
_PER_STEP = {  # (smallest, largest) reward of a step; an episode has at most `max_episode_steps`
    r"CartPole-v\d": (0.0, 1.0),
    r"Acrobot-v\d": (-1.0, 0.0),
    r"MountainCar-v\d": (-1.0, 0.0),
    r"Pendulum-v\d": (-(math.pi**2 + 0.1 * 8.0**2 + 0.001 * 2.0**2), 0.0),
}
_PER_EPISODE = {
    r"DMControl/.*": (0.0, 1000.0),
    r"MiniGrid-.*": (0.0, 1.0),
    r"FrozenLake.*": (0.0, 1.0),
    r"popgym-.*": (-1.0, 1.0),
}


def score_bounds(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> tuple[float, float]:
    """Bounds of the return; infinite if they are not known or if arguments may change the rewards."""
    arguments = env_kwargs or {}
    if any("reward" in name for name in arguments):
        return UNKNOWN
    for form, bounds in _PER_EPISODE.items():
        if re.fullmatch(form, env_id):
            return bounds
    for form, (low, high) in _PER_STEP.items():
        if re.fullmatch(form, env_id):
            known = gym.registry.get(env_id)
            steps = arguments.get("max_episode_steps", known.max_episode_steps if known is not None else None)
            return (low * steps, high * steps) if isinstance(steps, int) and steps > 0 else UNKNOWN
    return UNKNOWN
