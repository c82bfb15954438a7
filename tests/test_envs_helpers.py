"""Environments shared by the tests. They are at module level, so that worker processes can import them."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Counting(gym.Env):
    """The observation is (episode key, t), which exposes phantom steps. Episodes terminate or truncate at random."""

    def __init__(self, mean: float = 4.0) -> None:
        self.observation_space = spaces.Box(0, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.key, self.t, self.mean = -1.0, 0, mean

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.key, self.t = float(self.np_random.integers(1 << 20)), 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        end = self.np_random.random() < 1 / self.mean
        cut = bool(end and self.np_random.random() < 0.5)
        return self._obs(), float(self.t), bool(end and not cut), cut, {}

    def _obs(self):
        return np.array([self.key, self.t], np.float32)


class Walk(Counting):
    """A stochastic environment with its own state; the library saves the random generator."""

    def get_state(self):
        return {"place": np.array([self.key, self.t]), "note": "as is", "big": 1 << 90}

    def set_state(self, state):
        assert state["note"] == "as is"
        assert state["big"] == 1 << 90
        self.key, self.t = float(state["place"][0]), int(state["place"][1])


class Clock(Counting):
    """An environment that ignores its seed: replaying the actions gives different observations."""

    def _obs(self):
        return np.array([time.perf_counter() % 1000, self.t], np.float32)


class Faulty(Counting):
    """Fails in the given way when action 1 is taken at step 3 of an episode, or always."""

    def __init__(self, fault: str, always: bool = False) -> None:
        super().__init__(mean=1e9)
        self.fault, self.always = fault, always

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if action == 1 and (self.always or self.t == 3):
            if self.fault == "raise":
                raise RuntimeError("the simulator broke")
            if self.fault == "die":
                os._exit(3)
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "nan":
                obs[1] = np.nan
            if self.fault == "reward":
                reward = float("inf")
            if self.fault == "text":
                reward = "one"
            if self.fault == "shape":
                obs = np.zeros(3, np.float32)
        return obs, reward, terminated, truncated, info


def counting() -> gym.Env:
    return Counting()


def walk() -> gym.Env:
    return gym.wrappers.TimeLimit(Walk(), 6)


def clock() -> gym.Env:
    return Clock()


def raising() -> gym.Env:
    return Faulty("raise")


def dying() -> gym.Env:
    return Faulty("die")


def hanging() -> gym.Env:
    return Faulty("hang")


def always_raising() -> gym.Env:
    return Faulty("raise", always=True)


def nan_obs() -> gym.Env:
    return Faulty("nan")


def inf_reward() -> gym.Env:
    return Faulty("reward")


def text_reward() -> gym.Env:
    return Faulty("text")


def wrong_shape() -> gym.Env:
    return Faulty("shape")


def snapshot(step) -> list:
    """A copy of a step's arrays."""
    arrays = [x if isinstance(x, dict) else {"x": x} for x in step[:6]]
    return [{k: a.copy() for k, a in d.items()} for d in arrays] + [list(step.episodes)]


def same(a: list, b: list) -> bool:
    arrays = all(x[k].tobytes() == y[k].tobytes() for x, y in zip(a[:6], b[:6]) for k in x)
    return arrays and a[6] == b[6]


def random_actions(spec, m: int, steps: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    action = spec.action
    if action.kind == "discrete":
        return [rng.integers(0, action.n, m) for _ in range(steps)]
    return [rng.uniform(-1, 1, (m, action.dim)).astype(np.float32) for _ in range(steps)]
