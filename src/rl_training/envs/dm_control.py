"""The DeepMind Control Suite (Tassa et al. 2018) through shimmy: `DMControl/walker-walk-v0` and so on.

Unlike shimmy's own ids (`dm_control/walker-walk-v0`), these give the observation as one vector or image and can repeat
actions, as published comparisons do. Every episode lasts 1000 steps of the suite. Rewards are in [0, 1], so the return
is at most 1000.
"""

from __future__ import annotations

import importlib
import re
from importlib.metadata import version
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import UserError, did_you_mean
from rl_training.spec import Array

DM_CONTROL_ID = re.compile(r"DMControl/([a-z0-9_]+)-([a-z0-9_]+)-v0")
EXTRA = "pip install 'rl-training[dm-control]'"


def _suite() -> Any:
    try:
        importlib.import_module("shimmy")
        return importlib.import_module("dm_control.suite")
    except ImportError as error:
        raise UserError(f"dm_control environments need the dm-control extra ({error}): {EXTRA}") from None


class DMControl(gym.Env[Any, Any]):
    """One task of the suite. The observation is the concatenation of all the task's observations; with `pixels`, it is
    an image [size, size, 3] from `camera`, or the last `stack` images, newest last: [3 * stack, size, size]. Each
    action is repeated `action_repeat` times and the rewards are summed."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}

    def __init__(
        self, domain: str, task: str, *, pixels: bool = False, size: int = 64, camera: int = 0,
        action_repeat: int = 1, stack: int = 1, render_mode: str | None = None,
    ) -> None:  # fmt: skip
        if stack < 1 or (stack > 1 and not pixels):
            raise UserError(f"stack = {stack}: give the number of images in an observation, with pixels set to true")
        suite = _suite()
        shimmy = importlib.import_module("shimmy.dm_control_compatibility")
        try:
            loaded = suite.load(domain, task)
        except AttributeError as error:  # a field that newer versions of MuJoCo removed
            raise UserError(
                f"dm_control {version('dm_control')} does not work with mujoco {version('mujoco')} ({error}): {EXTRA}"
            ) from None
        self._env = shimmy.DmControlCompatibilityV0(loaded)
        self._physics, self._repeat, self._camera = loaded.physics, action_repeat, camera
        self._size = size if pixels else None
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1.0, 1.0, self._env.action_space.shape, np.float32)
        self._low, self._high = self._env.action_space.low, self._env.action_space.high
        if pixels:
            self._stack = np.zeros((stack, 3, size, size), np.uint8)
            shape = (3 * stack, size, size) if stack > 1 else (size, size, 3)
            self.observation_space = spaces.Box(0, 255, shape, np.uint8)
            self._draw(size)
        else:
            length = sum(int(np.prod(space.shape)) for space in self._env.observation_space.values())
            self.observation_space = spaces.Box(-np.inf, np.inf, (length,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        obs, _ = self._env.reset(seed=seed)
        return self._obs(obs, first=True), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        action = self._low + (np.asarray(action, np.float64) + 1.0) * 0.5 * (self._high - self._low)
        total = 0.0
        for _ in range(self._repeat):
            obs, reward, terminated, truncated, _ = self._env.step(action)
            total += float(reward or 0.0)
            if terminated or truncated:
                break
        return self._obs(obs), total, bool(terminated), bool(truncated), {}

    def _obs(self, parts: dict[str, Any], first: bool = False) -> Array:
        if self._size is not None:
            image, stack = self._draw(self._size), self._stack
            if len(stack) == 1:
                return image
            stack[:] = image.transpose(2, 0, 1) if first else np.roll(stack, -1, 0)
            stack[-1] = image.transpose(2, 0, 1)
            flat: Array = stack.reshape(self.observation_space.shape).copy()
            return flat
        vector: Array = np.concatenate([np.ravel(part) for part in parts.values()]).astype(np.float32)
        return vector

    def _draw(self, size: int) -> Array:
        try:
            image: Array = self._physics.render(height=size, width=size, camera_id=self._camera)
        except Exception as error:  # each OpenGL backend fails in its own way without a display
            raise UserError(
                f"dm_control cannot render images on this machine ({type(error).__name__}: {str(error)[:120]});"
                " set the environment variable MUJOCO_GL to egl, osmesa or glfw"
            ) from None
        return image

    def render(self) -> Array:
        return self._draw(256)

    def close(self) -> None:
        self._env.close()


def register_dm_control(env_id: str) -> None:
    """Register `DMControl/<domain>-<task>-v0` with Gymnasium on demand; other ids are ignored."""
    match = DM_CONTROL_ID.fullmatch(env_id)
    if env_id.startswith("dm_control/"):
        _suite()  # importing shimmy registers these ids
    if match is None or env_id in gym.registry:
        return
    known = [f"{domain}-{task}" for domain, task in _suite().ALL_TASKS]
    name = f"{match[1]}-{match[2]}"
    if name not in known:
        raise UserError(f"unknown dm_control task '{name}'.{did_you_mean(name, known)}")
    gym.register(env_id, entry_point=f"{__name__}:DMControl", kwargs={"domain": match[1], "task": match[2]})
