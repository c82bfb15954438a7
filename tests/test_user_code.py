"""Functions and objects that users pass in Python: schedules, per-step callbacks, other environments to evaluate in."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from helpers import assert_same_bits, config_for, small_fields

from rl_training import PPO, Callback, load
from rl_training.cli import main
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops.schedules import Schedule, table_of

SMALL = small_fields("ppo") | {"eval_episodes": 1, "execution": "eager", "num_envs": 2}


# --- schedules ------------------------------------------------------------------------------------------------------


def test_a_function_becomes_a_table_of_its_values():
    """As in Stable-Baselines3, the argument is the share of training that remains."""
    schedule = Schedule(**table_of(lambda remaining: 1e-3 * remaining**2))
    for done in (0.0, 0.013, 0.5, 0.77, 1.0):
        assert float(schedule(torch.tensor(done))) == pytest.approx(1e-3 * (1 - done) ** 2, abs=1e-7)
    at = torch.tensor([0.0, 0.25, 1.0])
    torch.testing.assert_close(torch.vmap(schedule)(at), 1e-3 * (1 - at) ** 2, rtol=0, atol=1e-7)
    assert Schedule.model_validate(schedule.model_dump()) == schedule


def test_a_function_is_saved_with_the_run_and_resumed_exactly(tmp_path):
    def rate(remaining: float) -> float:
        return 1e-3 * remaining

    config = config_for(
        "ppo", tmp_path, total_timesteps=256, checkpoint_interval=128, keep_checkpoints=5,
        algo_kwargs={"learning_rate": rate, "clip_range": lambda remaining: 0.1 + 0.1 * remaining},
    )  # fmt: skip
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    saved = yaml.safe_load((result.run_dir / "config.yaml").read_text())["algo_kwargs"]["learning_rate"]
    assert saved["kind"] == "table"
    assert saved["values"][25] == pytest.approx(0.75e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = Trainer.resume(result.run_dir / "checkpoints" / "step_000000000128", progress=False)
        resumed.run()
    assert_same_bits(trainer.loop.learner.train, resumed.loop.learner.train)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (lambda a, b: 1.0, "must be a function of the share of training that remains"),
        (lambda remaining: "fast", "must be a function"),
        (lambda remaining: remaining - 0.5, "must be at least 0"),
    ],
)
def test_a_function_that_is_no_schedule_is_refused_at_once(rate, message):
    with pytest.raises(UserError, match=message):
        PPO("CartPole-v1", learning_rate=rate)


# --- callbacks ------------------------------------------------------------------------------------------------------


class Count(Callback):
    def __init__(self) -> None:
        self.steps, self.rewards, self.episodes = 0, 0.0, 0

    def on_step(self, trainer: Any, step: Any) -> None:
        self.steps += len(step.rewards)
        self.rewards += float(step.rewards.sum())
        self.episodes += len(step.episodes)


@pytest.mark.parametrize("algo", ["dqn", "ppo", "ars"])
def test_on_step_sees_every_step(algo, tmp_path):
    count = Count()
    trainer = Trainer(config_for(algo, tmp_path), callbacks=[count], progress=False)
    trainer.run()
    assert count.steps == trainer.env_steps
    assert count.rewards == trainer.env_steps  # CartPole pays 1 for each step
    assert count.episodes == trainer.loop.episodes.finished[0]


def test_on_step_can_stop_the_run(tmp_path):
    class Stop(Callback):
        def on_step(self, trainer: Any, step: Any) -> None:
            if trainer.env_steps >= 50:
                trainer.request_stop("enough")

    result = Trainer(config_for("dqn", tmp_path, num_envs=1), callbacks=[Stop()], progress=False).run()
    assert (result.status, result.summary["env_steps"]) == ("stopped", 50)


def test_runs_without_such_callbacks_do_not_pay_for_them(tmp_path):
    trainer = Trainer(config_for("dqn", tmp_path), callbacks=[Callback()], progress=False)
    assert trainer.loop.observer is None
    trainer.close()


def test_on_step_needs_environments_outside_the_device(tmp_path):
    config = config_for("ppo", tmp_path, vectorization="device", num_envs=4)
    with pytest.raises(UserError, match="on_step cannot see environments on the device"):
        Trainer(config, callbacks=[Count()], progress=False)


# --- evaluation in other environments -------------------------------------------------------------------------------


def test_evaluate_in_another_environment(tmp_path):
    model = PPO("CartPole-v1", output_dir=str(tmp_path), **SMALL)
    model.learn(64)
    usual = model.evaluate(3)
    assert model.evaluate(3, env_kwargs={"max_episode_steps": 5})["per_seed"][0]["mean_length"] == 5.0
    longer = lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 3)  # noqa: E731
    agent = load(model.result.checkpoint_path)
    assert agent.evaluate(2, env=longer)["mean_return"] == 3.0
    assert agent.evaluate(2, env=gym.make("CartPole-v0"))["mean_return"] <= 200
    assert agent.evaluate(3)["mean_return"] == usual["mean_return"]  # nothing was remembered
    with pytest.raises(UserError, match="trained on CartPole-v1"):
        agent.evaluate(1, env="Acrobot-v1")
    assert np.isfinite(usual["mean_return"])


# --- offline without data -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:nothing was learned")
def test_an_offline_algorithm_without_data_says_so(tmp_path, capsys):
    words = [
        "train",
        "--algo",
        "iql",
        "--env",
        "Pendulum-v1",
        "-n",
        "4",
        "--no-progress",
        "--output-dir",
        str(tmp_path),
    ]
    small = [
        "--defaults",
        "--set",
        "hidden_sizes=[8]",
        "--set",
        "eval_episodes=1",
        "--set",
        "env_kwargs.max_episode_steps=10",
    ]
    assert main([*words, *small]) == 0
    assert (
        "warning: iql has no dataset, so it learns from 10,000 random actions: set dataset" in capsys.readouterr().err
    )
    assert main([*words, *small, "--set", "dataset.size=200"]) == 0
    assert "random actions" not in capsys.readouterr().err
