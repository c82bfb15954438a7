"""One trial of a sweep or a tuning study: a directory that holds one run.

Nothing about a trial is kept twice. Whether it is done, and from where it goes on, is read from the run in its
directory; only a failure, of which a run may leave no trace, has a file of its own. So no journal can disagree with
what is on disk, whichever process was killed at whichever instant.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_json, exclusive_directory
from rl_training.experiment.run.run_dir import read_status

if TYPE_CHECKING:
    from rl_training.experiment.run.callbacks import Callback
    from rl_training.experiment.run.config import TrainConfig
    from rl_training.experiment.run.result import TrainResult
    from rl_training.experiment.run.trainer import Trainer

FAILED = "failed.json"
_FINISHED = ("completed", "stopped")  # as the trainer ends a run whose budget is spent, or whose goal is reached
_LOCK_LIMIT = 120.0  # seconds that an orphaned worker may take to save its run and go

Status = Literal["new", "started", "done", "failed"]


@dataclass(frozen=True)
class TrialState:
    status: Status
    run_dir: Path | None = None
    step: int = -1  # of the latest checkpoint; -1: there is none
    error: str | None = None

    @property
    def over(self) -> bool:
        return self.status in ("done", "failed")


def trial_state(directory: Path) -> TrialState:
    """What the directory says. Checkpoints are not verified here, but when the run is picked up."""
    runs = run_dirs(directory)
    finished = [run for run in runs if read_status(run) in _FINISHED]
    if finished:
        return TrialState("done", finished[0], _last_step(finished[0]))
    run = max(runs, key=_last_step, default=None)
    step = _last_step(run) if run is not None else -1
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return TrialState("failed", run, step, str(json.loads((directory / FAILED).read_text())["error"]))
    return TrialState("new" if run is None else "started", run, step)


def run_dirs(directory: Path) -> list[Path]:
    """Run directories, oldest first; more than one only where a process died at its very start."""
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
    """Train the trial to its end, from wherever it stands. A failure is recorded, not raised; None: nothing to do.

    A signal leaves the trial "started": the trainer has saved a checkpoint, and the next call goes on from it.
    """
    # An orphan of a killed sweep may still be saving its run: wait until it is gone.
    with exclusive_directory(directory, "the trial", wait=_LOCK_LIMIT):
        if trial_state(directory).over:
            return None
        try:
            return pick_up(directory, config, env=env, callbacks=callbacks).run()
        except Exception as error:
            record_failure(directory, _sentence(error), type(error).__name__)
            if not isinstance(error, UserError):
                raise  # its traceback belongs in the log
            return None


def pick_up(
    directory: Path, config: TrainConfig, *, env: str | None = None, callbacks: Sequence[Callback] = ()
) -> Trainer:
    """A trainer at the latest valid checkpoint below `directory`, or at the start where there is none."""
    from rl_training.experiment.run.checkpoint import CheckpointError, latest_valid
    from rl_training.experiment.run.trainer import Trainer

    found: Path | None = None
    runs = sorted(run_dirs(directory), key=_last_step)
    while runs and found is None:
        with contextlib.suppress(CheckpointError):
            found = latest_valid(runs[-1])
        if found is None:
            shutil.rmtree(runs.pop())  # nothing in it can be used, and a second run beside it would count twice
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
    """The run's summary.json; empty where there is none yet."""
    if state.run_dir is None:
        return {}
    try:
        data = json.loads((state.run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())[:600] or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
