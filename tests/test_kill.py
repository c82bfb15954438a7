"""Runs that are shot: fifty SIGKILLs lose nothing; SIGTERM and SIGINT end with a complete checkpoint and 143 / 130."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import command
from helpers import config_for, run_digest

from rl_training.experiment.run.checkpoint import latest_valid, list_checkpoints, verify

KILLS = 50


class Zygote:
    """Starts jobs as forked children (see driver.py) that can be killed from here."""

    def __init__(self, scratch: Path) -> None:
        self.result, self.errors = scratch / "result.json", (scratch / "errors.txt").open("w")
        self.process = subprocess.Popen(
            command("zygote"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )  # fmt: skip
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, job: dict[str, Any], *, kill_after: float | None = None, number: int = signal.SIGKILL) -> int:
        """Exit status of the child (negative: the signal that ended it)."""
        assert self.process.stdin is not None
        self.result.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps({**job, "result": str(self.result)}) + "\n")
        self.process.stdin.flush()
        pid = int(self._line())
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, number)
        self.process.stdin.write("reap\n")
        self.process.stdin.flush()
        return int(self._line())

    def outcome(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.result.read_text())
        return data

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.errors.close()


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path)
    yield zygote
    zygote.close()


def _next_job(root: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Resume the one run below `root` that has a checkpoint; before the first checkpoint, start again."""
    found = sorted(path for path in root.glob("*") if list_checkpoints(path, "step"))
    return {"resume": str(found[-1])} if found else fresh


def _completed(root: Path) -> Path | None:
    """The run below `root` that says it is complete. A signal may still have hit the process after that."""
    runs = (path for path in root.glob("*") if (path / "metadata.json").exists())
    return next((run for run in runs if json.loads((run / "metadata.json").read_text())["status"] == "completed"), None)


@pytest.mark.slow
def test_fifty_sigkills_lose_nothing(tmp_path: Path, zygote: Zygote) -> None:
    def job(side: str) -> dict[str, Any]:
        changes = {"total_timesteps": 3_000, "checkpoint_interval": 60, "eval_interval": 500, "log_interval": 100}
        return {"config": config_for("dqn", tmp_path / side, **changes).to_dict()}

    started = time.monotonic()
    assert zygote.run(job("whole")) == 0
    seconds = time.monotonic() - started
    expected = zygote.outcome()

    random_instants = random.Random(7)
    kills, restarts, steps = 0, 0, [0]
    while True:
        after = None
        if kills < KILLS:
            # Long enough on average that the run moves on between two kills, short enough that all of them hit it.
            after = random_instants.uniform(0.0, 2.0 * seconds / KILLS + 0.1)
        code = zygote.run(_next_job(tmp_path / "killed", job("killed")), kill_after=after)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if (done := _completed(tmp_path / "killed")) is not None:
            if kills >= KILLS:
                break
            # It ended before all kills had hit: shoot the rest at a second run of the same configuration.
            assert run_digest(latest_valid(done)) == expected["digest"]
            (tmp_path / "killed").rename(tmp_path / f"done{restarts}")
            restarts, steps = restarts + 1, [0]
            continue
        assert code != 0, "a run that was left alone did not complete"
        runs = [path for path in (tmp_path / "killed").glob("*") if list_checkpoints(path, "step")]
        if runs:
            last = latest_valid(runs[-1], warn=_fail)
            steps.append(int(last.name.removeprefix("step_")))
            assert steps[-1] >= steps[-2], "a kill lost a checkpoint"
    assert run_digest(latest_valid(done)) == expected["digest"]
    assert restarts < KILLS / 5
    assert not list(done.glob("checkpoints/*.tmp-*"))


def _fail(message: str) -> None:
    raise AssertionError(f"a checkpoint with a final name is damaged: {message}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_sigterm_at_random_instants_resumes_exactly(tmp_path: Path, zygote: Zygote, name: str) -> None:
    def job(side: str) -> dict[str, Any]:
        changes = {"total_timesteps": 600, "eval_interval": 128, "num_envs": 2}
        return {"config": config_for(name, tmp_path / side, **changes).to_dict()}

    started = time.monotonic()
    assert zygote.run(job("whole")) == 0
    seconds = time.monotonic() - started
    expected = zygote.outcome()
    random_instants, signals = random.Random(11), 0
    for _ in range(60):
        number = signal.SIGTERM if signals % 2 else signal.SIGINT
        code = zygote.run(
            _next_job(tmp_path / "cut", job("cut")),
            kill_after=None if signals >= 8 else random_instants.uniform(0.05, 0.1 + seconds / 4), number=number,
        )  # fmt: skip
        signals += 1
        if (done := _completed(tmp_path / "cut")) is not None:
            break
        if code == 0:
            assert zygote.outcome()["status"] == "interrupted"
    assert done is not None, "sixty runs did not complete it"
    assert signals > 2, "the run ended before it was cut"
    assert run_digest(latest_valid(done)) == expected["digest"]


def _start_cli(root: Path, *extra: str) -> subprocess.Popen[str]:
    words = [
        sys.executable, "-m", "rl_training", "train", "--algo", "dqn", "--env", "CartPole-v1", "-n", "1000000",
        "--output-dir", str(root), "--no-progress", "--set", "execution=eager", "--set", "checkpoint_interval=500",
        *extra,
    ]  # fmt: skip
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not [p for run in root.glob("*") for p in list_checkpoints(run, "step")]:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no checkpoint in two minutes"
        time.sleep(0.05)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_command_line_saves_on_a_signal(tmp_path: Path, number: int, status: int) -> None:
    process = _start_cli(tmp_path)
    process.send_signal(number)
    time.sleep(0.02)
    process.send_signal(number)  # an impatient user: the checkpoint must still be whole
    _, err = process.communicate(timeout=60)  # the run itself would take many minutes
    assert process.returncode == status, err[-3000:]
    assert "Traceback" not in err
    run = next(tmp_path.glob("*"))
    for path in list_checkpoints(run, "step"):
        assert verify(path) is None
    assert json.loads((run / "metadata.json").read_text())["status"] == "interrupted"
    summary = json.loads((run / "summary.json").read_text())
    assert latest_valid(run).name == Path(summary["checkpoint"]).name
    assert summary["status"] == "interrupted"

    # And the run goes on from exactly there, to the end of a smaller budget.
    total = summary["env_steps"] + 20
    words = [sys.executable, "-m", "rl_training", "resume", "--run", str(run), "--total-timesteps", str(total)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((run / "summary.json").read_text())["env_steps"] == total
    assert run_digest(latest_valid(run))
