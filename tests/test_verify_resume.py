"""`verify-resume` says identical where it is, and names what differs where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import config_for

from rl_training.cli import main
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.tools import verify_resume as vr


def test_a_resumed_run_is_identical(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["--algo", "dqn", "--env", "CartPole-v1", "--execution", "eager"]
    small = ["hidden_sizes=[8]", "batch_size=8", "learning_starts=20", "buffer_size=100", "eval_episodes=1"]
    assert main(["verify-resume", *argv, *[w for s in small for w in ("--set", s)], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["identical"], found["different"], found["environments"]) == (True, [], "exact")
    assert 0 < found["cut_at"] < found["steps"]
    assert found["gradient_steps"] >= vr.MIN_UPDATES
    assert found["compared"] > 20
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def careless(run_dir: Path, env_id: str) -> str:
        trainer = Trainer.resume(run_dir, progress=False)  # in this process: half a second instead of four
        trainer.loop.learner.train.target["q"].add_(1e-6)
        trainer.run()
        return "exact"

    monkeypatch.setattr(vr, "resume_in_fresh_process", careless)
    found = vr.verify_resume(config_for("dqn", tmp_path), steps=100)
    assert found["identical"] is False
    assert {"state/train.params.q", "metrics.jsonl"} <= set(found["different"])
    assert "state/keys" not in found["different"]


@pytest.mark.parametrize(
    ("argv", "word"),
    [([], "--config"), (["--config", "dqn/cartpole", "-n", "1"], "too few"), (["--config", "nope/x"], "nope/x")],
)
def test_bad_input(argv: list[str], word: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify-resume", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert word in err
    assert list(tmp_path.iterdir()) == []
