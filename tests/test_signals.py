"""Signals to a run whose environment hangs, and environments that end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from rl_training.cli import boundary
from rl_training.experiment.run.checkpoint import latest_valid
from rl_training.experiment.run.process import StopSignals

slow = pytest.mark.slow

MODULE = '''
import ctypes, os, sys, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Fault(CartPoleEnv):
    """Misbehaves in step number FAULT_AT of the process, as FAULT says."""
    count = 0

    def __init__(self, **arguments):
        super().__init__(**arguments)
        if os.environ["FAULT"] == "exit in the constructor":
            sys.exit(0)

    def step(self, action):
        Fault.count += 1
        if Fault.count == int(os.environ.get("FAULT_AT", 100)):
            print("HERE", file=sys.stderr, flush=True)
            fault = os.environ["FAULT"]
            if fault == "sleep":
                time.sleep(600)
            if fault == "C sleep":
                libc = ctypes.CDLL(None)
                while True:
                    libc.sleep(600)
            if fault == "swallow":
                while True:
                    try:
                        time.sleep(600)
                    except BaseException:
                        pass
            if fault == "exit":
                sys.exit(0)
            if fault == "chdir":
                os.makedirs("elsewhere", exist_ok=True)
                os.chdir("elsewhere")
        if os.environ["FAULT"] == "sleep in threads" and Fault.count >= int(os.environ["FAULT_AT"]):
            time.sleep(600)
        return super().step(action)

gymnasium.register("Fault-v0", entry_point=Fault, max_episode_steps=50)
'''


def start(tmp_path: Path, fault: str, *words: str, at: int = 100) -> subprocess.Popen[str]:
    (tmp_path / "fault_env.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "FAULT": fault, "FAULT_AT": str(at)}
    settings = ["num_envs=1", "checkpoint_interval=50", "eval_episodes=1"]
    return subprocess.Popen(
        [sys.executable, "-m", "rl_training", "train", "--algo", "dqn", "--env", "fault_env:Fault-v0", "-n", "300",
         "--execution", "eager", "--no-progress", *(word for s in settings for word in ("--set", s)), *words],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_hang(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while "HERE" not in (line := process.stderr.readline()):
        assert line, "the process ended early"


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal and wait until it arrives: two that a busy machine holds back at the same time count as one."""
    process.send_signal(number)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None and status.exists():
        waiting = [line.split()[1] for line in status.read_text().splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
        if not any(int(mask, 16) & 1 << number - 1 for mask in waiting):
            break
        time.sleep(0.01)


@slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(("fault", "signals"), [("sleep", 2), ("C sleep", 3), ("swallow", 3), ("sleep in threads", 2)])
def test_a_hung_environment_can_be_interrupted(
    tmp_path: Path, number: signal.Signals, status: int, fault: str, signals: int
) -> None:
    threads = ("--set", "vectorization=threads", "--set", "num_envs=2") if fault == "sleep in threads" else ()
    process = start(tmp_path, fault, *threads)
    wait_for_hang(process)
    for n in range(signals):
        time.sleep(0.2 if n < 2 else 1.5)  # the third only after the second had its chance
        if n == 2 and fault == "C sleep" and process.poll() is not None:
            break  # the call returned when the second signal arrived
        assert process.poll() is None
        send(process, number)
    _, errors = process.communicate(timeout=60)  # the environment would hang for ten minutes
    assert process.returncode == status
    assert "Traceback" not in errors
    latest_valid(next((tmp_path / "runs").iterdir()))  # the last checkpoint stands


@slow
@pytest.mark.parametrize("fault", ["exit", "exit in the constructor"])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_calls_sys_exit_is_named(tmp_path: Path, fault: str, vectorization: str) -> None:
    process = start(tmp_path, fault, "--set", f"vectorization={vectorization}")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "Fault-v0" in line
    assert "sys.exit(0)" in line


@slow
def test_an_environment_that_changes_the_directory_does_not_split_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, "chdir", at=60)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert not list((tmp_path / "elsewhere").iterdir())
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "summary.json").exists()
    assert latest_valid(run).name == "step_000000000300"


def test_signals_of_forked_children_are_not_counted() -> None:
    """An environment may fork. Three signals to its child must not end the run."""
    asked: list[int] = []
    with StopSignals(asked.append):
        pid = os.fork()
        if pid == 0:
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        time.sleep(0.1)
        assert asked == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [signal.SIGTERM]


def test_other_code_that_calls_sys_exit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def plug_in() -> None:
        sys.exit(0)

    assert boundary.run_app(app, []) == 1
    assert "sys.exit(0) was called in test_signals" in capsys.readouterr().err
