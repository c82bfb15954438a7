"""Partially observable tasks, which need memory: the best action depends on more than the current observation."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from rl_training.spec import Array


class CartPoleNoVelocity(CartPoleEnv):
    """CartPole that shows only position and angle. The velocities must be inferred from earlier observations.

    Physics, rewards and time limit are those of CartPole-v1. A policy without memory balances for about forty steps.
    `scaled` divides both numbers by the limits at which an episode ends, for agents that do not normalise observations.
    """

    _shown = [0, 2]

    def __init__(self, scaled: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        limits = [self.x_threshold, self.theta_threshold_radians] if scaled else [1.0, 1.0]
        self._scale = np.array(limits, np.float32)
        whole = self.observation_space
        assert isinstance(whole, spaces.Box)
        low, high = (bound[self._shown] / self._scale for bound in (whole.low, whole.high))
        self.observation_space = spaces.Box(low, high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs[self._shown] / self._scale, info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[no-untyped-call]
        return obs[self._shown] / self._scale, float(reward), terminated, truncated, info


def register_memory_tasks() -> None:
    """Register the tasks with Gymnasium, if they are not yet registered."""
    env_id = "rl_training/CartPoleNoVelocity-v0"
    if env_id not in gym.registry:
        gym.register(env_id, entry_point=f"{__name__}:CartPoleNoVelocity", max_episode_steps=500)
