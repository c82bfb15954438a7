"""The small image task: only a policy that uses the image reaches the claimed best return."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rl_training.envs import TinyPixels, make_env, make_vector_env

ENV = "rl_training/TinyPixels-v0"


def columns(image: Any) -> tuple[int | None, int]:
    """(column of the ball, or None if hidden; column of the paddle), read from the pixels."""
    ball, paddle = image[0].max(0)[::2], image[1].max(0)[::2]
    return (int(ball.argmax()) if ball.any() else None), int(paddle.argmax())


def play(env: gym.Env[Any, Any], policy: str, episodes: int) -> float:
    random, total = np.random.default_rng(0), 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=episode)
        target, ended = 0, False
        while not ended:
            ball, paddle = columns(obs)
            if policy == "random":
                action = int(random.integers(3))
            elif policy == "stand_still":
                action = 1
            else:
                if ball is not None:
                    target = ball
                elif policy == "look":
                    target = paddle
                action = 1 + int(np.sign(target - paddle))
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
    return total / episodes


@pytest.mark.parametrize("balls", [1, 3])
def test_only_a_policy_that_looks_reaches_the_optimal_return(balls: int) -> None:
    env = make_env(ENV, {"balls": balls})
    best = env.unwrapped.optimal_return  # type: ignore[attr-defined]
    assert best == balls
    assert play(env, "look", 60) == best
    assert play(env, "random", 200) < 0.25 * best
    assert play(env, "stand_still", 200) < 0.25 * best


def test_hidden_balls_need_a_policy_with_memory() -> None:
    env = make_env(ENV, {"visible": 3})
    assert play(env, "remember", 60) == 3.0
    assert 1.5 < play(env, "look", 200) < 2.7


def test_follows_gymnasium() -> None:
    env = make_env(ENV, {"render_mode": "rgb_array"})
    check_env(env.unwrapped, skip_render_check=True)
    obs, _ = env.reset(seed=1)
    assert obs.shape == (3, 14, 14)
    assert obs.dtype == np.uint8
    assert env.render().shape == (224, 224, 3)  # type: ignore[union-attr]
    assert isinstance(env.unwrapped, TinyPixels)


def test_state_continues_in_the_middle_of_an_episode() -> None:
    actions = np.random.default_rng(0).integers(0, 3, (60, 2))

    def make() -> Any:
        return make_vector_env(ENV, seeds=[5], num_envs=2)

    envs, other = make(), make()
    envs.reset()
    for action in actions[:17]:
        envs.step(action)
    assert other.set_state(envs.get_state()) == "exact"
    for action in actions[17:]:
        a, b = envs.step(action), other.step(action)
        for x, y in zip(a[:5], b[:5]):
            np.testing.assert_array_equal(x, y)
