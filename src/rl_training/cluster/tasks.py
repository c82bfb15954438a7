"""Whole runs as tasks of a cluster: trials of sweeps and studies, entries of the verification ledger.

A job is `{"id", "target": "module:function", "arguments", "log"}`, as for the worker processes of one machine. A task
may import the modules that its sender may. A job's directory must be on a disk that all machines share: everything that
a trial needs to continue is there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

from rl_training.cluster.connection import Connection
from rl_training.imports import allow_again, allowances
from rl_training.registry import resolve

_GRACE = 60.0  # seconds for interrupted tasks to save their runs


def run_job(job: dict[str, Any]) -> int:
    """Run a job in a worker process of Ray; returns its exit status."""
    os.chdir(job["directory"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    kept = [os.dup(1), os.dup(2)]
    try:
        for target in (1, 2):
            os.dup2(log, target)
        allow_again(job["allow"])
        resolve(job["target"])(*job["arguments"])
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        for target, old in zip((1, 2), kept):
            os.dup2(old, target)
            os.close(old)
        os.close(log)


class ClusterWorkers:
    """Runs jobs as tasks. Ray chooses the machine; a lost task is reported, and its owner decides what to do."""

    def __init__(self, address: str, workers: int, gpus: float = 0.0) -> None:
        """`gpus` for each job; fractions are allowed."""
        self.connection = Connection(address, min(workers, 2), gpus, lower="--workers or --gpus-per-trial")
        self.ray = self.connection.ray
        # A process of its own for each job, like a forked worker; retries are the caller's business.
        self._task = self.ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=0)(run_job)
        self._running: dict[Any, str] = {}

    def send(self, job: dict[str, Any]) -> None:
        self._running[self._task.remote({**job, "directory": os.getcwd(), "allow": allowances()})] = job["id"]

    def ended(self, timeout: float | None = None) -> tuple[str, int | None] | None:
        """Wait for a job to end: its id and exit status, which is None if its process or machine was lost. None if no
        job ends within `timeout` seconds."""
        from ray.exceptions import RayError

        done, _ = self.ray.wait(list(self._running), num_returns=1, timeout=timeout)
        if not done:
            return None
        name = self._running.pop(done[0])
        try:
            return name, int(self.ray.get(done[0]))
        except RayError:
            return name, None

    def stop(self, grace: float = _GRACE) -> None:
        """Interrupt the running jobs, give them `grace` seconds to save their runs, and leave the cluster."""
        refs = list(self._running)
        self._running.clear()
        for ref in refs:
            self.ray.cancel(ref)
        if refs:
            self.ray.wait(refs, num_returns=len(refs), timeout=grace)
        self.connection.close()
