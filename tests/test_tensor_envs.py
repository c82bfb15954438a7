"""Tensor environments against the environments that they equal, step for step, and their own promises."""

from __future__ import annotations

import importlib
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.envs.factory import make_env
from rl_training.envs.spaces import make_spec
from rl_training.envs.tensor.base import TensorEnv
from rl_training.envs.tensor.table import TENSOR_ENVS, tensor_env
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_items, tree_map, tree_stack

CLASSIC = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
KEY = rng.key_from_seed(5)


def random_actions(env: TensorEnv, count: int, generator: np.random.Generator) -> Tensor:
    action = env.spec.action
    if action.discrete:
        return torch.as_tensor(generator.integers(0, action.nvec[0], count))
    return torch.as_tensor(generator.uniform(-1.0, 1.0, (count, action.dim)).astype(np.float32))


def native_action(env: TensorEnv, action: Tensor) -> Any:
    """The action of one copy as Gymnasium's environment takes it."""
    if env.spec.action.discrete:
        return int(action)
    low, high = (np.array(bound) for bound in (env.spec.action.low, env.spec.action.high))
    return (low + (action.numpy() + 1.0) / 2.0 * (high - low)).astype(np.float32)


@pytest.mark.parametrize("env_id", CLASSIC)
def test_every_step_equals_gymnasium(env_id: str) -> None:
    """Ten episodes each, every step from the state that Gymnasium's environment is in."""
    env, generator, ends = tensor_env(env_id), np.random.default_rng(0), 0
    real: Any = gym.make(env_id).unwrapped
    for episode in range(10):
        real.reset(seed=episode)
        if "MountainCar" in env_id and episode % 2:  # near the goal and near the wall
            real.state = np.array([0.4, 0.05] if episode % 4 == 1 else [-1.15, -0.06])
        for _ in range(150):
            state = {"x": torch.as_tensor(np.array(real.state, np.float32))[None]}
            action = random_actions(env, 1, generator)
            following, reward, terminated = env.advance(state, action, KEY)
            obs, expected, ended, _, _ = real.step(native_action(env, action[0]))
            assert env.observe(following)[0].numpy() == pytest.approx(obs, abs=2e-5)
            assert float(reward) == pytest.approx(float(expected), abs=2e-5)
            assert bool(terminated) == ended
            if ended:
                ends += 1
                break
    assert ends or env_id in ("Pendulum-v1", "Acrobot-v1")


def test_acrobot_ends_where_gymnasium_says() -> None:
    """Random actions hardly ever swing it up: states all around, one step each."""
    env, generator, real = tensor_env("Acrobot-v1"), np.random.default_rng(1), gym.make("Acrobot-v1").unwrapped
    assert isinstance(real, gym.envs.classic_control.AcrobotEnv)
    real.reset(seed=0)
    ends = 0
    for _ in range(300):
        x = (generator.uniform(-1.0, 1.0, 4) * [math.pi, math.pi, 4 * math.pi, 9 * math.pi]).astype(np.float32)
        real.state = x.astype(np.float64)
        action = random_actions(env, 1, generator)
        following, reward, terminated = env.advance({"x": torch.as_tensor(x)[None]}, action, KEY)
        obs, expected, ended, _, _ = real.step(int(action))
        assert env.observe(following)[0].numpy() == pytest.approx(obs, rel=1e-3, abs=1e-3)
        assert (float(reward), bool(terminated)) == (expected, ended)
        ends += ended
    assert ends > 20


@pytest.mark.parametrize("env_id", sorted(TENSOR_ENVS))
def test_spec_is_that_of_the_gymnasium_environment(env_id: str) -> None:
    real = make_env(env_id)
    spec = tensor_env(env_id).spec
    made = make_spec(env_id, real.observation_space, real.action_space, real.spec.max_episode_steps if real.spec else 0)
    assert (spec.observation, spec.action.kind, spec.action.nvec) == (
        made.observation,
        made.action.kind,
        made.action.nvec,
    )
    assert spec.max_episode_steps == made.max_episode_steps
    if env_id in CLASSIC:
        assert (spec.action.low, spec.action.high) == (made.action.low, made.action.high)


@pytest.mark.parametrize("env_id", CLASSIC)
def test_first_states_are_spread_as_in_gymnasium(env_id: str) -> None:
    env, real = tensor_env(env_id), gym.make(env_id)
    obs = env.observe(env.initial(KEY, 4_000)).numpy()
    expected = np.array([real.reset(seed=i)[0] for i in range(400)])
    room = 0.15 * float(np.ptp(expected, 0).max()) + 1e-3
    assert obs.min(0) == pytest.approx(expected.min(0), abs=room)
    assert obs.max(0) == pytest.approx(expected.max(0), abs=room)
    assert obs.std(0) == pytest.approx(expected.std(0), rel=0.15, abs=1e-3)


@pytest.mark.parametrize("env_id", sorted(TENSOR_ENVS))
def test_episodes_begin_anew_and_show_their_last_observation(env_id: str) -> None:
    """`final_obs` and `obs` agree but where an episode ended; there `obs` is a first observation. A limit truncates."""
    env, generator, count = tensor_env(env_id), np.random.default_rng(2), 16
    state, _ = env.reset(KEY, count)
    state["steps"][:8] = (env.spec.max_episode_steps or 0) - 5
    truncated = 0
    for t in range(60):
        step = env.step(state, random_actions(env, count, generator), rng.fold(KEY, t))
        ended = step.terminated | step.truncated
        assert not (step.terminated & step.truncated).any()
        assert torch.equal(step.obs[~ended], step.final_obs[~ended])
        assert torch.equal(step.obs, env.observe(step.state["env"]))
        assert (step.state["steps"][ended] == 0).all()
        assert (step.state["steps"][~ended] == state["steps"][~ended] + 1).all()
        truncated += int(step.truncated.sum())
        state = step.state
    assert truncated >= 4  # those that were put near the limit


@pytest.mark.parametrize("env_id", sorted(TENSOR_ENVS))
def test_vmap_over_seeds_equals_separate_environments(env_id: str) -> None:
    env, generator = tensor_env(env_id), np.random.default_rng(3)
    keys = [rng.key_from_seed(seed) for seed in (1, 2)]
    states = [env.reset(key, 4)[0] for key in keys]
    actions = [random_actions(env, 4, generator) for _ in keys]
    alone = [env.step(*given) for given in zip(states, actions, keys)]
    together = torch.vmap(lambda *given: tuple(env.step(*given)))(
        tree_stack(states), torch.stack(actions), torch.stack(keys)
    )
    for (name, x), (_, y) in zip(tree_items(tree_stack([tuple(step) for step in alone])), tree_items(together)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_breakout_equals_minatar() -> None:
    """Played beside the package's game, from its own starts, to the end of each episode."""
    try:
        game = importlib.import_module("minatar.environments.breakout")
    except ImportError:
        pytest.skip("MinAtar is not installed")
    env: Any = tensor_env("MinAtar/Breakout-v1")
    env.sticky = 0.0
    real, generator, points, numbers = game.Env(), np.random.default_rng(4), 0, (0, 1, 3)
    for _ in range(60):
        real.reset()
        state = env.initial(KEY, 1)
        right = real.ball_x == 9
        state["ball"][0, 0] = state["last"][0, 0] = real.ball_x
        state["direction"][0] = 3 if right else 2
        for _ in range(400):
            assert np.array_equal(env.observe(state)[0].numpy() > 0, real.state().transpose(2, 0, 1))
            follow = int(np.sign(real.ball_x - real.pos))  # mostly catches the ball
            action = (2 if follow > 0 else 1 if follow < 0 else 0) if generator.random() < 0.9 else 0
            state, reward, terminated = env.advance(state, torch.tensor([action]), KEY)
            expected, over = real.act(numbers[action])
            assert (float(reward), bool(terminated)) == (expected, over)
            points += expected
            if over:
                break
    assert points > 80


def test_maze_pays_for_the_goal_and_walls_stop() -> None:
    env: Any = tensor_env("GridMaze-v0")
    state = {
        "agent": torch.tensor([[3, 3], [3, 3]]),
        "goal": torch.tensor([[3, 4], [10, 10]]),
        "time": torch.zeros(2).long(),
    }
    after, pay, found = env.advance(state, torch.tensor([1, 0]), KEY)  # one step right to the goal; up, into the wall
    assert pay.tolist() == pytest.approx([1.0 - 0.9 / 100, 0.0])
    assert found.tolist() == [True, False]
    assert after["agent"].tolist() == [[3, 4], [3, 3]]
    view = env.observe(after).view(2, 2, 5, 5)
    assert view[0, 1, 2, 2] == 1  # it stands on the goal
    assert view[1, 1].sum() == 0  # out of sight
    assert view[1, 0, 1].all()  # the wall above


def test_gymnasium_copy_can_be_saved_and_continued() -> None:
    env: Any = make_env("MinAtar/Breakout-v1").unwrapped
    env.reset(seed=3)
    for _ in range(5):
        env.step(1)
    saved = env.get_state()
    first = [env.step(a)[0] for a in (0, 1, 2, 2)]
    env.reset(seed=9)
    env.set_state(saved)
    assert all(np.array_equal(a, env.step(b)[0]) for a, b in zip(first, (0, 1, 2, 2)))


def test_environment_without_tensors_is_refused() -> None:
    with pytest.raises(UserError, match=r"HalfCheetah-v5 has none\. Those with one: Acrobot-v1"):
        tensor_env("HalfCheetah-v5")


def test_state_is_a_tree_of_tensors() -> None:
    for env_id in TENSOR_ENVS:
        state, _ = tensor_env(env_id).reset(KEY, 3)
        assert all(isinstance(x, Tensor) and len(x) == 3 for _, x in tree_items(state)), env_id
        tree_map(torch.clone, state)
