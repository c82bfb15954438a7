"""Hard exploration: tasks with one reward at the end of a long way, which random actions almost never find.

`DeepSea` follows bsuite (Osband et al. 2020, deep_sea), `DoorKey` the task of that name in MiniGrid
(Chevalier-Boisvert et al. 2023) without its actions that change nothing here, drop and done.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import UserError
from rl_training.spec import Array


class DeepSea(gym.Env[Any, Any]):
    """Dive through a `size` x `size` grid from its upper left corner, one row a step, to the left or to the right.

    Each step to the right costs 0.01 / `size`; the last one pays 1 if all steps before went to the right as well. The
    best return is 0.99. One of the two actions is "right", drawn for every cell from `mapping_seed`, so random actions
    find the treasure once in 2^`size` episodes, and the short-sighted gain is always to the left. The observation is
    the cell, one-hot; it is zero after the last row.
    """

    metadata = {"render_modes": []}

    def __init__(self, size: int = 10, mapping_seed: int = 0, randomize_actions: bool = True) -> None:
        if size < 1:
            raise UserError(f"size = {size}: must be at least 1")
        self.size, self._row, self._column = size, 0, 0
        self._right = np.ones((size, size), np.int64)  # the action that moves right, in every cell
        if randomize_actions:
            self._right = np.random.default_rng(mapping_seed).integers(0, 2, (size, size))
        self.observation_space = spaces.Box(0.0, 1.0, (size * size,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._row = self._column = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        right, last = int(action) == self._right[self._row, self._column], self.size - 1
        reward = float(right and self._column == last) - (0.01 / self.size) * right
        self._column = min(self._column + 1, last) if right else max(self._column - 1, 0)
        self._row += 1
        return self._obs(), float(reward), self._row == self.size, False, {}

    def _obs(self) -> Array:
        obs = np.zeros((self.size, self.size), np.float32)
        if self._row < self.size:
            obs[self._row, self._column] = 1.0
        return obs.ravel()

    def get_state(self) -> dict[str, Any]:
        return {"row": self._row, "column": self._column}

    def set_state(self, state: dict[str, Any]) -> None:
        self._row, self._column = int(state["row"]), int(state["column"])


EMPTY, WALL, KEY, LOCKED, OPEN, GOAL = range(6)  # what a square holds
TURN_LEFT, TURN_RIGHT, FORWARD, PICK_UP, UNLOCK = range(5)  # the actions
AHEAD = ((0, 1), (1, 0), (0, -1), (-1, 0))  # (row, column) of a step to the east, south, west and north


class DoorKey(gym.Env[Any, Any]):
    """Take the key, unlock the door in the wall, and reach the goal in the lower right corner of the other room.

    Wall, door, key and agent have new places in every episode. The actions are: turn left, turn right, go forward, pick
    up the key ahead, unlock the door ahead. Reaching the goal pays 1 less 0.9 times the share of the `max_steps` (by
    default 10 `size`^2) that was used; nothing else pays.

    `partial` shows the `view` x `view` squares in front of the agent (through walls), with the agent in the middle of
    the nearest row, and whether it has the key. Otherwise the observation is the whole grid. Either way it is a vector
    of zeros and ones: one plane for each kind of object and, with the whole grid, one for each direction that the agent
    may face.
    """

    metadata = {"render_modes": []}

    def __init__(self, size: int = 8, partial: bool = True, view: int = 7, max_steps: int | None = None) -> None:
        if size < 5:
            raise UserError(f"size = {size}: must be at least 5, for two rooms and a wall between them")
        if view < 3 or view % 2 == 0:
            raise UserError(f"view = {view}: must be odd and at least 3")
        if max_steps is not None and max_steps < 1:
            raise UserError(f"max_steps = {max_steps}: must be at least 1")
        self.size, self.view, self._partial = size, view, partial
        self.max_steps = 10 * size**2 if max_steps is None else max_steps
        self.grid = np.full((size, size), EMPTY, np.int64)
        self.agent, self.direction, self.has_key, self._time = (1, 1), 0, False, 0
        length = 5 * view**2 + 1 if partial else 9 * size**2
        self.observation_space = spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        random, last = self.np_random, self.size - 1
        self.grid = np.full((self.size, self.size), WALL, np.int64)
        self.grid[1:last, 1:last] = EMPTY
        wall = int(random.integers(2, last - 1))
        self.grid[:, wall] = WALL
        self.grid[int(random.integers(1, last - 1)), wall] = LOCKED
        self.grid[last - 1, last - 1] = GOAL
        room = [(row, column) for row in range(1, last) for column in range(1, wall)]
        agent, key = random.choice(len(room), 2, replace=False)
        self.grid[room[key]], self.agent = KEY, room[agent]
        self.direction, self.has_key, self._time = int(random.integers(4)), False, 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._time += 1
        row, column = (x + dx for x, dx in zip(self.agent, AHEAD[self.direction]))
        ahead = self.grid[row, column]
        if action in (TURN_LEFT, TURN_RIGHT):
            self.direction = (self.direction + (1 if action == TURN_RIGHT else -1)) % 4
        elif action == FORWARD and ahead in (EMPTY, OPEN, GOAL):
            self.agent = (row, column)
        elif action == PICK_UP and ahead == KEY:
            self.grid[row, column], self.has_key = EMPTY, True
        elif action == UNLOCK and ahead == LOCKED and self.has_key:
            self.grid[row, column] = OPEN
        reached = bool(self.grid[self.agent] == GOAL)
        reward = 1.0 - 0.9 * self._time / self.max_steps if reached else 0.0
        return self._obs(), reward, reached, not reached and self._time >= self.max_steps, {}

    def _obs(self) -> Array:
        if not self._partial:
            planes = [self.grid == kind for kind in (WALL, KEY, LOCKED, OPEN, GOAL)]
            facing = np.zeros((4, self.size, self.size), bool)
            row, column = self.agent
            facing[self.direction, row, column] = True
            return np.stack([*planes, *facing]).astype(np.float32).ravel()
        squares = self.seen()
        planes = [squares == kind for kind in (WALL, KEY, LOCKED, OPEN, GOAL)]
        return np.append(np.stack(planes).ravel(), self.has_key).astype(np.float32)

    def seen(self) -> Array:
        """The squares ahead of the agent, which faces up from the middle of the last row. Beyond the grid is wall."""
        far, side, (row, column) = self.view - 1, self.view // 2, self.agent
        padded = np.pad(self.grid, far, constant_values=WALL)
        around = np.rot90(padded[row : row + 2 * far + 1, column : column + 2 * far + 1], (self.direction + 1) % 4)
        squares: Array = around[: far + 1, far - side : far + side + 1]
        return squares

    def get_state(self) -> dict[str, Any]:
        return {
            "grid": self.grid.copy(), "agent": list(self.agent), "direction": self.direction, "key": self.has_key,
            "time": self._time,
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        self.grid, self.agent = np.array(state["grid"], np.int64), (int(state["agent"][0]), int(state["agent"][1]))
        self.direction, self.has_key, self._time = int(state["direction"]), bool(state["key"]), int(state["time"])


def register_exploration_tasks() -> None:
    """Register the tasks with Gymnasium, if they are not yet registered."""
    for name in ("DeepSea", "DoorKey"):
        env_id = f"rl_training/{name}-v0"
        if env_id not in gym.registry:
            gym.register(env_id, entry_point=f"{__name__}:{name}")
