"""Agents on probe environments, compared with the values known in closed form.

The first test fails if a time limit is treated as termination, a bug that no other test would notice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import slow_unless

from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import Trainer

GAMMA = 0.9
OFF_POLICY = {"learning_starts": 100, "batch_size": 64, "buffer_size": 5_000, "gamma": GAMMA, "hidden_sizes": [32]}
RECIPES: dict[str, dict[str, Any]] = {
    "dqn": {
        "steps": 2_000, "num_envs": 1, "continuous": False,
        "kwargs": {**OFF_POLICY, "learning_rate": 3e-3, "target_update_interval": 20, "exploration_fraction": 0.3},
    },
    "ppo": {
        "steps": 12_000, "num_envs": 4, "continuous": False,
        "kwargs": {
            "n_steps": 32, "batch_size": 64, "n_epochs": 8, "gamma": GAMMA, "learning_rate": 3e-3, "hidden_sizes": [32],
        },
    },
    "sac": {  # no entropy bonus: the value is the plain return
        "steps": 1_500, "num_envs": 1, "continuous": True,
        "kwargs": {**OFF_POLICY, "learning_rate": 3e-3, "tau": 0.05, "ent_coef": 0.0},
    },
}  # fmt: skip


def trained(algo: str, env: str, tmp_path: Path, *, steps: float = 1.0, kwargs: Any = None, **env_kwargs: Any) -> Agent:
    recipe = RECIPES[algo]
    config = TrainConfig(
        algo=algo, env_id=f"rl_training/{env}-v0", total_timesteps=int(recipe["steps"] * steps), execution="recorded",
        num_envs=recipe["num_envs"], output_dir=str(tmp_path), eval_episodes=20, eval_interval=0, device="cpu",
        env_kwargs={"continuous": recipe["continuous"], **env_kwargs},
        algo_kwargs={**recipe["kwargs"], **(kwargs or {})},
    )  # fmt: skip
    trainer = Trainer(config, progress=False)
    trainer.run()
    return trainer.agent()


def one_hot(t: int, horizon: int) -> np.ndarray:
    obs = np.zeros(horizon + 1, np.float32)
    obs[t] = 1.0
    return obs


def recipes(quick: str | None = None) -> list[Any]:
    """Each algorithm; `make check` takes the one that is quick, if any."""
    return slow_unless(lambda algo: algo == quick, RECIPES)


@pytest.mark.parametrize("algo", recipes("ppo"))
def test_time_limit_is_not_the_end(algo: str, tmp_path: Path) -> None:
    """Reward 1 at every step, truncated after ten steps: the value is 1 / (1 - gamma) = 10, not 6.5 (ten steps)."""
    agent = trained(algo, "ConstantReward", tmp_path, horizon=10, ending="truncated")
    assert agent.value(np.ones(1, np.float32)) == pytest.approx(1.0 / (1.0 - GAMMA), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [3])
def test_time_limit_is_not_the_end_with_n_step_and_priorities(n_step: int, tmp_path: Path) -> None:
    options = {"n_step": n_step, "prioritized": True, "double": True, "dueling": True}
    agent = trained("dqn", "ConstantReward", tmp_path, kwargs=options, horizon=10, ending="truncated")
    assert agent.value(np.ones(1, np.float32)) == pytest.approx(1.0 / (1.0 - GAMMA), rel=0.05)


@pytest.mark.parametrize("algo", recipes("dqn"))
def test_termination_is_the_end(algo: str, tmp_path: Path) -> None:
    agent = trained(algo, "ConstantReward", tmp_path, steps=1.5, horizon=10, ending="terminated")
    for t in (0, 5, 9):
        expected = (1.0 - GAMMA ** (10 - t)) / (1.0 - GAMMA)
        assert agent.value(one_hot(t, 10)) == pytest.approx(expected, rel=0.05), f"t = {t}"


@pytest.mark.parametrize("algo", recipes())
def test_delayed_reward_is_discounted_back(algo: str, tmp_path: Path) -> None:
    agent = trained(algo, "DelayedReward", tmp_path, horizon=5)
    values = agent.value(np.stack([one_hot(t, 5) for t in range(5)]))
    assert values == pytest.approx([GAMMA ** (4 - t) for t in range(5)], rel=0.1)


@pytest.mark.parametrize("algo", recipes("sac"))
def test_action_that_pays_is_learned(algo: str, tmp_path: Path) -> None:
    agent = trained(algo, "ActionReward", tmp_path, kwargs={"ent_coef": 0.01} if algo == "sac" else None)
    for sign in (1.0, -1.0):
        action = agent.predict(np.array([sign], np.float32))
        if RECIPES[algo]["continuous"]:
            assert float(action[0]) == pytest.approx(sign / 2, abs=0.15)
        else:
            assert int(action) == (sign > 0)
    if algo == "dqn":  # episodes have one step, so Q is the reward
        assert agent.q_values(np.array([1.0], np.float32)) == pytest.approx([0.0, 1.0], abs=0.05)
        assert agent.q_values(np.array([[-1.0]], np.float32))[0] == pytest.approx([1.0, 0.0], abs=0.05)
    best = 0.0 if RECIPES[algo]["continuous"] else 1.0
    assert agent.evaluate(20)["mean_return"] == pytest.approx(best, abs=0.03)


@pytest.mark.slow
def test_ppo_learns_continuous_actions(tmp_path: Path) -> None:
    agent = trained("ppo", "ActionReward", tmp_path, continuous=True)
    for sign in (1.0, -1.0):
        assert float(agent.predict(np.array([sign], np.float32))[0]) == pytest.approx(sign / 2, abs=0.15)


@pytest.mark.parametrize("env", slow_unless(lambda env: env == "DictSign", ["VisualSign", "DictSign"]))
def test_images_and_mixed_observations_are_learned(env: str, tmp_path: Path) -> None:
    agent = trained("dqn", env, tmp_path, steps=0.35, kwargs={"learning_rate": 1e-3, "batch_size": 32}, size=8)
    assert agent.evaluate(30)["mean_return"] >= 0.95
