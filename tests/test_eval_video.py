"""`eval_video`: one video for each evaluation, and the same training as without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml
from helpers import config_for, run_digest, slow_unless
from report_runs import make_run
from test_video import Counter, frames

from rl_training import PPO
from rl_training.cli import main
from rl_training.envs import video
from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.studies.sweep import identity
from rl_training.reports.live import LiveRuns

pytest.importorskip("imageio_ffmpeg")
KIND = {"dqn": "discrete", "ppo": "discrete", "td3": "box"}
NAMES = [f"step_{step:012d}.mp4" for step in (80, 160)]


def run(name: str, folder: Path, **changes: Any) -> Any:
    def make(**arguments: Any) -> Any:
        return Counter(KIND[name], **arguments)

    config = config_for(name, folder, **{"eval_interval": 80, "eval_video": True, **changes})
    return Trainer(config, env=make, progress=False).run()


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "dqn", KIND))
def test_every_evaluation_has_a_video_and_training_is_the_same_without(name, tmp_path):
    with_videos, without = run(name, tmp_path), run(name, tmp_path, eval_video=False)
    evaluated = [row["step"] for row in read_metrics(with_videos.run_dir) if "eval/mean_reward" in row]
    assert len(evaluated) == 2
    names = [f"step_{step:012d}.mp4" for step in evaluated]
    assert frames(with_videos.run_dir / "videos") == dict.fromkeys(names, 8)  # episodes have seven steps
    assert not (without.run_dir / "videos").exists()
    assert run_digest(with_videos.checkpoint_path) == run_digest(without.checkpoint_path)


def test_a_study_shows_its_first_seed(tmp_path):
    result = run("dqn", tmp_path, seeds=(3, 5))
    assert frames(result.run_dir / "videos") == dict.fromkeys(NAMES, 8)


class StopAt(Callback):
    def on_collect_end(self, trainer: Any, result: dict[str, Any]) -> None:
        if result["env_steps"] == 80:
            trainer.request_stop("the test asks for it")


def test_a_resumed_run_goes_on_with_its_videos(tmp_path):
    def make(**arguments: Any) -> Any:
        return Counter("discrete", **arguments)

    config = config_for("dqn", tmp_path, eval_interval=80, eval_video=True)
    first = Trainer(config, env=make, callbacks=[StopAt()], progress=False).run()
    assert frames(first.run_dir / "videos") == {NAMES[0]: 8}
    Trainer.resume(first.run_dir, env=make, progress=False).run()
    assert frames(first.run_dir / "videos") == dict.fromkeys(NAMES, 8)


def test_a_signal_during_the_video_leaves_the_whole_evaluation_to_the_resumed_run(tmp_path):
    config = config_for("dqn", tmp_path, eval_interval=80, eval_video=True)
    trainer = Trainer(config, env=lambda **arguments: Counter("discrete", **arguments), progress=False)
    train = trainer.loop.learner.train
    answers = iter([False, False, True])
    assert not trainer.videos.record(tmp_path, train, 80, lambda: next(answers))
    assert not any((tmp_path / "videos").iterdir())
    assert trainer.videos.record(tmp_path, train, 80, lambda: False)
    assert frames(tmp_path / "videos") == {NAMES[0]: 8}
    trainer.close()


class Blind(Counter):
    metadata = {"render_modes": ["ansi"]}


class Broken(Counter):
    def render(self) -> Any:
        raise RuntimeError("no display")


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("rl_training/DeepSea-v0", "it has no pictures at all"),
        (lambda **arguments: Blind("discrete", **arguments), "it has only ansi"),
        (lambda **arguments: Broken("discrete", **arguments), "cannot be recorded: RuntimeError: no display"),
        (lambda: gym.make("CartPole-v1"), "make it with render_mode='rgb_array'"),
        (gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2), "this CartPole-v1 steps several at a time"),
    ],
)
def test_environments_without_pictures_are_refused_before_training(env, reason, tmp_path):
    with pytest.raises(UserError, match=f"eval_video.*{reason}"):
        PPO(env, eval_video=True, output_dir=str(tmp_path)).learn(64)
    assert not any(tmp_path.iterdir())


def test_it_needs_an_encoder(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "can_write_video", lambda: False)
    with pytest.raises(UserError, match="eval_video needs a video encoder: pip install 'rl-training\\[video\\]'"):
        Trainer(config_for("dqn", tmp_path, eval_video=True), progress=False)


def test_instances_and_functions_that_choose_the_mode_themselves(tmp_path):
    pytest.importorskip("pygame")
    envs = (
        gym.make("CartPole-v1"),
        lambda: gym.make("CartPole-v1", render_mode="rgb_array"),
        Counter("discrete", render_mode="rgb_array"),
    )
    for env in envs:
        result = PPO(
            env, n_steps=32, num_envs=1, batch_size=32, eval_video=True, eval_interval=0, output_dir=str(tmp_path)
        ).learn(64)
        length = result.final_eval["per_seed"][0]["mean_length"]
        (count,) = frames(result.run_dir / "videos").values()
        assert 1 < count <= length * result.final_eval["episodes"] + 1


def test_command_line_and_file(tmp_path, capsys):
    pytest.importorskip("pygame")
    fields = config_for("ppo", tmp_path / "runs", eval_video=True).to_dict()
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**fields, "total_timesteps": 64}))
    assert main(["train", "--config", str(tmp_path / "mine.yaml"), "--json", "--no-progress"]) == 0
    result = json.loads(capsys.readouterr().out)
    length = result["final_eval"]["per_seed"][0]["mean_length"]
    (found,) = (tmp_path / "runs").glob("*/videos")
    assert frames(found) == {"step_000000000064.mp4": length + 1}  # of the one episode of the evaluation
    argv = ["--config", str(tmp_path / "mine.yaml"), "--set", "eval_video=maybe"]
    assert main(["train", *argv]) == 2
    assert "eval_video" in capsys.readouterr().err


def test_runs_with_and_without_videos_are_the_same_experiment(tmp_path):
    config = config_for("dqn", tmp_path)
    assert identity(config) == identity(config.model_copy(update={"eval_video": True}))
    for name, shown in (("a", True), ("b", False)):
        path = make_run(tmp_path, name, {0: 1.0}) / "config.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "eval_video": shown}))
    runs = LiveRuns(tmp_path)
    runs.refresh()
    assert len({row["group"] for row in runs.overview()}) == 1
