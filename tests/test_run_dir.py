"""The run directory: names that never clash, and small files that say what ran."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import yaml

from rl_training.errors import UserError
from rl_training.experiment.run import run_dir as rd
from rl_training.experiment.run.history import RunHistory

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def _create(output_dir: str) -> str:
    run = rd.create_run_dir(output_dir, "dqn", "CartPole-v1", [0])
    rd.write_metadata(run)
    (run / "owner").write_text(str(os.getpid()))
    return str(run)


def test_name_follows_the_contract(tmp_path: Path) -> None:
    stamp = r"\d{8}T\d{6}Z"
    for algo, env_id, seeds, pattern in [
        ("ppo", "CartPole-v1", [3], rf"ppo__CartPole-v1__seed3__{stamp}"),
        ("ppo", "CartPole-v1", [0, 1, 2, 3], rf"ppo__CartPole-v1__seed0-3__{stamp}"),
        ("sac", "ALE/Pong-v5", [0], rf"sac__ALE-Pong-v5__seed0__{stamp}"),
        ("sac", "my.module:../../Env v0\n", [0], rf"sac__my\.module-..-..-Env-v0__seed0__{stamp}"),
        ("sac", "äöü", [0], rf"sac__env__seed0__{stamp}"),
        ("sac", "E" * 300, [0, 99999], rf"sac__E+__seed0-99999__{stamp}"),
    ]:
        run = rd.create_run_dir(tmp_path / "a" / "b", algo, env_id, seeds)
        assert re.fullmatch(pattern, run.name), run.name
        assert NAME.fullmatch(run.name)
        assert run.parent == tmp_path / "a" / "b"
        assert run.is_dir()


def test_same_name_gets_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rd.time, "strftime", lambda *_: "20300101T000000Z")
    names = [rd.create_run_dir(tmp_path, "ppo", "E" * 300, [0]).name for _ in range(12)]
    assert names[1:3] == [f"{names[0]}__2", f"{names[0]}__3"]
    assert len(set(names)) == 12
    assert all(NAME.fullmatch(name) for name in names)


def test_eight_processes_get_eight_directories(tmp_path: Path) -> None:
    with ProcessPoolExecutor(8) as pool:
        runs = list(pool.map(_create, [str(tmp_path)] * 8))
    assert len(set(runs)) == 8
    assert sorted(str(path) for path in tmp_path.iterdir()) == sorted(runs)
    for run in runs:
        assert {p.name for p in Path(run).iterdir()} == {"checkpoints", "metadata.json", "owner"}


def test_unusable_output_dir_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="is a file"):
            rd.create_run_dir(bad, "ppo", "CartPole-v1", [0])

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", deny)
    with pytest.raises(UserError, match=r"Cannot create a run directory in .*: permission denied"):
        rd.create_run_dir(tmp_path / "x", "ppo", "CartPole-v1", [0])


def test_metadata_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rd.write_metadata(tmp_path, command=["/opt/secret/bin/rl-training", "train", "--algo", "ppo"])
    text = (tmp_path / "metadata.json").read_text()
    metadata = json.loads(text)
    assert metadata["status"] == "running"
    assert metadata["end"] is None
    assert metadata["command"] == ["rl-training", "train", "--algo", "ppo"]
    assert set(metadata["versions"]) == {"python", "rl_training", "torch", "numpy", "gymnasium", "safetensors"}
    assert "secret" not in text
    assert set(metadata["host"]) == {"os", "machine", "cpu_count", "gpu"}
    rd.update_status(tmp_path, "done", reason="solved")
    done = json.loads((tmp_path / "metadata.json").read_text())
    assert (done["status"], done["reason"]) == ("done", "solved")
    assert done["start"] == metadata["start"]
    assert done["end"] is not None
    rd.update_status(tmp_path, "running")
    resumed = json.loads((tmp_path / "metadata.json").read_text())
    assert resumed["end"] is None
    assert len(resumed["resumed"]) == 1
    (tmp_path / "metadata.json").write_text("{half")
    rd.update_status(tmp_path, "failed")
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "failed"


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert rd._git() is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], check=True)
    clean = rd._git()
    assert clean is not None
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert (rd._git() or {})["dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert rd._git() is None


def test_config_and_summary(tmp_path: Path) -> None:
    config = {"algo": "ppo", "tags": ["ä"], "algo_kwargs": {"gamma": 0.99, "clip": None}}
    rd.write_config(tmp_path, config)
    text = (tmp_path / "config.yaml").read_text()
    assert yaml.safe_load(text) == config
    assert text.startswith("algo: ppo")
    rd.write_summary(tmp_path, {"final_eval": {"ci95": (1.0, float("nan"))}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"final_eval": {"ci95": [1.0, None]}}
    assert {p.name for p in tmp_path.iterdir()} == {"config.yaml", "summary.json"}


def test_cheap_to_import() -> None:
    modules = ("run_dir", "metrics", "stats", "progress", "atomic")
    imports = "; ".join(f"import rl_training.experiment.run.{module}" for module in modules)
    code = f"import sys; {imports}; print([m for m in ('torch', 'rich', 'tensorboard', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_history_of_a_run_survives_a_checkpoint() -> None:
    history = RunHistory({"mean_return": 9.0}, {"mean_return": 7.0}, evaluated_at=400, due=["log", "save", "eval"])
    history.seconds_before = 60.0
    restored = RunHistory.from_json(json.loads(json.dumps(history.to_json())))
    assert (restored.best_eval, restored.last_eval) == ({"mean_return": 9.0}, {"mean_return": 7.0})
    assert (restored.evaluated_at, restored.due) == (400, ["log", "eval"])  # the checkpoint itself is not due again
    assert restored.seconds_before >= 60.0
