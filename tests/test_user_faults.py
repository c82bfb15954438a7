"""Bad data from environments, files and options ends with one sentence that names its source, and the right status."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import typer
from gymnasium import spaces
from helpers import config_for

from rl_training.cli import main
from rl_training.envs import workers
from rl_training.envs.vector import EnvError
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError, printable
from rl_training.experiment.run import checkpoint as checkpoints
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.checkpoint import latest_valid, load_checkpoint, save_checkpoint
from rl_training.experiment.run.metrics import MetricsLogger, read_metrics
from rl_training.experiment.run.trainer import Trainer
from rl_training.reports import text
from rl_training.reports.live import LiveRuns


class Odd(gym.Env[Any, Any]):
    """Ends every episode at once and returns what it is given."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    given: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.given.get("first", np.zeros(2, np.float32)), {}

    def step(self, action: Any) -> Any:
        values = {"obs": np.zeros(2, np.float32), "reward": 0.0, "terminated": True, "truncated": False, "info": {}}
        return tuple((values | {k: v for k, v in self.given.items() if k != "first"}).values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"obs": np.zeros(2, np.complex64)}, "has the type complex64"),
        ({"first": np.zeros(2, np.complex64)}, "has the type complex64"),
        ({"obs": np.array(["0", "1"])}, "it must hold real numbers"),
        ({"terminated": "False"}, "terminated must be true or false, not 'False'"),
        ({"truncated": "False"}, "truncated must be true or false, not 'False'"),
        ({"terminated": None}, "terminated must be true or false, not None"),
        ({"terminated": np.array([True, False])}, "true or false, one value each"),
        ({"terminated": np.array([True])}, "terminated must be true or false"),
        ({"info": None}, "info must be a dict, not None"),
        ({"info": {"is_success": "False"}}, "is_success in info must be true, false or a number, not 'False'"),
        ({"info": {"is_success": [True]}}, "is_success in info must be"),
    ],
)
def test_bad_data_names_the_environment(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "given", given)
    envs = make_vector_env(Odd, seeds=[0], num_envs=2)
    with pytest.raises(EnvError, match=rf"^Odd, sub-environment [01] .*{message}"):
        envs.reset() if "first" in given else one_step(envs)


def one_step(envs: Any) -> Any:
    envs.reset()
    return envs.step(np.zeros(envs.num_envs, np.int64))


def test_flags_that_are_numpy_or_numbers_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in (True, np.bool_(True), 1, np.array(True)):
        monkeypatch.setattr(Odd, "given", {"terminated": flag, "info": {"is_success": np.float32(1.0)}})
        step = one_step(make_vector_env(Odd, seeds=[0], num_envs=1))
        assert step.terminated.tolist() == [True]
        assert step.episodes[0].success == 1.0


def failing(error: BaseException) -> Callable[..., Any]:
    def make(**_: Any) -> Any:
        raise error

    return make


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (AssertionError("bad asset"), EnvError, "Failing-v0 failed while it was made: AssertionError: bad asset"),
        (FileNotFoundError(2, "No such file", "x.rom"), UserError, "Failing-v0 cannot be made: .*x.rom"),
        (SystemExit(0), EnvError, r"Failing-v0 called sys.exit\(0\) while it was made"),
    ],
)
def test_a_failing_constructor_names_the_environment(error: BaseException, kind: type[Exception], message: str) -> None:
    gym.register("Failing-v0", entry_point=failing(error))
    try:
        with pytest.raises(kind, match=message):
            make_vector_env("Failing-v0", seeds=[0], num_envs=1)
    finally:
        gym.registry.pop("Failing-v0")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("no fuel"), "RuntimeError: no fuel"), (StopIteration(), "StopIteration"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
        (FileNotFoundError(2, "No such file", "x.map"), "FileNotFoundError: [Errno 2] No such file: 'x.map'"),
        (typer.BadParameter("x"), "BadParameter: x"), (ValueError("\udcff"), "ValueError: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["step", "reset"])
def test_an_error_of_an_environment_names_it(
    method: str, error: Exception, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    Fails = type("Fails", (Odd,), {method: fail})
    gym.register("Failing-v0", entry_point=Fails)
    try:
        words = ["train", "-a", "dqn", "-e", "Failing-v0", "-n", "50", "--defaults", "-o", str(tmp_path)]
        assert main([*words, "--no-progress"]) == 1
    finally:
        gym.registry.pop("Failing-v0")
    said = capsys.readouterr().err
    assert f"error: the environment failed: {message}, raised in {__name__} ({__file__}:" in said


@pytest.mark.parametrize("setting", ["id=1", "disable_env_checker=true", "max_episode_steps=0", "render_mode=[1]"])
def test_arguments_that_do_not_fit_are_the_users_mistake(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--algo", "dqn", "--env", "CartPole-v1", "-n", "100", "--no-probe"]
    assert main([*words, "--set", f"env_kwargs.{setting}"]) == 2
    assert "CartPole-v1" in capsys.readouterr().err


def test_a_number_of_400_digits_is_the_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--algo", "dqn", "--env", "CartPole-v1", "-n", "9" * 400]) == 2
    assert "must be a positive number of steps" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which tests copy or only read."""
    config = config_for("dqn", tmp_path_factory.mktemp("runs"), total_timesteps=80, checkpoint_interval=40)
    return Trainer(config, progress=False).run().run_dir


@pytest.mark.parametrize("option", ["--html", "--markdown"])
@pytest.mark.parametrize("place", ["/", "."])
def test_a_report_to_a_directory_is_the_users_mistake(run: Path, option: str, place: str) -> None:
    assert main(["report", str(run), option, place]) == 2


@pytest.mark.parametrize("option", ["--html", "--markdown"])
def test_a_report_does_not_replace_a_device(run: Path, option: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["report", str(run), option, str(pipe)]) == 2
    assert pipe.is_fifo()


def copy_of(run: Path, tmp_path: Path, change: Callable[[dict[str, Any], Any], None]) -> Path:
    """A run directory with a sealed checkpoint whose content was changed."""
    found = load_checkpoint(latest_valid(run))
    meta, tensors = json.loads(json.dumps(found.meta)), {k: dict(v) for k, v in found.tensors.items()}
    change(meta, tensors)
    save_checkpoint(tmp_path / "copy" / "checkpoints", found.path.name, tensors=tensors, meta=meta)
    return tmp_path / "copy"


def put(*path: Any) -> Callable[[dict[str, Any], Any], None]:
    *keys, last, value = path

    def change(meta: dict[str, Any], _: Any) -> None:
        place: Any = meta
        for key in keys:
            place = place[key]
        place[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("counters", "env_steps", "x"), put("counters", "env_steps", 1e400),
        put("counters", "episodes", "windows", [["a"]]),
        put("counters", "metrics", {"a": "b"}), put("counters", "env_state", {"sub_envs": [{"length": "x"}]}),
        put("best_eval", "x"), put("best_eval", "step", "x"), put("last_eval", {}), put("owed", ["x"]),
        put("elapsed_s", "x"), put("metrics_position", -1), put("metrics_position", "x"), put("callbacks", []),
        put("env_spec", "action", "nvec", ["x"]), put("config", "seeds", ["x"]),
    ],
)  # fmt: skip
def test_a_sealed_checkpoint_with_malformed_meta_data_is_refused(run: Path, tmp_path: Path, change: Any) -> None:
    assert main(["resume", "--run", str(copy_of(run, tmp_path, change)), "-n", "120", "--no-progress"]) in (0, 2)


@pytest.mark.parametrize("change", [put("env_spec", "action", "nvec", ["x"]), put("env_spec", 1.5)])
def test_a_malformed_specification_is_refused(change: Any, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a checkpoint of a training run"):
        Agent.load(copy_of(run, tmp_path, change))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_refused(run: Path, tmp_path: Path, value: float) -> None:
    def change(_: Any, tensors: Any) -> None:
        name = next(name for name in tensors["state"] if ".params." in name)
        tensors["state"][name] = torch.full_like(tensors["state"][name], value)

    with pytest.raises(UserError, match=r"is refused: .*params.* contains NaN or infinity"):
        Agent.load(copy_of(run, tmp_path, change))


def test_other_types_in_a_sealed_checkpoint_are_refused(run: Path, tmp_path: Path) -> None:
    def change(_: Any, tensors: Any) -> None:
        name = next(name for name in tensors["state"] if ".params." in name)
        tensors["state"][name] = tensors["state"][name].double()

    with pytest.raises(UserError, match=r"has the type torch.float64, not torch.float32"):
        Agent.load(copy_of(run, tmp_path, change))


def test_a_linked_checkpoint_is_skipped_with_a_warning(run: Path, tmp_path: Path) -> None:
    copy, told = copy_of(run, tmp_path, lambda meta, tensors: None), []
    newest = latest_valid(copy)
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    older = save_checkpoint(newest.parent, "step_000000000001", tensors={}, meta={})
    assert latest_valid(copy, told.append) == older
    assert "symbolic link" in told[0]
    assert checkpoints.list_checkpoints(copy) == [older]  # a link is never pruned or renamed


@pytest.mark.parametrize("fate", ["removed", "replaced"])
def test_a_log_that_disappears_is_written_again(tmp_path: Path, fate: str) -> None:
    logger = MetricsLogger(tmp_path, tensorboard=False)
    logger.log(1, {"a": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.unlink()
    if fate == "replaced":
        path.write_text("{}\n")
    with pytest.warns(UserWarning, match="removed or replaced"):
        logger.log(2, {"a": 2.0})
    assert logger.position == path.stat().st_size
    logger.close()
    assert [row["a"] for row in read_metrics(tmp_path)] == [1.0, 2.0]


HOSTILE = "Cart\x1b[31mPole\n| x | <b>`[a](b)`\u202e-v1"


def test_names_from_files_cannot_control_the_terminal_or_markdown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printable(HOSTILE)
    assert shown.isprintable()
    assert "\\x1b[31m" in shown
    place = tmp_path / "hostile"
    place.mkdir()
    config = (run / "config.yaml").read_text().replace("CartPole-v1", json.dumps(HOSTILE))
    (place / "config.yaml").write_text(config)
    for name in ("metrics.jsonl", "metadata.json", "summary.json"):
        (place / name).write_bytes((run / name).read_bytes())
    out = tmp_path / "report.md"
    assert main(["report", str(place), "--markdown", str(out)]) == 0
    printed = capsys.readouterr()
    for where in (printed.out, printed.err, out.read_text()):
        assert "\x1b" not in where
        assert "\u202e" not in where
    [heading] = [line for line in out.read_text().splitlines() if line.startswith("## Cart")]
    assert "<b>" not in heading
    assert "[a](" not in heading


def test_markdown_cells_stay_in_their_table() -> None:
    assert text._escape("a|b") == "a\\|b"


def test_an_error_in_a_thread_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_training.cli import boundary

    def fail() -> None:
        raise OSError("disk\nfull")

    with boundary._quiet_threads():
        thread = threading.Thread(target=fail, name="writer")
        thread.start()
        thread.join()
    assert capsys.readouterr().err == "warning: writer failed: OSError: disk full\n"


@pytest.mark.slow
def test_ctrl_c_while_workers_start_shows_no_traceback(tmp_path: Path) -> None:
    """The signal goes to the whole process group, as from a terminal, at several instants of the start."""
    words = ["train", "--algo", "dqn", "--env", "CartPole-v1", "-n", "100000", "--no-progress"]
    words += ["--execution", "eager", "--set", "vectorization=async", "--set", "num_envs=2", "-o", str(tmp_path)]
    for seconds in (1.5, 3.0, 4.5):
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_training", *words], stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in background jobs
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors


def test_ctrl_c_while_the_command_line_is_imported_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "rl_training.cli.app", Interrupted("app"))
    assert main(["presets"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_worker_whose_start_was_interrupted_is_not_waited_for() -> None:
    def start() -> None:
        raise KeyboardInterrupt

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **_: SimpleNamespace(start=start))
    worker = workers._Worker(0, range(1))
    with pytest.raises(KeyboardInterrupt):
        worker.launch(context)
    workers._shut_down([worker])
    assert worker.process is None


class NoMessage(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def test_an_exception_without_a_message_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    gym.register("Failing-v0", entry_point=failing(NoMessage()))
    try:
        assert main(["plan", "--algo", "dqn", "--env", "Failing-v0", "-n", "100", "--no-probe"]) == 1
    finally:
        gym.registry.pop("Failing-v0")
    assert "Failing-v0 failed while it was made: NoMessage" in capsys.readouterr().err


def test_a_network_that_no_machine_has_room_for_is_the_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--algo", "tqc", "--env", "Pendulum-v1", "-n", "100", "--no-probe"]
    assert main([*words, "--set", f"num_quantiles={10**19}"]) == 2
    assert "not enough memory" in capsys.readouterr().err


def test_messages_about_checkpoints_are_bounded(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "step_000000000001", tensors={}, meta={})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("checksum")
    for key in ("schema", "name"):
        (path / "manifest.json").write_bytes(checkpoints._manifest_bytes({**manifest, key: "9" * 5000}))
        assert len(str(checkpoints.verify(path))) < 500


CLUSTER = {f"cluster/{key}": 1.0 for key in ("actors", "actors_replaced", "lost_steps", "unrolls_under_way")}


@pytest.mark.parametrize(
    "change",
    [
        {"step": 10**400}, {"time": -(10**400)}, {"eval/mean_reward": 10**400}, {"eval/mean_reward": 1.5e308},
        {"time/fps": 10**400}, {"time/fps": 1e-320}, {"seed": ["x"]}, {"nonfinite": {"step": "NaN"}},
        {"nonfinite": {"step": "inf"}}, CLUSTER, CLUSTER | {"cluster/learner_busy": "x"},
        CLUSTER | {"cluster/learner_busy": 1.0, "cluster/replay_size": 1.0},
        {"time/fps": "x"},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_a_damaged_log_is_one_sentence_or_left_out(
    change: dict[str, Any], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.yaml", "metadata.json", "summary.json"):
        (copy / name).write_text((run / name).read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in reversed(rows) if "eval/mean_reward" in row)
    rows.append({**last, **change})
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in (["report", str(copy)], ["report", str(copy), "--html", str(tmp_path / "x.html")]):
        assert main(command) in (0, 2)
    assert main(["cluster", "status", str(copy)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert all("metrics.jsonl" in line or "about a cluster" in line for line in said)
    for metadata in ("{}", '{"status": "running"}'):
        (copy / "metadata.json").write_text(metadata)
        live = LiveRuns(tmp_path)
        live.refresh()
        (row,) = live.overview()
        json.dumps([row, live.curves(row["id"], ["eval/mean_reward"])])
