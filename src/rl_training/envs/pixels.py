"""An image task that is small enough to train on a CPU and has a known best return."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.spec import Array

GRID, CELL = 7, 2  # cells per side, and pixels per side of a cell
HEIGHT = 3  # height of the paddle in cells
FALL = GRID - 1  # steps that a ball falls: as many as the paddle needs from wall to wall


class TinyPixels(gym.Env[Any, Any]):
    """Catch balls in an image of 14 x 14 pixels: the ball and its trail are red, a tall paddle is green.

    Balls fall one at a time, by one cell per step. The actions move the paddle by one cell: left, stay, right. A ball
    that lands on the paddle is worth 1, in the frame that shows it there. Every ball can be caught, so the best return
    is the number of balls. A policy that ignores the image catches one ball in seven.

    Ball and paddle are large on purpose. A world model first predicts the mean image, and it takes longer to learn an
    object that contributes less to the squared error. With `visible`, the ball is drawn only in the first `visible`
    rows of its fall, and its position must be remembered after that.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}

    def __init__(self, balls: int = 3, visible: int = GRID, render_mode: str | None = None) -> None:
        self.optimal_return = float(balls)
        self.render_mode = render_mode
        self._balls, self._visible = balls, visible
        self.observation_space = spaces.Box(0, 255, (3, GRID * CELL, GRID * CELL), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._paddle = self._ball = self._row = self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._paddle = int(self.np_random.integers(GRID))
        self._left = self._balls
        self._drop()
        return self._image(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._paddle = min(max(self._paddle + int(action) - 1, 0), GRID - 1)
        if self._row == FALL:
            self._drop()
            return self._image(), 0.0, False, False, {}
        self._row += 1
        landed = self._row == FALL
        self._left -= landed
        return self._image(), float(landed and self._paddle == self._ball), self._left == 0, False, {}

    def _drop(self) -> None:
        self._ball, self._row = int(self.np_random.integers(GRID)), 0

    def _image(self) -> Array:
        cells = np.zeros((3, GRID, GRID), np.uint8)
        if self._row < self._visible:
            cells[0, : self._row + 1, self._ball] = 255
        cells[1, -HEIGHT:, self._paddle] = 255
        image: Array = cells.repeat(CELL, 1).repeat(CELL, 2)
        return image

    def render(self) -> Array:
        image: Array = self._image().transpose(1, 2, 0).repeat(16, 0).repeat(16, 1)
        return image

    def get_state(self) -> dict[str, int]:
        return {"paddle": self._paddle, "ball": self._ball, "row": self._row, "left": self._left}

    def set_state(self, state: dict[str, int]) -> None:
        self._paddle, self._ball, self._row, self._left = (state[k] for k in ("paddle", "ball", "row", "left"))


def register_pixels() -> None:
    """Register the environment with Gymnasium, if it is not yet registered."""
    env_id = "rl_training/TinyPixels-v0"
    if env_id not in gym.registry:
        gym.register(env_id, entry_point=f"{__name__}:TinyPixels")
