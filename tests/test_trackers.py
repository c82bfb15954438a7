"""Trackers get what metrics.jsonl gets, from a thread of their own; a broken or slow one costs a warning and no time.

The real packages are used where they are installed, offline. The others are small modules that record their calls.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import config_for

from rl_training.cli import main
from rl_training.errors import UserError
from rl_training.experiment.run import trackers
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.trackers import Feed, Trackers
from rl_training.experiment.run.trainer import Trainer

Calls = list[tuple[Any, ...]]


class Recorder:
    """The run object of Weights & Biases and of Trackio, as far as we use it."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.calls.append(("log", values, step))

    def define_metric(self, *names: str, **options: str) -> None:
        self.calls.append(("define_metric", names, options))

    def finish(self, **options: Any) -> None:
        self.calls.append(("finish", options))


class Client:
    """The MLflow client, as far as we use it."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return f"number of {name}"

    def create_run(self, number: str, run_name: str) -> Any:
        self.calls.append(("create_run", number, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, id: str, status: str) -> None:
        self.calls.append(("update_run", id, status))

    def log_param(self, id: str, key: str, value: str) -> None:
        self.calls.append(("param", key, value))

    def log_batch(self, id: str, metrics: Any) -> None:
        self.calls.append(("log", {m[0]: m[1] for m in metrics}, metrics[0][3]))

    def set_terminated(self, id: str, status: str) -> None:
        self.calls.append(("finish", id, status))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """wandb, mlflow and trackio as modules that write down what they are told."""
    seen: Calls = []

    def init(**options: Any) -> Recorder:
        seen.append(("init", options, threading.current_thread().name))
        return Recorder(seen)

    def module(name: str, **members: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    module("wandb", init=init, Settings=dict)
    module("trackio", init=init)
    module("mlflow", MlflowClient=lambda: Client(seen))
    module("mlflow.entities", Metric=lambda *parts: parts)
    return seen


def logged(calls: Calls) -> Calls:
    return [call for call in calls if call[0] == "log"]


def test_every_event_arrives_and_a_resumed_run_keeps_its_id(tmp_path: Path, calls: Calls) -> None:
    config = config_for("dqn", tmp_path, trackers=["wandb"], seeds=(0, 1))
    result = Trainer(config, progress=False).run()
    _, options, thread = next(call for call in calls if call[0] == "init")
    assert options["config"]["algo_kwargs"]["gamma"] == 0.99
    assert options["id"] == options["name"] == result.run_dir.name
    assert thread == "tracker-wandb"
    expected = []
    for row in read_metrics(result.run_dir):
        seed = row.pop("seed", None)
        step, _ = row.pop("step"), row.pop("time")
        tail = "" if seed is None else f"/seed_{seed}"
        expected.append({**{k + tail: v for k, v in row.items()}, "env_steps": step})
    assert [values for _, values, _ in logged(calls)] == expected
    assert calls[-1] == ("finish", {"exit_code": 0})
    calls.clear()
    Trainer.resume(result.run_dir, total_timesteps=200, progress=False).run()
    assert calls[0][1]["id"] == result.run_dir.name
    assert calls[0][1]["resume"] == "allow"


def test_mlflow_and_trackio(tmp_path: Path, calls: Calls) -> None:
    config = config_for("dqn", tmp_path, trackers=["mlflow"])
    result = Trainer(config, progress=False).run()
    assert calls[0] == ("create_run", "number of rl-training", result.run_dir.name)
    assert ("param", "algo_kwargs.batch_size", "16") in calls
    assert logged(calls)[-1][2] == 160
    assert calls[-1] == ("finish", "abc", "FINISHED")
    calls.clear()
    Trainer.resume(result.run_dir, total_timesteps=200, progress=False).run()
    assert calls[0] == ("update_run", "abc", "RUNNING")
    assert not [call for call in calls if call[0] == "create_run"]
    calls.clear()
    Trainer(config_for("dqn", tmp_path, trackers=["trackio"]), progress=False).run()
    assert calls[0][1]["resume"] == "allow"
    assert "eval/mean_reward" in logged(calls)[-1][1]
    assert calls[-1] == ("finish", {})


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failing_tracker_is_one_warning(
    where: str, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SystemExit(1) if where == "init" else ConnectionError("no network")

    if where == "init":
        monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    else:
        monkeypatch.setattr(Recorder, where, fail)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = Trainer(config_for("dqn", tmp_path, trackers=["wandb"]), progress=False).run()
    assert result.status == "completed"
    told = [str(w.message) for w in seen if "tracker" in str(w.message)]
    assert len(told) == 1
    assert told[0].startswith("the tracker wandb stopped (")
    assert "training continues" in told[0]


def test_a_slow_tracker_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it hangs, logging returns; events beyond the queue are dropped with one warning; so is the end."""
    monkeypatch.setattr(trackers, "_MAX_WAITING", 10)
    hang, entered = threading.Event(), threading.Event()

    class Slow:
        id = "slow"

        def log(self, step: int, values: Any) -> None:
            entered.set()
            hang.wait(600)

        def finish(self, failed: bool) -> None: ...

    feed = Feed("slow", Slow, lambda id: None)
    feed.log(0, {})
    assert entered.wait(60)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        start = time.monotonic()
        for step in range(1000):
            feed.log(step, {"x": 1.0})
        feed.close(failed=False)
    assert time.monotonic() - start < 300  # one that waited would need the tracker's 600 s
    assert [str(w.message).split(";")[0] for w in seen] == ["the tracker slow stopped (it is 10 events behind)"]
    hang.set()


def test_values_that_are_not_finite_are_left_out(tmp_path: Path, calls: Calls) -> None:
    feeds = Trackers(["wandb"], tmp_path, {})
    feeds.log(5, {"a": 1.0, "b": float("nan"), "c": float("inf")})
    feeds.close(failed=True)
    assert logged(calls) == [("log", {"a": 1.0, "env_steps": 5}, None)]
    assert calls[-1] == ("finish", {"exit_code": 1})


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    config = config_for("dqn", tmp_path / "runs", trackers=["wandb"])
    result = Trainer(config, progress=False).run()
    monkeypatch.delitem(sys.modules, "wandb")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else found(name, *a))
    before = len(list((tmp_path / "runs").iterdir()))
    with pytest.raises(UserError, match=r"the tracker wandb is not installed: pip install 'rl-training\[tracking\]'"):
        Trainer(config, progress=False)
    assert len(list((tmp_path / "runs").iterdir())) == before  # refused before anything was made
    with pytest.warns(UserWarning, match="continues without it"):
        again = Trainer.resume(result.run_dir, total_timesteps=200, progress=False).run()
    assert again.status == "completed"


def test_names_and_the_command_line(tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="trackers"):
        TrainConfig(algo="dqn", env_id="CartPole-v1", total_timesteps=1, trackers=["wandbb"])
    words = ["train", "--algo", "dqn", "--env", "CartPole-v1", "-n", "200", "--output-dir", str(tmp_path)]
    words += ["--set", "hidden_sizes=[8]", "--set", "eval_episodes=1", "--no-progress", "--json"]
    assert main([*words, "--track", "wandb", "--track", "trackio"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["status"] == "completed"
    assert sum(call[0] == "init" for call in calls) == 2
    ids = json.loads((Path(summary["run_dir"]) / "trackers.json").read_text())
    assert set(ids) == {"wandb", "trackio"}


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_real_package_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(name)  # after the settings: some are read when the package is imported
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = Trainer(config_for("dqn", tmp_path, trackers=[name]), progress=False).run()
    assert not [w for w in seen if "the tracker" in str(w.message)]
    assert name in json.loads((result.run_dir / "trackers.json").read_text())
    kept = {"wandb": "*/wandb/offline-run-*/*.wandb", "mlflow": "mlflow.db", "trackio": "trackio/*.db"}[name]
    assert list(tmp_path.glob(kept))
