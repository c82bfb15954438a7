"""A small goal environment in the style of Gymnasium-Robotics, with a sparse reward and a new goal in every episode."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.spec import Array

HORIZON = 50


class PointGoal(gym.Env[Any, Any]):
    """A point with momentum moves in a box. It must reach the goal and be there when the time is up.

    The action accelerates the point, friction slows it down and walls stop it. The reward is 0 within `threshold` of
    the goal and -1 elsewhere, so an agent that never reaches the goal learns nothing from it. Episodes end only at the
    time limit; `is_success` says whether the point is at the goal.
    """

    metadata = {"render_modes": []}

    def __init__(
        self, dimensions: int = 3, threshold: float = 0.1, acceleration: float = 0.05, friction: float = 0.2
    ) -> None:
        self.distance_threshold, self._acceleration, self._friction = threshold, acceleration, friction
        point = spaces.Box(-1.0, 1.0, (dimensions,), np.float32)
        both = spaces.Box(-1.0, 1.0, (2 * dimensions,), np.float32)
        self.observation_space = spaces.Dict({"observation": both, "achieved_goal": point, "desired_goal": point})
        self.action_space = spaces.Box(-1.0, 1.0, (dimensions,), np.float32)
        self._position, self._velocity, self._goal = np.zeros((3, dimensions), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._position, self._goal = self.np_random.uniform(-1.0, 1.0, (2, *self._goal.shape)).astype(np.float32)
        self._velocity = np.zeros_like(self._goal)
        return self._obs(), {"is_success": self._success()}

    def step(self, action: Array) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        push = np.clip(np.asarray(action, np.float32), -1.0, 1.0) * np.float32(self._acceleration)
        self._velocity = self._velocity * np.float32(1.0 - self._friction) + push
        moved = self._position + self._velocity
        self._position = np.clip(moved, -1.0, 1.0)
        self._velocity = np.where(moved == self._position, self._velocity, np.float32(0.0))
        reward = float(self.compute_reward(self._position, self._goal, {}))
        return self._obs(), reward, False, False, {"is_success": self._success()}

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """0 at the goal, -1 elsewhere; for one pair of goals or a batch of them."""
        distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
        reward: Array = -np.asarray(distance > self.distance_threshold, np.float32)
        return reward

    def _success(self) -> bool:
        return bool(self.compute_reward(self._position, self._goal, {}) == 0.0)

    def _obs(self) -> dict[str, Array]:
        return {
            "observation": np.concatenate([self._position, self._velocity]),
            "achieved_goal": self._position.copy(),
            "desired_goal": self._goal.copy(),
        }


def register_goals() -> None:
    """Register the environment with Gymnasium, if it is not yet registered."""
    env_id = "rl_training/PointGoal-v0"
    if env_id not in gym.registry:
        gym.register(env_id, entry_point=f"{__name__}:PointGoal", max_episode_steps=HORIZON)
