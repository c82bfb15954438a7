"""Environments of other packages, where they are installed: an id, a few updates, an evaluation and an exact resume."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import config_for

from rl_training import load
from rl_training.envs.factory import make_env
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.tools.lint_env import lint

CASES = [  # package, environment, algorithm, changes
    ("minigrid", "MiniGrid-Empty-5x5-v0", "ppo", {"env_kwargs": {"max_steps": 20}}),
    ("minigrid", "MiniGrid-DoorKey-5x5-v0", "dqn", {"env_wrappers": ["minigrid.wrappers:ImgObsWrapper"]}),
    ("minatar", "MinAtar/Freeway-v1", "dqn", {"env_kwargs": {"max_episode_steps": 30}}),
    ("highway_env", "highway-fast-v0", "dqn", {"total_timesteps": 60}),
    ("popgym", "popgym-RepeatPreviousEasy-v0", "recurrent_ppo", {}),
    ("gymnasium_robotics", "PointMaze_UMaze-v3", "sac", {"env_kwargs": {"max_episode_steps": 20}}),
    ("gymnasium_robotics", "FetchReach-v4", "sac", {"algo_kwargs": {"her": {}}}),
    ("dm_control", "DMControl/cartpole-balance-v0", "sac", {"env_kwargs": {"max_episode_steps": 20}}),
    ("ale_py", "ALE/Pong-v5", "ppo", {"env_kwargs": {"obs_type": "grayscale", "max_episode_steps": 20}}),
    ("envpool", "CartPole-v1", "ppo", {"vectorization": "envpool"}),
]


def trained(env_id: Any, algo: str, tmp_path: Any, env: Any = None, **changes: Any) -> Any:
    config = config_for(algo, tmp_path, **{"env_id": env_id, "total_timesteps": 160, **changes})
    return Trainer(config, env=env, progress=False).run()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "env_id", "algo", "changes"), CASES)
def test_environment_trains_evaluates_and_loads(package, env_id, algo, changes, tmp_path):
    pytest.importorskip(package)
    if package == "minigrid":
        pytest.importorskip("minigrid.wrappers")
    try:
        if package != "envpool":
            make_env(env_id, changes.get("env_kwargs")).close()
    except (UserError, AssertionError) as error:  # Fetch and dm_control need other versions of mujoco
        pytest.skip(f"{env_id} cannot be made here: {error}")
    result = trained(env_id, algo, tmp_path, **changes)
    assert result.status == "completed"
    assert np.isfinite(result.final_eval["mean_return"])
    assert load(result.checkpoint_path).evaluate(1)["episodes"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lint_says_that_the_mission_is_not_used():
    pytest.importorskip("minigrid")
    found = lint("MiniGrid-Empty-5x5-v0")
    assert found["problems"] == 0
    assert any("text in the observation is not used: mission" in f["what"] for f in found["findings"])


class AgainstRandom(gym.Env[Any, Any]):
    """One player's view of a two-player PettingZoo game; the other one moves at random."""

    def __init__(self, make: Any) -> None:
        self.game = make()
        self.game.reset()
        self.me, self.other = self.game.possible_agents
        self.observation_space = spaces.Dict(dict(self.game.observation_space(self.me).items()))
        self.action_space = self.game.action_space(self.me)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.game.reset(seed=seed)
        return self._my_turn()[0], {}

    def step(self, action: Any) -> Any:
        self.game.step(int(action))
        obs, reward, ended = self._my_turn()
        return obs, reward, ended, False, {}

    def _my_turn(self) -> Any:
        game = self.game
        while game.agent_selection != self.me and not any(game.terminations.values()):
            mask = game.observe(self.other)["action_mask"]
            game.step(int(self.np_random.choice(np.flatnonzero(mask))))
        return game.observe(self.me), float(game.rewards[self.me]), any(game.terminations.values())


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_one_player_of_a_pettingzoo_game(algo, tmp_path):
    """Illegal moves end PettingZoo's games with a loss, so a policy that obeys the mask makes none."""
    pytest.importorskip("pettingzoo")
    connect_four = pytest.importorskip("pettingzoo.classic.connect_four_v3")

    def make(**_: Any) -> Any:
        return AgainstRandom(connect_four.env)

    assert lint(make)["problems"] == 0
    result = trained("ConnectFour", algo, tmp_path, env=make)
    assert result.status == "completed"
    assert result.final_eval["per_seed"][0]["mean_length"] >= 4
