"""Environments in threads: the same steps, episodes, saved states and errors as in a loop, and several at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from helpers import config_for, run_digest

from rl_training.envs import threads
from rl_training.envs.given import given
from rl_training.envs.sync import SyncVectorEnv
from rl_training.envs.threads import ThreadVectorEnv
from rl_training.envs.vector import EnvError
from rl_training.envs.vectorize import make_vector_env
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.trainer import Trainer


@pytest.fixture(autouse=True)
def _three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: 3)


def both(env: Any, num_envs: int = 5, **fields: Any) -> tuple[Any, Any]:
    made = [
        make_vector_env(env, seeds=(0, 1), num_envs=num_envs, vectorization=v, **fields) for v in ("sync", "threads")
    ]
    assert isinstance(made[1], ThreadVectorEnv)
    return made[0], made[1]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_steps_and_states_are_those_of_a_loop(env_id: str) -> None:
    one, other = both(env_id, env_kwargs={"max_episode_steps": 17})
    assert np.array_equal(one.reset(), other.reset())
    g = np.random.default_rng(0)
    for i in range(60):
        discrete = one.spec.action.discrete
        actions = g.integers(0, 2, 10) if discrete else g.uniform(-1, 1, (10, 1)).astype(np.float32)
        a, b = one.step(actions), other.step(actions)
        for x, y in zip(a[:6], b[:6]):
            assert np.array_equal(x, y)
        assert a.episodes == b.episodes
        if i == 40:
            saved, same = one.get_state(), other.get_state()
            assert saved.meta == same.meta
            assert all(np.array_equal(x, same.arrays[name]) for name, x in saved.arrays.items())
            assert other.set_state(same) == "exact"
    assert a.terminated.any() or a.truncated.any() or i == 59
    one.close()
    other.close()


class Meeting(gym.Env[Any, Any]):
    """A step waits until three environments are being stepped."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    barrier = threading.Barrier(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.barrier.wait(timeout=20)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_environments_are_stepped_at_the_same_time() -> None:
    envs = make_vector_env(Meeting, seeds=(0,), num_envs=3, vectorization="threads")
    envs.reset()
    envs.step(np.zeros(3, np.int64))  # a loop would wait for ever
    envs.close()


class Fails(gym.Env[Any, Any]):
    """The third environment that is made fails in its second step, in the way that is asked for."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    made = 0

    def __init__(self, how: str) -> None:
        self.how, self.number, self.steps = how, Fails.made % 4, 0
        Fails.made += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.number == 2 and self.steps == 2:
            if self.how == "raises":
                raise RuntimeError("the motor burnt")
            if self.how == "exits":
                raise SystemExit(3)
            return np.zeros(1, np.float32), 0.0
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(("how", "error", "message"), [
    ("raises", RuntimeError, "the motor burnt"),
    ("exits", EnvError, r"sub-environment 2 \(episode 0, step 1\): the environment called sys.exit\(3\)"),
    ("short", EnvError, r"sub-environment 2 \(episode 0, step 1\): step\(\) must return obs, reward"),
])  # fmt: skip
def test_a_fault_names_its_environment_as_in_a_loop(how: str, error: Any, message: str) -> None:
    for vectorization in ("sync", "threads"):
        Fails.made = 0
        envs = make_vector_env(lambda: Fails(how), seeds=(0,), num_envs=4, vectorization=vectorization)
        envs.reset()
        envs.step(np.zeros(4, np.int64))
        with pytest.raises(error, match=message):
            envs.step(np.zeros(4, np.int64))
        envs.close()


class StopAt(Callback):
    def on_collect_end(self, trainer: Any, result: dict[str, Any]) -> None:
        if result["env_steps"] >= 80:
            trainer.request_stop("to be resumed")


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_run_with_threads_is_the_run_without_and_resumes_exactly(name: str, tmp_path: Path) -> None:
    def run(place: str, vectorization: str, callbacks: Any = ()) -> Any:
        config = config_for(name, tmp_path / place, num_envs=4, vectorization=vectorization)
        return Trainer(config, callbacks=callbacks, progress=False, check_every=1).run()

    plain, threaded, cut = run("a", "sync"), run("b", "threads"), run("c", "threads", [StopAt()])
    resumed = Trainer.resume(cut.run_dir, progress=False).run()
    assert run_digest(threaded.checkpoint_path) == run_digest(plain.checkpoint_path)
    assert run_digest(resumed.checkpoint_path) == run_digest(plain.checkpoint_path)


def test_an_environment_that_exists_can_have_threads_and_auto_never_does() -> None:
    env = given(gym.make("CartPole-v1"))
    assert isinstance(make_vector_env(env, seeds=(0,), num_envs=2, vectorization="threads"), ThreadVectorEnv)
    assert type(make_vector_env("HalfCheetah-v5", seeds=(0,), num_envs=8)) is SyncVectorEnv
