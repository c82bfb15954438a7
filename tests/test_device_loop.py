"""Runs whose environments live on the device: they learn, resume exactly, and seeds of a study equal separate runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SHORT_EVALUATION, run_digest, slow_unless

from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.trainer import Trainer
from rl_training.runtime.loops import loop_class

ROLLOUT: dict[str, Any] = {"n_steps": 16, "batch_size": 32, "n_epochs": 2, "hidden_sizes": [16]}
REPLAY: dict[str, Any] = {"learning_starts": 40, "batch_size": 16, "buffer_size": 500, "hidden_sizes": [16]}
CASES = {
    "ppo": ("CartPole-v1", ROLLOUT),
    "a2c": ("Acrobot-v1", {"n_steps": 8, "hidden_sizes": [16]}),
    "recurrent_ppo": ("GridMaze-v0", {**ROLLOUT, "cell_size": 8, "sequence_length": 8}),
    "dqn": ("MountainCar-v0", REPLAY),
    "prioritized_dqn": ("CartPole-v1", REPLAY),
    "sac": ("Pendulum-v1", REPLAY),
    "td3": ("MountainCarContinuous-v0", REPLAY),
}


def config(name: str, output_dir: Path, **changes: Any) -> TrainConfig:
    env_id, fields = CASES[name]
    base = {
        "env_id": env_id, "total_timesteps": 320, "num_envs": 4, "vectorization": "device", "execution": "eager",
        "device": "cpu", "eval_episodes": 1, "eval_interval": 160, "log_interval": 64, "algo_kwargs": fields,
        **SHORT_EVALUATION,
    }  # fmt: skip
    return TrainConfig(algo=name, output_dir=str(output_dir), **{**base, **changes})


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_collect_end(self, trainer: Any, result: dict[str, Any]) -> None:
        if result["env_steps"] >= self.step:
            trainer.request_stop("to be resumed")


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("ppo", "dqn"), CASES))
def test_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = Trainer(config(name, tmp_path / "whole"), progress=False).run()
    cut = Trainer(config(name, tmp_path / "cut"), callbacks=[StopAt(128)], progress=False, check_every=1).run()
    assert cut.status == "stopped"
    assert cut.summary["env_steps"] < 320
    trainer = Trainer.resume(cut.run_dir, progress=False)
    assert trainer.env_restored == "exact"
    resumed = trainer.run()
    assert run_digest(resumed.checkpoint_path) == run_digest(whole.checkpoint_path)


def test_seeds_of_a_study_equal_separate_runs(tmp_path: Path) -> None:
    study = Trainer(config("ppo", tmp_path / "study", seeds=(3, 4)), progress=False)
    study.run()
    for i, seed in enumerate((3, 4)):
        alone = Trainer(config("ppo", tmp_path / f"{seed}", seed=seed), progress=False)
        alone.run()
        for name, flat in alone.loop.learner.train.params.items():
            together = study.loop.learner.train.params[name]
            torch.testing.assert_close(together[i], flat[0], rtol=1e-4, atol=1e-5)


def test_every_step_is_stored_once_and_counted(tmp_path: Path) -> None:
    """The replay holds what an environment stepped by hand goes through: each observation follows the last one."""
    trainer = Trainer(config("dqn", tmp_path, total_timesteps=120), progress=False)
    trainer.run()
    data = trainer.loop.learner.tree["data"]
    assert data["count"].tolist() == [[30] * 4]
    rows = trainer.loop.learner.store.stride
    obs, next_obs = (data[name][0].unflatten(0, (4, rows))[:, :30] for name in ("obs", "next_obs"))
    ended = (data["terminated"] | data["truncated"])[0].unflatten(0, (4, rows))[:, :29]
    assert not ended.any()  # MountainCar's episodes have 200 steps
    assert torch.equal(obs[:, 1:], next_obs[:, :-1])
    assert trainer.loop.learner.tree["env_steps"].tolist() == [120]


def test_episode_statistics_are_those_of_the_episodes(tmp_path: Path) -> None:
    """CartPole pays one a step, so mean return and length agree; both stay in the possible range."""
    result = Trainer(config("ppo", tmp_path, total_timesteps=1_600), progress=False).run()
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "rollout/ep_rew_mean" in row]
    assert rows
    for row in rows:
        assert row["rollout/ep_rew_mean"] == pytest.approx(row["rollout/ep_len_mean"])
        assert 8 <= row["rollout/ep_len_mean"] <= 500
    finished = [row["rollout/episodes"] for row in rows]
    assert finished == sorted(finished)


@pytest.mark.slow
def test_ppo_solves_cartpole_on_the_device(tmp_path: Path) -> None:
    """Trained on tensors, evaluated in Gymnasium's environment, with the settings of ppo/cartpole.

    With a constant rate, seeds end anywhere between 180 and 500, and the last digits of a processor's sums decide.
    """
    fields = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "learning_rate": "lin_1e-3", "gae_lambda": 0.8,
              "gamma": 0.98}  # fmt: skip
    chosen = config(
        "ppo", tmp_path, total_timesteps=60_000, num_envs=8, seeds=(0, 1, 2), eval_episodes=10, eval_interval=0,
        algo_kwargs=fields, execution="recorded", env_kwargs={},
    )  # fmt: skip
    done = Trainer(chosen, progress=False).run()
    scores = sorted(row["mean_return"] for row in done.final_eval["per_seed"])
    assert scores[1] >= 400, scores


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "HalfCheetah-v5"}, "HalfCheetah-v5 has none"),
        ({"env_id": "CartPole-v1", "env_kwargs": {"gravity": 1}}, r"env_kwargs \['gravity'\] do not fit CartPole-v1"),
        ({"env_id": lambda: None}, "needs the id of an environment"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_vector_env(**arguments, seeds=[0], num_envs=2, vectorization="device")


def test_loops_without_an_environment_refuse_the_device() -> None:
    with pytest.raises(UserError, match="of kind off_policy or on_policy; this one is offline"):
        loop_class("offline", "device")
