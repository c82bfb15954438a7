"""Runs training jobs in another process. `command("jobs")`, `command("zygote")` and `command("scripts")` start one.

A job is {"config": {...}} or {"resume": path}, with an optional "stop_at" (a callback requests the stop at that step)
or "term_at" (the process sends itself SIGTERM there). Results are JSON lines on standard output.
The zygote imports everything once, then forks a child for each job line on its standard input: a child shares no
training state with any other, and starts in milliseconds, which is what makes fifty kills affordable. `scripts` does
the same with whole scripts: {"command": [path, arguments], "cwd": ...}; their output goes to files there.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard  # the first log line would import it
from helpers import evaluated_twice, run_digest

from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import Trainer

torch.set_num_threads(1)


class Cut(Callback):
    """Ends a run at a given step, by request or by signal."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    def on_collect_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        if result["env_steps"] >= self.job.get("stop_at", 1 << 60):
            trainer.request_stop("the test asks for it")
        if result["env_steps"] >= self.job.get("term_at", 1 << 60):
            os.kill(os.getpid(), signal.SIGTERM)


class EveryStep(Cut):
    """Returns from the loop at every step, so that the cut is exact."""

    def on_train_start(self, trainer: Trainer) -> None:
        trainer._next_check = lambda step: step + trainer.loop.num_envs  # type: ignore[method-assign]


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    cut = EveryStep(job) if "stop_at" in job or "term_at" in job else Cut(job)
    if "resume" in job:
        try:
            trainer = Trainer.resume(job["resume"], callbacks=[cut], progress=False)
        except UserError as error:
            return {"error": str(error)}
    else:
        trainer = Trainer(TrainConfig(**job["config"]), callbacks=[cut], progress=False)
    result = trainer.run()
    return {
        "run_dir": str(result.run_dir), "status": result.status, "env_steps": result.summary["env_steps"],
        "checkpoint": str(result.checkpoint_path), "digest": run_digest(result.checkpoint_path),
        "env_restored": trainer.env_restored, "episode_lengths": [
            sub["length"] for sub in trainer.loop._env_meta["sub_envs"]],
    }  # fmt: skip


def zygote() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = 1
            try:
                job = json.loads(line)
                outcome = run_job(job)
                Path(job["result"]).write_text(json.dumps(outcome))
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        print(pid, flush=True)
        sys.stdin.readline()  # not reaped before the test has sent its signal: the number could be another's by then
        _, code = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(code), flush=True)


def scripts() -> None:
    TrainConfig.resolved = evaluated_twice  # type: ignore[method-assign]
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(job["cwd"])
            for name, stream in (("stdout.txt", 1), ("stderr.txt", 2)):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)
            sys.argv, sys.path[0] = job["command"], str(Path(job["command"][0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.exit()
        _, code = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(code), flush=True)


def jobs() -> None:
    for item in json.loads(sys.argv[1]):
        print("RESULT " + json.dumps(run_job(item)), flush=True)


def command(function: str, *arguments: str) -> list[str]:
    """Starts a function of this module. A file as the main module would be imported again, with torch, by every worker
    process of an environment."""
    start = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import driver; driver.{function}()"
    return [sys.executable, "-c", start, *arguments]
