"""One trial of a sweep or a tuning study: a directory that contains one run.

The run in the directory shows whether the trial is done and where to continue it. Only a failure has a file of its
own, because a failed run may leave no trace. As nothing is stored twice, a process that is killed at any time cannot
leave contradictory records.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_json, exclusive_directory, read_json_object
from rl_training.experiment.run.run_dir import read_status

if TYPE_CHECKING:
    from rl_training.experiment.run.callbacks import Callback
    from rl_training.experiment.run.config import TrainConfig
    from rl_training.experiment.run.result import TrainResult
    from rl_training.experiment.run.trainer import Trainer

FAILED = "failed.json"
_FINISHED = ("completed", "stopped")  # status of a run that used up its budget, or was stopped early on purpose
_LOCK_LIMIT = 120.0  # seconds that an orphaned worker may take to save its run and end

Status = Literal["new", "started", "done", "failed"]


@dataclass(frozen=True)
class TrialState:
    status: Status
    run_dir: Path | None = None
    step: int = -1  # of the latest checkpoint; -1 if there is none
    error: str | None = None

    @property
    def over(self) -> bool:
        return self.status in ("done", "failed")


def trial_state(directory: Path) -> TrialState:
    """The state of a trial, read from its directory. Checkpoints are verified later, when the run is continued."""
    runs = run_dirs(directory)
    finished = [run for run in runs if read_status(run) in _FINISHED]
    if finished:
        return TrialState("done", finished[0], _last_step(finished[0]))
    run = max(runs, key=_last_step, default=None)
    step = _last_step(run) if run is not None else -1
    if (failure := read_json_object(directory / FAILED)).get("error") is not None:
        return TrialState("failed", run, step, str(failure["error"]))
    return TrialState("new" if run is None else "started", run, step)


def run_dirs(directory: Path) -> list[Path]:
    """Run directories, oldest first; there are several only if a process died right after its start."""
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and (path / "checkpoints").is_dir())
    except OSError:
        return []


def _last_step(run: Path) -> int:
    from rl_training.experiment.run.checkpoint import checkpoint_step, list_checkpoints

    paths = list_checkpoints(run, "step")
    return checkpoint_step(paths[-1]) if paths else -1


def run_trial(
    directory: Path, config: TrainConfig, *, env: str | None = None, callbacks: Sequence[Callback] = ()
) -> TrainResult | None:
    """Train the trial from its current state to its end. Returns None if it is over already, or fails now.

    After a signal the trial is "started": the trainer has saved a checkpoint, and the next call continues from it.
    """
    # An orphaned worker of a killed sweep may still be saving its run: wait for it.
    with exclusive_directory(directory, "the trial", wait=_LOCK_LIMIT):
        if trial_state(directory).over:
            return None
        try:
            return trainer_for(directory, config, env=env, callbacks=callbacks).run()
        except Exception as error:
            record_failure(directory, _sentence(error), type(error).__name__)
            if not isinstance(error, UserError):
                raise  # so that its traceback is in the log
            return None


def trainer_for(
    directory: Path, config: TrainConfig, *, env: str | None = None, callbacks: Sequence[Callback] = ()
) -> Trainer:
    """A trainer that continues from the latest valid checkpoint below `directory`, or starts a new run."""
    from rl_training.experiment.run.checkpoint import CheckpointError, latest_valid
    from rl_training.experiment.run.trainer import Trainer

    found: Path | None = None
    runs = sorted(run_dirs(directory), key=_last_step)
    while runs and found is None:
        with contextlib.suppress(CheckpointError):
            found = latest_valid(runs[-1])
        if found is None:
            shutil.rmtree(runs.pop())  # it is useless, and a second run in the directory would count twice
    for other in runs[:-1]:
        shutil.rmtree(other)
    if found is not None:
        return Trainer.resume(found, env=env, callbacks=callbacks, progress=False)
    config = config.model_copy(update={"output_dir": str(directory)})
    return Trainer(config, env=env, callbacks=callbacks, progress=False)


def record_failure(directory: Path, error: str, kind: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_json(directory / FAILED, {"error": error, "kind": kind})


def forget_failure(directory: Path) -> None:
    (directory / FAILED).unlink(missing_ok=True)


def summary_of(state: TrialState) -> dict[str, Any]:
    """The summary.json of the run; empty if there is none yet."""
    return read_json_object(state.run_dir / "summary.json") if state.run_dir is not None else {}


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())[:600] or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
