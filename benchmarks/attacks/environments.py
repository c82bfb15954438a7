"""Environments that raise, exit, move or return rubbish: the run ends with one sentence, or goes on.

Host environments are attacked in this process and in workers, tensor environments inside the graph.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from attacks.base import Attack, Outcome, command
from rl_training.envs.tensor.classic import CartPole
from rl_training.envs.tensor.table import register_tensor_env

ENV = "Attacked-v0"


class _Weird(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


RAISED: list[Any] = [
    ValueError("bad\nvalue \x1b[31m"), KeyError("x"), ZeroDivisionError(), AssertionError(), OSError(28, "No space"),
    MemoryError(), RecursionError("deep"), StopIteration(), NotImplementedError(), SystemExit(0), SystemExit(3),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "x"), SystemExit("text"), KeyboardInterrupt(), GeneratorExit(),
    TypeError("cannot unpack"), _Weird(),
]  # fmt: skip
RUBBISH: list[Any] = [
    None, "x", "False", "1.0", b"x", [], {}, (), object(), float("nan"), float("inf"), 1e300, -1, 2**70, 1 + 2j, True,
    np.zeros(3), np.zeros((4, 4)), np.zeros(4, complex), np.full(4, np.nan), np.array(["a"] * 4), np.zeros(4, object),
    np.array([True, False]), np.array([None] * 4), np.zeros(0), [0.0] * 3, {"obs": 1}, range(4), lambda: 1,
    torch.zeros(4),
]  # fmt: skip
PLACES = ["constructor", "reset", "step", "close"]
FIELDS = ["obs", "reward", "terminated", "truncated", "info", "is_success", "first obs", "first info", "step", "reset"]


class Attacked(gym.Env[Any, Any]):
    """CartPole's spaces, and what the case wants."""

    place: str = ""
    value: Any = None
    at = 5

    def __init__(self, **_: Any) -> None:
        self.observation_space = spaces.Box(-9.0, 9.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.count = 0
        self.attack("constructor")

    def attack(self, place: str) -> None:
        if self.place == place and (place == "constructor" or self.count >= self.at):
            if callable(self.value):
                self.value()
            else:
                raise self.value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.attack("reset")
        if self.place == "= reset" and self.count >= self.at:
            return self.value
        obs = np.zeros(4, np.float32)
        first = {"= first obs": (self.value, {}), "= first info": (obs, self.value)}
        return first.get(self.place, (obs, {}))

    def step(self, action: Any) -> Any:
        self.count += 1
        self.attack("step")
        ended = self.count % 7 == 0
        result = {"obs": np.zeros(4, np.float32), "reward": 1.0, "terminated": ended, "truncated": False, "info": {}}
        if self.count >= self.at and self.place.startswith("= "):
            field = self.place.removeprefix("= ")
            if field == "step":
                return self.value
            if field == "is_success":
                result["info"] = {"is_success": self.value}
            elif field in result:
                result[field] = self.value
        return tuple(result.values())

    def close(self) -> None:
        self.attack("close")


class Rubbish(CartPole):
    """A tensor environment that returns something else from one of its functions."""

    place, value = "", 0

    def initial(self, key: Any, count: int) -> Any:
        return self._spoil("initial", super().initial(key, count))

    def observe(self, state: Any) -> Any:
        return self._spoil("observe", super().observe(state))

    def advance(self, state: Any, actions: Any, key: Any) -> Any:
        after, rewards, ended = super().advance(state, actions, key)
        if self.place == "advance":
            return self._spoil("advance", (after, rewards, ended))
        return after, self._spoil("rewards", rewards), self._spoil("ended", ended)

    def _spoil(self, place: str, x: Any) -> Any:
        if place != self.place:
            return x
        if self.value == 0:
            raise ValueError("a tensor environment failed")
        if self.value == 1:
            return None
        if self.value == 2:
            sys.exit(0)
        if not isinstance(x, torch.Tensor):
            return (x, x)
        return {3: x.double() * float("nan"), 4: x[:0], 5: x.to(torch.complex64), 6: x.unsqueeze(0), 7: x.tolist}.get(
            self.value, x
        )


def prepare(_: Path) -> None:
    gym.register(ENV, entry_point=Attacked, max_episode_steps=20)
    register_tensor_env(ENV, Rubbish)


def elsewhere() -> None:
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")


def faults(chance: random.Random, case: int, folder: Path) -> Outcome:
    """A third raises, a third returns rubbish, the rest are tensor environments, workers and side effects."""
    how = "device" if case % 5 == 4 else "async" if case % 25 == 3 else "sync"
    Attacked.place = Rubbish.place = ""
    Attacked.at = chance.choice([1, 2, 30])
    if how == "device":
        Rubbish.place, Rubbish.value = (
            chance.choice(["initial", "observe", "advance", "rewards", "ended"]),
            chance.randrange(8),
        )
        kind = f"device {Rubbish.place}"
    elif case % 2:
        Attacked.place, Attacked.value = chance.choice(PLACES), chance.choice([*RAISED, elsewhere, os.getcwd])
        kind = f"{how} {Attacked.place} {type(Attacked.value).__name__}"
    else:
        Attacked.place, Attacked.value = f"= {chance.choice(FIELDS)}", chance.choice(RUBBISH)
        kind = f"{how} {Attacked.place}"
    argv = [
        "train",
        "--algo",
        chance.choice(["dqn", "ppo"]),
        "--env",
        ENV,
        "-n",
        "64",
        "--no-progress",
        "-o",
        str(folder / "runs"),
    ]
    settings = ["eval_episodes=1", "num_envs=2", "hidden_sizes=[8]", f"vectorization={how}"]
    status, _, err = command([*argv, *(word for s in settings for word in ("--set", s)), "--execution", "eager"])
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    what = f"{kind} = {type(Attacked.value).__name__} {Rubbish.value}: status {status}: {err[-400:]}"
    asked = isinstance(Attacked.value, KeyboardInterrupt) and not Attacked.place.startswith("=")
    if "Traceback" in err or any(not line.isprintable() for line in err.splitlines()):
        return kind, 1, f"traceback or control characters: {what}"
    if status not in ((0, 1, 2, 130) if asked else (0, 1, 2)):
        return kind, 1, what
    if status in (1, 2) and len(lines) != 1:
        return kind, 1, f"not one error line: {what}"
    if list((folder / "elsewhere").glob("runs")):
        return kind, 1, f"the run directory was split: {what}"
    return kind, 1, None


FAULTS = Attack(
    "faults", "environment faults, host and tensor: one sentence, or the run goes on", 500, 500, faults, prepare,
    batch=50, limit=300.0,
)  # fmt: skip
