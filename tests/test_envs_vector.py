"""Vector environments: true transitions in every autoreset mode, seeding, and errors of the factory."""

from __future__ import annotations

import os
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from test_envs_helpers import Counting, counting, raising, random_actions, same, snapshot

from rl_training.envs import NativeVectorEnv, episode_seed, factory, make_env, make_vector_env
from rl_training.errors import UserError
from rl_training.machine import usable_cpus


def check_transitions(env, steps: int) -> int:
    """Check that every valid row is a true step: the next observation is t + 1 of the same episode. Returns the number
    of episodes."""
    obs = env.reset()
    previous = obs.copy()
    assert (obs[:, 1] == 0).all()
    count = 0
    returns = np.zeros(env.num_envs)
    for actions in random_actions(env.spec, env.num_envs, steps):
        step = env.step(actions)
        np.testing.assert_array_equal(obs, previous)  # the buffer of the previous step is still intact
        done = step.terminated | step.truncated
        v = step.valid
        np.testing.assert_array_equal(step.final_obs[v, 0], obs[v, 0])
        np.testing.assert_array_equal(step.final_obs[v, 1], obs[v, 1] + 1)
        np.testing.assert_array_equal(step.rewards[v], step.final_obs[v, 1])
        np.testing.assert_array_equal(step.obs[~done], step.final_obs[~done])
        assert not done[~v].any()
        assert (step.rewards[~v] == 0).all()
        returns[v] += step.rewards[v]
        assert [e.index for e in step.episodes] == np.flatnonzero(done).tolist()
        for e in step.episodes:
            assert (e.ret, e.length) == (returns[e.index], step.final_obs[e.index, 1])
            returns[e.index] = 0
        if v.all() and not isinstance(env, NativeVectorEnv):
            assert (step.obs[done, 1] == 0).all()
        count += len(step.episodes)
        obs, previous = step.obs, step.obs.copy()
    return count


def test_sync_has_no_phantom_transition():
    env = make_vector_env(counting, seeds=[0, 1], num_envs=3)
    assert check_transitions(env, 300) > 200


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_restart_starts_the_next_episode_in_the_given_rows(vectorization):
    """Other rows are unaffected. A state saved afterwards continues exactly, from the actions since the restart."""
    env = make_vector_env(raising, seeds=[0], num_envs=4, vectorization=vectorization)  # with action 0 it never fails
    other = make_vector_env(raising, seeds=[0], num_envs=4)
    zeros = np.zeros(4, np.int64)
    env.reset()
    env.step(zeros)
    before = env.current_obs().copy()
    assert env.restart([1, 3])
    after = env.current_obs()
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert (after[[1, 3], 1] == 0).all()
    assert (after[[1, 3], 0] != before[[1, 3], 0]).all()  # another episode
    step = env.step(zeros)
    np.testing.assert_array_equal(step.final_obs[step.valid, 1], [2, 1, 2, 1])
    assert other.set_state(env.get_state()) == "exact"
    for _ in range(5):
        assert same(snapshot(env.step(zeros)), snapshot(other.step(zeros)))
    env.close()
    native = NativeVectorEnv([gym.vector.SyncVectorEnv([Counting] * 2)], seeds=[0])
    assert not native.restart([0])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_native_has_no_phantom_transition_in_any_autoreset_mode(mode):
    envs = [gym.vector.SyncVectorEnv([Counting] * 3, autoreset_mode=mode) for _ in range(2)]
    env = NativeVectorEnv(envs, seeds=[0, 1])
    assert check_transitions(env, 300) > 200


def test_native_mixed_modes_and_dict_observations():
    modes = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
    one = make_env("rl_training/DictSign-v0", {"horizon": 3})
    envs = [
        gym.vector.SyncVectorEnv([lambda: make_env("rl_training/DictSign-v0", {"horizon": 3})] * 2, autoreset_mode=m)
        for m in modes
    ]
    env = NativeVectorEnv(envs, seeds=[0, 1])
    obs = env.reset()
    assert {k: v.shape for k, v in obs.items()} == {"image": (4, 1, 16, 16), "vector": (4, 1)}
    for _ in range(7):
        step = env.step(np.zeros(4, np.int64))
    assert step.valid.all()
    assert one.action_space.n == env.spec.action.n


def test_native_env_of_gymnasium_next_step():
    env = make_vector_env("CartPole-v1", seeds=[0, 1], num_envs=4, vectorization="vector")
    env.reset()
    invalid = [env.step(a) for a in random_actions(env.spec, 8, 100)]
    ended = sum(len(s.episodes) for s in invalid)
    assert ended > 10
    assert env.set_state(env.get_state()) == "restarted"


def test_terminated_and_truncated_are_kept_apart():
    env = make_vector_env("rl_training/ConstantReward-v0", seeds=[0], num_envs=2, env_kwargs={"horizon": 3})
    env.reset()
    steps = [snapshot(env.step(np.zeros(2))) for _ in range(3)]
    assert [s[4]["x"].tolist() for s in steps] == [[False] * 2, [False] * 2, [True] * 2]
    assert not any(s[3]["x"].any() for s in steps)
    assert [(e.ret, e.length) for e in steps[2][6]] == [(3.0, 3)] * 2


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "rl_training/DictSign-v0"])
def test_async_equals_sync(env_id):
    envs = [make_vector_env(env_id, seeds=[3, 5], num_envs=2, vectorization=v) for v in ("sync", "async")]
    first, second = (env.reset() for env in envs)
    for k in first if isinstance(first, dict) else [None]:
        np.testing.assert_array_equal(first[k] if k else first, second[k] if k else second)
    for actions in random_actions(envs[0].spec, 4, 250):
        a, b = (snapshot(env.step(actions)) for env in envs)
        assert same(a, b)
    envs[1].close()


def test_a_seed_has_the_same_episodes_alone_and_in_a_study():
    study = make_vector_env("CartPole-v1", seeds=[4, 9], num_envs=2)
    alone = make_vector_env("CartPole-v1", seeds=[9], num_envs=2)
    np.testing.assert_array_equal(study.reset()[2:], alone.reset())
    for actions in random_actions(study.spec, 4, 200):
        a, b = study.step(actions), alone.step(actions[2:])
        np.testing.assert_array_equal(a.obs[2:], b.obs)
        np.testing.assert_array_equal(a.final_obs[2:], b.final_obs)


def test_episodes_equal_those_of_plain_environments_with_the_same_seeds():
    env = make_vector_env("CartPole-v1", seeds=[7], num_envs=2)
    plain = [gym.make("CartPole-v1") for _ in range(2)]
    numbers = [0, 0]
    expected = np.stack([p.reset(seed=episode_seed(7, 0, n, 0))[0] for n, p in enumerate(plain)])
    np.testing.assert_array_equal(env.reset(), expected)
    for actions in random_actions(env.spec, 2, 300):
        step = env.step(actions)
        for n, p in enumerate(plain):
            obs, reward, terminated, truncated, _ = p.step(actions[n])
            np.testing.assert_array_equal(step.final_obs[n], obs)
            assert (step.rewards[n], step.terminated[n], step.truncated[n]) == (reward, terminated, truncated)
            if terminated or truncated:
                numbers[n] += 1
                obs, _ = p.reset(seed=episode_seed(7, 0, n, numbers[n]))
            np.testing.assert_array_equal(step.obs[n], obs)
    assert min(numbers) > 5


def test_stream_and_episode_number_determine_the_first_observation():
    env = make_vector_env("CartPole-v1", seeds=[0], num_envs=2)
    first, second = env.reset().copy(), env.reset().copy()
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(env.reset(episode=0), first)
    np.testing.assert_array_equal(env.reset(), second)
    other = make_vector_env("CartPole-v1", seeds=[0], num_envs=2, stream=1)
    assert not np.array_equal(other.reset(), first)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"env_id": "CartPol-v1"}, "Did you mean 'CartPole-v1'"),
        ({"env_id": "LunarLander-v2"}, "LunarLander-v3"),
        ({"env_id": "no_such_module:Env-v0"}, "type --allow-import no_such_module"),
        ({"env_id": "not an id"}, "is not known"),
        ({"vectorization": "asink"}, "Did you mean 'async'"),
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"seeds": [-1]}, "must not be negative"),
        ({"env_kwargs": {"gravty": 1}}, r"env_kwargs \['gravty'\] do not fit CartPole-v1"),
        ({"env_id": "Pendulum-v1", "vectorization": "vector"}, "no native vector implementation"),
        ({"env_id": lambda: Counting(), "vectorization": "async"}, "module-level function"),
        ({"env_id": lambda: 3}, "must return a gymnasium.Env"),
    ],
)
def test_bad_input_raises_a_user_error(kwargs, message):
    with pytest.raises(UserError, match=message):
        make_vector_env(**{"env_id": "CartPole-v1", "seeds": [0], "num_envs": 1, **kwargs})


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [("ALE/Pong-v5", "ale_py", "atari"), ("HalfCheetah-v5", "mujoco", "mujoco"), ("LunarLander-v3", "Box2D", "box2d")],
)
def test_missing_extra_is_named(monkeypatch, env_id, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    for name in [
        m for m in sys.modules if m.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d", f"{module}."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=rf"pip install 'rl-training\[{extra}\]'"):
        factory.make_env(env_id)


def test_envpool_needs_its_extra_and_gives_true_transitions(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match=r"pip install 'rl-training\[envpool\]'"):
        make_vector_env("Pong-v5", seeds=[0], num_envs=2, vectorization="envpool")

    class Pool:  # EnvPool's API: single spaces, no seed at reset, reset in the step after the end
        def __init__(self, n: int) -> None:
            self.inner = gym.vector.SyncVectorEnv([Counting] * n)
            self.observation_space, self.action_space = Counting().observation_space, Counting().action_space
            self.step, self.close = self.inner.step, self.inner.close

        def reset(self):
            return self.inner.reset(seed=1)

    fake = types.SimpleNamespace(make=lambda env_id, env_type, num_envs, seed: Pool(num_envs))
    monkeypatch.setitem(sys.modules, "envpool", fake)
    env = make_vector_env("Counting-v0", seeds=[0, 1], num_envs=2, vectorization="envpool")
    assert check_transitions(env, 100) > 20


def test_wrong_number_of_actions_is_rejected():
    env = make_vector_env("CartPole-v1", seeds=[0], num_envs=2)
    env.reset()
    with pytest.raises(ValueError, match=r"actions have shape \(3,\), expected \(2,\)"):
        env.step(np.zeros(3))


def test_usable_cpus_follow_the_affinity_mask(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cpus() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpus() == 64
