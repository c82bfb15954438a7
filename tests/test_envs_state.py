"""Saving environments at a random step and continuing: bit for bit like an uninterrupted run, or "restarted"."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
from test_envs_helpers import clock, random_actions, same, snapshot, walk

import rl_training.envs.sync as sync
from rl_training.envs import EnvState, NativeVectorEnv, make_vector_env
from rl_training.errors import UserError


def through_a_file(state: EnvState) -> EnvState:
    """The state after a round trip through JSON and plain arrays, as in a checkpoint."""
    assert all(isinstance(a, np.ndarray) and a.dtype != object for a in state.arrays.values())
    return EnvState(json.loads(json.dumps(state.meta)), {k: a.copy() for k, a in state.arrays.items()})


def check_continues(env_id, first: str, second: str, cuts: tuple[int, ...], after: int = 60) -> None:
    make = {"seeds": [1, 2], "num_envs": 1}
    env = make_vector_env(env_id, vectorization=first, **make)
    fresh = make_vector_env(env_id, vectorization=second, **make)
    env.reset()
    actions = random_actions(env.spec, 2, max(cuts) + after)
    states, stream = {}, []
    for t, a in enumerate(actions):
        if t in cuts:
            current = env.current_obs()
            kept = {k: x.copy() for k, x in (current if isinstance(current, dict) else {"": current}).items()}
            states[t] = (through_a_file(env.get_state()), kept)
        stream.append(snapshot(env.step(a)))
    for t, (state, obs) in states.items():
        assert fresh.set_state(state) == "exact"
        now = fresh.current_obs()
        for k, x in (now if isinstance(now, dict) else {"": now}).items():
            assert x.tobytes() == obs[k].tobytes()
        again = fresh.get_state()
        assert again.meta == state.meta
        assert all(again.arrays[k].tobytes() == a.tobytes() for k, a in state.arrays.items())
        for s in range(t, t + after):
            assert same(snapshot(fresh.step(actions[s])), stream[s]), (t, s)
    env.close()
    fresh.close()


@pytest.mark.parametrize(
    ("env_id", "cuts"),
    [
        ("CartPole-v1", (0, 1, 37, 150)),
        ("Pendulum-v1", (5, 199, 200, 333)),
        ("Acrobot-v1", (3, 120)),
        ("LunarLander-v3", (17, 140)),
        ("HalfCheetah-v5", (9, 111)),
        ("rl_training/DictSign-v0", (3, 4)),
        (walk, (0, 2, 31, 57)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_sync_continues_exactly(env_id, cuts):
    check_continues(env_id, "sync", "sync", cuts)


@pytest.mark.parametrize(
    "env_id",
    ["CartPole-v1", "LunarLander-v3", "HalfCheetah-v5", walk],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_async_continues_exactly_from_sync_and_back(env_id):
    check_continues(env_id, "sync", "async", (21, 80), after=40)
    check_continues(env_id, "async", "sync", (33,), after=40)


def test_state_method_of_the_environment_is_used_if_it_has_one():
    env = make_vector_env(walk, seeds=[0], num_envs=1)
    env.reset()
    env.step(np.zeros(1))
    state = env.get_state()
    assert state.meta["sub_envs"][0]["method"] == "state"
    assert "0.actions" not in state.arrays


@pytest.mark.filterwarnings("ignore:.*restarts")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_nondeterministic_environment_restarts_and_says_so(vectorization):
    env = make_vector_env(clock, seeds=[0], num_envs=2, vectorization=vectorization)
    env.reset()
    env.step(np.zeros(2))
    state = env.get_state()
    episodes = [s["episode"] for s in state.meta["sub_envs"]]
    assert env.set_state(state) == "restarted"
    after = env.get_state().meta["sub_envs"]
    assert [s["episode"] for s in after] == [e + 1 for e in episodes]
    assert [(s["length"], s["return"]) for s in after] == [(0, 0.0)] * 2
    assert (env.current_obs()[:, 1] == 0).all()
    env.close()


@pytest.mark.filterwarnings("ignore:.*restarts")
def test_an_episode_longer_than_the_recording_restarts(monkeypatch):
    monkeypatch.setattr(sync, "MAX_RECORDED", 50)
    env = make_vector_env("Pendulum-v1", seeds=[0], num_envs=2)
    env.reset()
    for a in random_actions(env.spec, 2, 50):
        env.step(a)
    assert env.set_state(env.get_state()) == "exact"
    env.step(a)
    state = env.get_state()
    assert [s["method"] for s in state.meta["sub_envs"]] == ["lost"] * 2
    assert env.set_state(state) == "restarted"


def test_recording_is_trimmed_to_the_running_episodes():
    env = make_vector_env("CartPole-v1", seeds=[0], num_envs=2)
    env.reset()
    for a in random_actions(env.spec, 2, 2000):
        env.step(a)
    assert len(env._sub._log) < 300


def test_state_with_another_number_of_environments_is_rejected():
    state = make_vector_env("CartPole-v1", seeds=[0], num_envs=2)
    state.reset()
    other = make_vector_env("CartPole-v1", seeds=[0], num_envs=3)
    with pytest.raises(UserError, match="has 2 sub-environments, but this run has 3"):
        other.set_state(state.get_state())


class Ticker(gym.vector.VectorEnv):
    """A native vector env with NEXT_STEP autoreset and its own state: row i ends every i + 2 steps."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    num_envs = 3
    single_observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    single_action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = np.zeros(3, np.int64)
        return self.t[:, None].astype(np.float32), {}

    def step(self, actions):
        limit = np.arange(3) + 2
        self.t = np.where(self.t >= limit, 0, self.t + 1)
        return self.t[:, None].astype(np.float32), (self.t > 0) * 1.0, self.t >= limit, np.zeros(3, bool), {}

    def get_state(self):
        return {"t": self.t}

    def set_state(self, state):
        self.t = state["t"]


def test_native_env_with_its_own_state_continues_exactly():
    env, fresh = NativeVectorEnv(Ticker()), NativeVectorEnv(Ticker())
    env.reset()
    zeros = np.zeros(3, np.int64)
    for _ in range(3):
        step = env.step(zeros)
    assert step.valid.tolist() == [False, True, True]
    assert fresh.set_state(through_a_file(env.get_state())) == "exact"
    for _ in range(10):
        assert same(snapshot(env.step(zeros)), snapshot(fresh.step(zeros)))
