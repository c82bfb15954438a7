"""`lint-env` on environments that each have one deliberate fault, and on valid ones."""

from __future__ import annotations

import json
import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_training.cli import main
from rl_training.experiment.tools.lint_env import lint

BOX = gym.spaces.Box(-10.0, 10.0, (2,), np.float32)


class Sound(gym.Env[Any, Any]):
    """A valid random walk that ends at random. Each subclass adds one fault."""

    observation_space: Any = BOX
    action_space: Any = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.x.copy(), {}

    def step(self, action: int) -> Any:
        self.t += 1
        self.x = (0.9 * self.x + self.np_random.uniform(-1, 1, 2)).astype(np.float32)
        return self.x.copy(), float(np.sum(action)), bool(self.np_random.random() < 0.1), self.t >= 50, {}


class Changed(Sound):
    """Passes the results of `step` through `change(self, obs, reward, terminated, truncated, info)`."""

    change: Any = None

    def step(self, action: int) -> Any:
        return type(self).change(self, *super().step(action))


def changed(change: Any, **members: Any) -> type[gym.Env[Any, Any]]:
    return type("Broken", (Changed,), {"change": change, **members})


def reset_itself(env: Any, obs: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> Any:
    if terminated or truncated:
        obs = env.first
    return obs, reward, terminated, truncated, info


class KeepsFirst(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.first, info = super().reset(seed=seed)
        return self.first.copy(), info


def aliased(env: Any, obs: Any, *rest: Any) -> Any:
    env.buffer = getattr(env, "buffer", np.zeros(2, np.float32))
    env.buffer[:] = obs
    return env.buffer, *rest


class Unseeded(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x = np.array([random.random(), 0], np.float32)
        return self.x.copy(), {}


class Raises(Sound):
    def step(self, action: int) -> Any:
        raise KeyError("lost")


class OldReset(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


def limited(env: Any, obs: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> Any:
    late = env.t >= 5
    return obs, reward, terminated or late, False, {"TimeLimit.truncated": late and not terminated}


BROKEN: list[tuple[str, Any, str, str]] = [
    ("nan", changed(lambda s, o, *r: (o * np.float32("nan"), *r)), "values", "problem"),
    ("reward nan", changed(lambda s, o, r, *x: (o, float("nan"), *x)), "values", "problem"),
    ("reward text", changed(lambda s, o, r, *x: (o, "much", *x)), "types", "problem"),
    ("four values", changed(lambda s, o, r, a, b, i: (o, r, a or b, i)), "types", "problem"),
    ("old reset", OldReset, "types", "problem"),
    ("flag is int", changed(lambda s, o, r, a, b, i: (o, r, int(a), b, i)), "types", "problem"),
    ("bounds", changed(lambda s, o, *r: (o + 100, *r)), "bounds", "problem"),
    ("dtype", changed(lambda s, o, *r: (o.astype(np.float64), *r)), "dtype", "problem"),
    ("shape", changed(lambda s, o, *r: (np.zeros(3, np.float32), *r)), "shape", "problem"),
    ("never ends", changed(lambda s, o, r, a, b, i: (o, r, False, False, i)), "ending", "problem"),
    ("time limit", changed(limited), "truncation", "problem"),
    ("resets itself", type("R", (Changed, KeepsFirst), {"change": reset_itself}), "autoreset", "problem"),
    ("final in info", changed(lambda s, o, r, a, b, i: (o, r, a, b, {"final_obs": o})), "autoreset", "problem"),
    ("unseeded reset", Unseeded, "seeding", "problem"),
    ("unseeded step", changed(lambda s, o, r, *x: (o, random.random(), *x)), "seeding", "problem"),
    ("raises", Raises, "runs", "problem"),
    ("fixed length", changed(lambda s, o, r, a, b, i: (o, r, s.t >= 20, False, i)), "truncation", "note"),
    ("aliased", changed(aliased), "aliasing", "note"),
    ("huge reward", changed(lambda s, o, r, *x: (o, 1e6, *x)), "reward scale", "note"),
    ("no reward", changed(lambda s, o, r, *x: (o, 0.0, *x)), "reward scale", "note"),
    ("no action bounds", changed(lambda s, *x: x, action_space=gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)),
     "action", "note"),
    ("text observation", changed(lambda s, *x: x, observation_space=gym.spaces.Text(5)), "spaces", "problem"),
]  # fmt: skip


@pytest.mark.parametrize(("env", "check", "level"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_every_fault_is_found_and_described(env: Any, check: str, level: str) -> None:
    found = lint(env)
    matching = [f for f in found["findings"] if f["check"] == check and f["level"] == level]
    assert matching, found
    assert matching[0]["do"]
    assert (found["problems"] > 0) == (level == "problem"), found


@pytest.mark.parametrize("env", [Sound, "CartPole-v1", "Pendulum-v1", "rl_training/DictSign-v0"])
def test_valid_environments_have_no_findings(env: Any) -> None:
    found = lint(env)
    assert (found["problems"], found["findings"]) == (0, [])
    assert found["seeding"] == "repeatable"
    assert found["resume"].startswith("exact")
    assert found["episodes"] == 5


def test_random_return_is_the_mean_over_the_episodes() -> None:
    found = lint("rl_training/ConstantReward-v0")  # ten steps of reward 1, then truncated
    assert found["random_return"] == {"mean": 10.0, "std": 0.0}
    assert (found["mean_length"], found["endings"]) == (10.0, {"terminated": 0, "truncated": 5})


def test_incomplete_state_is_a_problem() -> None:
    class Forgetful(Sound):
        def get_state(self) -> Any:
            return {"t": self.t}

        def set_state(self, state: Any) -> None:
            self.t = state["t"]

    found = lint(Forgetful)
    assert [f["check"] for f in found["findings"]] == ["resume"]
    assert found["resume"] == "wrong"


def test_lint_env_command(capsys: Any) -> None:
    assert main(["lint-env", "CartPole-v1", "--set", "sutton_barto_reward=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == 0
    gym.register("Broken-v0", entry_point=lambda: Raises())
    try:
        assert main(["lint-env", "Broken-v0"]) == 1
    finally:
        del gym.registry["Broken-v0"]
    assert "problem: runs: it raised KeyError" in capsys.readouterr().out
    for argv, word in [
        (["CartPol-v1"], "CartPole-v1"), (["CartPole-v1", "--set", "x"], "key=value"),
        (["CartPole-v1", "--set", "wind=1"], "wind"), ([], "ENV"),
        (["--env", "CartPole-v1"], "without '--env'"),
    ]:  # fmt: skip
        assert main(["lint-env", *argv]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert word.lower() in err.lower()


class Masked(Sound):
    """Forbids a random action at each step and raises if it is taken; the mask is in info or in the observation."""

    action_space: Any = gym.spaces.Discrete(3)
    where, empty_at, forget = "info", -1, False

    def __init__(self) -> None:
        if self.where == "observation":
            self.observation_space = gym.spaces.Dict({"x": BOX, "action_mask": gym.spaces.MultiBinary(3)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.marked(super().reset(seed=seed)[0])

    def step(self, action: int) -> Any:
        if not self.mask[action]:
            raise RuntimeError(f"action {action} is forbidden")
        obs, reward, terminated, truncated, _ = super().step(action)
        obs, info = self.marked(obs)
        return obs, reward, terminated, truncated, {} if self.forget else info

    def marked(self, obs: Any) -> Any:
        self.mask = np.ones(3, np.int8)
        self.mask[self.np_random.integers(3)] = 0
        if self.t == self.empty_at:
            self.mask[:] = 0
        return (obs, {"action_mask": self.mask}) if self.where == "info" else ({"x": obs, "action_mask": self.mask}, {})


@pytest.mark.parametrize("where", ["info", "observation"])
def test_a_correctly_masked_environment_is_clean(where):
    found = lint(type("Masked", (Masked,), {"where": where}))
    assert found["findings"] == []
    assert found["resume"].startswith("exact")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"empty_at": 1}, "allows no action although the episode goes on"),
        ({"forget": True}, "is missing after a step"),
        ({"action_space": gym.spaces.Discrete(4)}, "has 3 entries, but Discrete(4) needs 4"),
    ],
)
def test_faulty_masks_are_found(members, words):
    findings = lint(type("Masked", (Masked,), members))["findings"]
    assert [f["check"] for f in findings if f["level"] == "problem"][:1] == ["mask"]
    assert words in findings[0]["what"]
