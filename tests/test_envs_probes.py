"""The probe environments behave as documented; other tests rely on their values."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rl_training.envs import make_env, make_vector_env
from rl_training.errors import UserError

PROBES = ["ConstantReward", "DelayedReward", "ActionReward", "VisualSign", "DictSign"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", PROBES)
def test_probe_follows_gymnasium(name, continuous):
    check_env(make_env(f"rl_training/{name}-v0", {"continuous": continuous}).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("ending", ["truncated", "terminated"])
def test_constant_reward(ending):
    env = make_env("rl_training/ConstantReward-v0", {"horizon": 4, "ending": ending})
    seen = [env.reset(seed=0)[0]]
    for t in range(1, 5):
        obs, reward, terminated, truncated, _ = env.step(0)
        seen.append(obs)
        assert (reward, terminated, truncated) == (
            1.0,
            t == 4 and ending == "terminated",
            t == 4 and ending == "truncated",
        )
    assert len({o.tobytes() for o in seen}) == (1 if ending == "truncated" else 5)


def test_delayed_reward():
    env = make_env("rl_training/DelayedReward-v0", {"horizon": 3})
    env.reset(seed=0)
    assert [env.step(0)[1:3] for _ in range(3)] == [(0.0, False), (0.0, False), (1.0, True)]


@pytest.mark.parametrize("name", ["ActionReward", "VisualSign", "DictSign"])
def test_the_observed_sign_decides_the_reward(name):
    env = make_vector_env(f"rl_training/{name}-v0", seeds=[0], num_envs=16, env_kwargs={"horizon": 2})
    obs = env.reset()
    signs = set()
    for _ in range(10):
        target = np.ones(16)
        if isinstance(obs, dict):
            target = target * obs["vector"][:, 0]
        image = obs["image"] if isinstance(obs, dict) else obs
        target = target * (np.where(image[:, 0, 0, -1] > 0, 1, -1) if image.ndim == 4 else image[:, 0])
        signs |= set(target.tolist())
        right = env.step((target > 0).astype(np.int64))
        assert (right.rewards == 1).all()
        obs = right.obs
    assert signs == {-1.0, 1.0}


def test_continuous_target():
    env = make_vector_env("rl_training/ActionReward-v0", seeds=[0], num_envs=8, env_kwargs={"continuous": True})
    obs = env.reset()
    assert (env.step(obs / 2).rewards == 0).all()
    np.testing.assert_allclose(env.step(np.zeros((8, 1))).rewards, -0.25)


def test_invalid_ending_is_rejected():
    with pytest.raises(UserError, match="ending must be"):
        make_env("rl_training/ConstantReward-v0", {"ending": "never"})
