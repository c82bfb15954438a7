"""The DeepMind Control Suite: its environments, and the errors when the extra is missing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from rl_training.envs.factory import make_env
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError

ENV = "DMControl/cartpole-swingup-v0"


@pytest.fixture(scope="module")
def suite() -> Any:
    pytest.importorskip("shimmy")
    return pytest.importorskip("dm_control.suite")


@pytest.mark.parametrize("env_id", [ENV, "dm_control/cartpole-swingup-v0"])
def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, env_id: str) -> None:
    import gymnasium

    monkeypatch.setitem(sys.modules, "shimmy", None)
    monkeypatch.delitem(gymnasium.registry, env_id, raising=False)
    with pytest.raises(UserError, match=r"pip install 'rl-training\[dm-control\]'"):
        make_env(env_id)


def test_incompatible_mujoco_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """dm_control sets no upper bound on MuJoCo's version, and a newer MuJoCo has removed a field."""
    from rl_training.envs import dm_control

    class Suite:
        ALL_TASKS = (("cartpole", "swingup"),)

        @staticmethod
        def load(domain: str, task: str) -> Any:
            raise AttributeError("'MjModel' object has no attribute 'flex_vertedge'")

    monkeypatch.setattr(dm_control, "_suite", lambda: Suite)
    monkeypatch.setattr(dm_control, "version", lambda name: {"mujoco": "9.0", "dm_control": "1.0"}[name])
    monkeypatch.setitem(sys.modules, "shimmy.dm_control_compatibility", importlib.import_module("math"))
    with pytest.raises(UserError, match=r"dm_control 1.0 does not work with mujoco 9.0 .*rl-training\[dm-control\]"):
        make_env(ENV)


def test_unknown_task_suggests_the_nearest(suite: Any) -> None:
    with pytest.raises(UserError, match=r"unknown dm_control task 'walker-wlk'. Did you mean 'walker-walk'"):
        make_env("DMControl/walker-wlk-v0")


def test_episode_and_repeated_actions(suite: Any) -> None:
    plain, twice = make_env(ENV), make_env(ENV, {"action_repeat": 2})
    obs, _ = plain.reset(seed=3)
    again, _ = twice.reset(seed=3)
    np.testing.assert_array_equal(obs, again)
    assert obs.shape == (5,)
    assert obs.dtype == np.float32
    ended, steps = False, 0
    while not ended:
        action = np.array([np.sin(0.1 * steps)], np.float32)
        rewards = []
        for _ in range(2):
            obs, reward, terminated, truncated, _ = plain.step(action)
            rewards.append(reward)
        other, total, *ends, _ = twice.step(action)
        np.testing.assert_array_equal(obs, other)
        assert total == pytest.approx(sum(rewards))
        assert ends == [terminated, truncated]
        ended, steps = terminated or truncated, steps + 1
    assert steps == 500
    assert truncated
    assert not terminated
    plain.close()
    twice.close()


def test_state_continues_exactly(suite: Any) -> None:
    """The state cannot be read, so the actions of the running episode are repeated."""
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (30, 2, 1)).astype(np.float32)
    envs, other = (make_vector_env(ENV, seeds=[5], num_envs=2) for _ in range(2))
    envs.reset()
    for action in actions[:20]:
        envs.step(action)
    assert other.set_state(envs.get_state()) == "exact"
    for action in actions[20:]:
        a, b = envs.step(action), other.step(action)
        np.testing.assert_array_equal(a.obs, b.obs)
        np.testing.assert_array_equal(a.rewards, b.rewards)
    envs.close()
    other.close()


def test_images_are_stacked_newest_last(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a display: the n-th image that is drawn shows n."""
    from rl_training.envs.dm_control import DMControl

    drawn = iter(range(1, 100))
    monkeypatch.setattr(DMControl, "_draw", lambda self, size: np.full((size, size, 3), next(drawn), np.uint8))
    env = make_env(ENV, {"pixels": True, "size": 4, "stack": 3, "action_repeat": 2})
    assert env.observation_space.shape == (9, 4, 4)
    action = np.zeros(1, np.float32)
    seen = [env.reset(seed=0)[0], *(env.step(action)[0] for _ in range(3)), env.reset(seed=0)[0]]
    expected = [[2, 2, 2], [2, 2, 3], [2, 3, 4], [3, 4, 5], [6, 6, 6]]  # the first was drawn to try the display
    assert [obs[::3, 0, 0].tolist() for obs in seen] == expected
    assert all((obs == np.repeat(row, 3)[:, None, None]).all() for obs, row in zip(seen, expected)), "not overwritten"
    env.close()


def test_vectors_are_not_stacked() -> None:
    from rl_training.envs.dm_control import DMControl

    with pytest.raises(UserError, match=r"stack = 3: .* with pixels set to true"):
        DMControl("cartpole", "swingup", stack=3)


def test_pixels_give_images_of_the_camera(suite: Any) -> None:
    try:
        env = make_env("DMControl/walker-walk-v0", {"pixels": True, "size": 16})
    except UserError as error:
        if "MUJOCO_GL" not in str(error):
            raise
        pytest.skip(str(error))
    obs, _ = env.reset(seed=0)
    after, *_ = env.step(np.ones(6, np.float32))
    assert obs.shape == after.shape == (16, 16, 3)
    assert obs.dtype == np.uint8
    assert (obs != after).any()
    env.close()
