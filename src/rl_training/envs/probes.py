"""Probe environments: so small that the true value and the best action are known in closed form."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import UserError
from rl_training.spec import Array


def _action_space(continuous: bool) -> spaces.Space[Any]:
    return spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)


class _Timed(gym.Env[Any, Any]):
    """Episodes of `horizon` steps. The observation is the time t, one-hot."""

    def __init__(self, horizon: int, continuous: bool) -> None:
        self._horizon, self._t = horizon, 0
        self.observation_space = spaces.Box(0.0, 1.0, (horizon + 1,), np.float32)
        self.action_space = _action_space(continuous)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._obs(), {}

    def _ends(self) -> bool:
        """Count a step; was it the last one of the episode?"""
        self._t += 1
        return self._t >= self._horizon

    def _obs(self) -> Any:
        obs = np.zeros(self._horizon + 1, np.float32)
        obs[self._t] = 1.0
        return obs


class ConstantReward(_Timed):
    """Reward 1 in every step for `horizon` steps, whatever the action.

    ending="truncated": the observation is constant and does not show the time limit, so with correct bootstrapping the
    value is 1 / (1 - gamma). ending="terminated": the observation is one-hot in the time t and the value is
    (1 - gamma^(horizon - t)) / (1 - gamma).
    """

    def __init__(self, horizon: int = 10, ending: str = "truncated", continuous: bool = False) -> None:
        if ending not in ("truncated", "terminated"):
            raise UserError(f"ending must be 'truncated' or 'terminated'; got '{ending}'.")
        super().__init__(horizon, continuous)
        self._terminates = ending == "terminated"
        if not self._terminates:
            self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        end = self._ends()
        return self._obs(), 1.0, end and self._terminates, end and not self._terminates, {}

    def _obs(self) -> Any:
        return super()._obs() if self._terminates else np.ones(1, np.float32)


class DelayedReward(_Timed):
    """`horizon` steps, then reward 1 and the end: the value at time t (one-hot) is gamma^(horizon - 1 - t)."""

    def __init__(self, horizon: int = 5, continuous: bool = False) -> None:
        super().__init__(horizon, continuous)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        end = self._ends()
        return self._obs(), float(end), end, False, {}


class ActionReward(_Timed):
    """A random sign is shown; the action should match it. Ends after `horizon` steps; a new sign in every step.

    Discrete: reward 1 for action 1 at sign +1 and action 0 at sign -1, else 0. Continuous: -(a - sign / 2)^2.
    `observation` picks the same task seen as a "vector", as a uint8 "image", or as a "dict" of image and vector
    (there the target is the product of both signs, so neither part suffices).
    """

    def __init__(self, horizon: int = 1, continuous: bool = False, observation: str = "vector", size: int = 16) -> None:
        super().__init__(horizon, continuous)
        self._continuous, self._kind, self._size = continuous, observation, size
        self._sign, self._other = 1, 1
        vector = spaces.Box(-1.0, 1.0, (1,), np.float32)
        image = spaces.Box(0, 255, (1, size, size), np.uint8)
        kinds: dict[str, spaces.Space[Any]] = {
            "vector": vector,
            "image": image,
            "dict": spaces.Dict({"image": image, "sign": vector}),
        }
        if observation not in kinds:
            raise UserError(f"observation must be one of {', '.join(kinds)}; got '{observation}'.")
        self.observation_space = kinds[observation]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        target = self._sign * self._other
        if self._continuous:
            reward = -((float(np.reshape(action, -1)[0]) - target / 2) ** 2)
        else:
            reward = float(int(action) == (target > 0))
        return self._obs(), reward, self._ends(), False, {}

    def _obs(self) -> Any:
        """Show a new sign."""
        self._sign = int(self.np_random.integers(2)) * 2 - 1
        if self._kind == "vector":
            return np.array([self._sign], np.float32)
        image = np.zeros((1, self._size, self._size), np.uint8)
        half = self._size // 2
        image[:, :, half:] = 255 * (self._sign > 0)  # the bright side shows the sign
        image[:, :, :half] = 255 * (self._sign < 0)
        if self._kind == "image":
            return image
        self._other = int(self.np_random.integers(2)) * 2 - 1
        return {"image": image, "sign": np.array([self._other], np.float32)}


def register_probes() -> None:
    """Register the probes with Gymnasium, if they are not yet registered."""
    probes: dict[str, tuple[str, dict[str, Any]]] = {
        "ConstantReward": ("ConstantReward", {}),
        "DelayedReward": ("DelayedReward", {}),
        "ActionReward": ("ActionReward", {}),
        "VisualSign": ("ActionReward", {"observation": "image"}),
        "DictSign": ("ActionReward", {"observation": "dict"}),
    }
    for name, (cls, kwargs) in probes.items():
        env_id = f"rl_training/{name}-v0"
        if env_id not in gym.registry:
            gym.register(env_id, entry_point=f"{__name__}:{cls}", kwargs=kwargs)
