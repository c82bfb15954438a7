"""Worker processes for trials: they start quickly, are restarted when they die, and end with their parent.

All state of a trial is in its directory, so a worker may be killed at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_training.cluster.tasks import ClusterWorkers
from rl_training.errors import UserError
from rl_training.experiment.studies.trials import TrialState, record_failure, trial_state
from rl_training.imports import allowances
from rl_training.machine import python_command, usable_cpus

RETRIES = 3
LOG = "worker.log"
_PRELOAD = ("rl_training.experiment.run.trainer", "torch.utils.tensorboard", "scipy.special")  # what each run imports
_GRACE = 60.0  # seconds for workers to save their runs when the sweep is interrupted


@dataclass(frozen=True)
class Job:
    """Arguments (JSON values) for the pool's target; the outcome is read from `directory`."""

    name: str
    directory: Path
    arguments: tuple[Any, ...]
    threads: int = 0  # of its worker; 0: an equal share of the cores


@dataclass(frozen=True)
class Event:
    kind: Literal["start", "restart", "done", "failed"]
    job: Job
    state: TrialState


class Pool:
    """Runs `target` (module:function) for each job, with up to `workers` processes at a time."""

    def __init__(
        self, target: str, workers: int, *, retries: int = RETRIES,
        on_event: Callable[[Event], None] = lambda event: None, preload: Sequence[str] = (),
        fits: Callable[[Job, Sequence[Job]], bool] = lambda job, running: True, deadline: float | None = None,
        grace: float = _GRACE, cluster: str | None = None, gpus: float = 0.0,
    ) -> None:  # fmt: skip
        """`fits(job, running)`: may the job start beside the running ones? `deadline`: the time (`time.monotonic`) at
        which the workers are told to save and end. `grace`: seconds that they may take for it. `cluster`: run the jobs
        as tasks of the Ray cluster at this address; `gpus`: for each of them."""
        self._cluster = ClusterWorkers(cluster, workers, gpus) if cluster is not None else None
        if self._cluster is None and not hasattr(os, "fork"):
            raise UserError("worker processes need an operating system that can fork (Linux, macOS)")
        self.target, self.workers, self.retries, self.on_event = target, workers, retries, on_event
        self._preload, self._fits, self._deadline, self._grace = (*_PRELOAD, *preload), fits, deadline, grace
        self._server_process: subprocess.Popen[bytes] | None = None
        self._running: dict[str, tuple[Job, TrialState]] = {}
        self._crashes: dict[str, int] = {}  # by job: crashes in a row without a new checkpoint

    def run(self, jobs: Iterator[Job]) -> None:
        """Run all jobs, until the deadline. The next one is taken from the iterator when a worker is free; one that
        does not fit beside the running ones waits, and later ones do not overtake it."""
        again: deque[Job] = deque()
        try:
            while not self._late():
                while len(self._running) < self.workers:
                    job = again.popleft() if again else next(jobs, None)
                    if job is None:
                        break
                    if self._running and not self._fits(job, [one for one, _ in self._running.values()]):
                        again.appendleft(job)
                        break
                    self._start(job)
                if not self._running:
                    return
                again.extend(self._wait())
        finally:
            self._stop()

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _start(self, job: Job) -> None:
        before = trial_state(job.directory)
        if before.over:
            self.on_event(Event("done" if before.status == "done" else "failed", job, before))
            return
        job.directory.mkdir(parents=True, exist_ok=True)
        order = {
            "id": job.name, "target": self.target, "arguments": job.arguments, "log": str(job.directory / LOG),
            "threads": job.threads or max(1, usable_cpus() // self.workers), "allow": allowances(),
        }  # fmt: skip
        self._running[job.name] = (job, before)
        if self._cluster is not None:
            self._cluster.send(order)
        else:
            self._write(order)
        self.on_event(Event("start", job, before))

    def _write(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the server died: `_wait` handles it
            stdin = self._server().stdin
            assert stdin is not None
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()

    def _server(self) -> subprocess.Popen[bytes]:
        if self._server_process is None:
            # In a session of its own, so that Ctrl-C reaches only this process.
            self._server_process = subprocess.Popen(
                python_command("rl_training.experiment.studies.fork_server", *self._preload),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0,
            )  # fmt: skip
        return self._server_process

    def _wait(self) -> list[Job]:
        """Wait until a worker has ended, or for the deadline; returns the jobs that must be run again."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if self._cluster is not None:
            end = self._cluster.ended(left)
            return [] if end is None else self._ended(*end)
        stdout = self._server().stdout
        assert stdout is not None
        if left is not None:  # the pipe is not buffered here, so that no line is missed
            ready, _, _ = select.select([stdout], [], [], left)
            if not ready:
                return []
        line = stdout.readline()
        if line:
            report = json.loads(line)
            return self._ended(report["id"], report["code"])
        self._stop()  # the server itself has died, and its workers end with it
        return [job for name in list(self._running) for job in self._ended(name, None)]

    def _ended(self, name: str, code: int | None) -> list[Job]:
        """Handle the end of a worker; returns the job if it must be run again."""
        job, before = self._running.pop(name)
        state = trial_state(job.directory)
        if not state.over:
            crashes = self._crashes.get(name, 0) + 1 if state.step <= before.step else 1
            self._crashes[name] = crashes
            if crashes <= self.retries:
                self.on_event(Event("restart", job, state))
                return [job]
            error = f"its worker ended {crashes} times in a row without progress ({_ending(code)}); see {LOG}"
            with contextlib.suppress(OSError):  # on a full disk the trial stays unfinished
                record_failure(job.directory, error, "Crash")
            state = TrialState("failed", state.run_dir, state.step, error)
        self.on_event(Event("done" if state.status == "done" else "failed", job, state))
        return []

    def _stop(self) -> None:
        """Close the server's input, which makes the running workers save and end."""
        if self._cluster is not None:
            self._cluster.stop(self._grace)
        server, self._server_process = self._server_process, None
        if server is None:
            return
        assert server.stdin is not None
        assert server.stdout is not None
        with contextlib.suppress(OSError):
            server.stdin.close()
        try:
            server.wait(self._grace)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    return "killed; is there enough memory?" if code == -signal.SIGKILL else signal.Signals(-code).name
