"""Broken surroundings: full, read-only and removed directories, quotas, clocks that jump, too few file descriptors.

A full or read-only disk is a small tmpfs where mounting is allowed, and the library's failpoints elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.utils.tensorboard

from attacks.base import Attack, Outcome, command, small
from rl_training.experiment.run import atomic
from rl_training.experiment.run.callbacks import Callback, TrainingRun
from rl_training.experiment.run.checkpoint import CheckpointError, latest_valid, list_checkpoints
from rl_training.experiment.run.trainer import Trainer

POINTS = [
    f"{file}.{when}" for when in ("before", "after") for file in (
        "tensors.write", "tensors.fsync", "manifest.write", "checkpoint.mkdir", "checkpoint.rename",
        "checkpoint.dirsync",
        "checkpoint.parentsync", "prune.rename", "file.rename", "file.write",
    )
]  # fmt: skip


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """A tmpfs at `folder`; False where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True)


class At(Callback):
    """Calls a function at a step."""

    def __init__(self, step: int, function: Callable[[TrainingRun], object]) -> None:
        self.step, self.function = step, function

    def on_collect_end(self, trainer: TrainingRun, result: dict[str, int]) -> None:
        if self.function is not None and result["env_steps"] >= self.step:
            function, self.function = self.function, lambda trainer: None
            function(trainer)


def train(folder: Path, chance: random.Random, *callbacks: Callback) -> str | None:
    """Train in `folder`. Any error must be a sentence."""
    config = small("dqn", folder, total_timesteps=80, checkpoint_interval=16, keep_checkpoints=1)
    try:
        Trainer(config, callbacks=callbacks, progress=False, check_every=1).run()
    except Exception as error:
        if not isinstance(error, OSError | ValueError) or not str(error):
            return f"{type(error).__name__}: {error}"
    return None


def keeps_its_checkpoints(folder: Path) -> str | None:
    for run in folder.glob("*__*"):
        told: list[str] = []
        if list_checkpoints(run, "step"):
            try:
                latest_valid(run, told.append)
            except CheckpointError as error:
                return f"no valid checkpoint: {error}"
            if told:
                return f"a damaged checkpoint: {told}"
    return None


def full(chance: random.Random, folder: Path) -> str | None:
    with mounted(folder / "disk", f"size={chance.choice([4, 8, 16, 32, 48, 64, 96, 128])}k") as real:
        return (
            (train(folder / "disk", chance) or keeps_its_checkpoints(folder / "disk"))
            if real
            else failing(chance, folder)
        )


def failing(chance: random.Random, folder: Path) -> str | None:
    """The k-th pass of a point of a save fails as a disk, quota or permission would make it fail."""
    atomic._plan.cache_clear()
    atomic._hits.clear()
    action = chance.choice(["ENOSPC", "EIO", "EACCES"])
    os.environ[atomic.FAILPOINT_VARIABLE] = f"{chance.choice(POINTS)}={action}@{chance.randrange(1, 6)}"
    try:
        return train(folder / "runs", chance) or keeps_its_checkpoints(folder / "runs")
    finally:
        del os.environ[atomic.FAILPOINT_VARIABLE]
        atomic._plan.cache_clear()


def read_only(chance: random.Random, folder: Path) -> str | None:
    with mounted(folder / "disk", "size=8m") as real:
        if not real:
            return failing(chance, folder)
        seal = At(
            chance.choice([1, 20, 40, 70]),
            lambda trainer: subprocess.run(["mount", "-o", "remount,ro", str(folder / "disk")]),
        )
        return train(folder / "disk", chance, seal) or keeps_its_checkpoints(folder / "disk")


def removed(chance: random.Random, folder: Path) -> str | None:
    what = chance.choice(
        ["", "checkpoints", "metrics.jsonl", "metadata.json", "tensorboard", "config.yaml", "summary.json"]
    )

    def remove(trainer: TrainingRun) -> None:
        path = trainer.run_dir / what
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    return train(folder / "runs", chance, At(chance.choice([1, 20, 40, 70]), remove))


def quota(chance: random.Random, folder: Path) -> str | None:
    """No file may become larger than a few kilobytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (chance.choice([100, 1_000, 4_000, 10_000, 30_000]), before[1]))
    try:
        return train(folder / "runs", chance) or keeps_its_checkpoints(folder / "runs")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def clock(chance: random.Random, folder: Path) -> str | None:
    """The wall clock jumps back and forth by up to ten years at every call."""
    true = time.time
    time.time = lambda: max(0.0, true() + chance.uniform(-3e8, 3e8))
    try:
        config = small("dqn", folder / "runs", total_timesteps=80, checkpoint_interval=16)
        result = Trainer(config, progress=False).run()
        return None if result.status == "completed" else result.status
    finally:
        time.time = true


def descriptors(chance: random.Random, folder: Path) -> str | None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + chance.randrange(0, 14), before[1]))
    argv = ["train", "--algo", "dqn", "--env", "CartPole-v1", "-n", "40", "--no-progress", "-o", str(folder / "runs")]
    try:
        status, _, err = command([*argv, "--set", "eval_episodes=1", "--execution", "eager"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    if status not in (0, 2) or "Traceback" in err:
        return f"status {status}: {err[-300:]}"
    return keeps_its_checkpoints(folder / "runs")


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    "full": full, "failing write": failing, "read-only": read_only, "removed": removed, "quota": quota, "clock": clock,
    "descriptors": descriptors,
}  # fmt: skip


def disk(chance: random.Random, case: int, folder: Path) -> Outcome:
    kind = list(KINDS)[case % len(KINDS)]
    return kind, 1, KINDS[kind](chance, folder)


def prepare(scratch: Path) -> None:
    assert torch.utils.tensorboard  # imported before there are too few descriptors
    Trainer(small("dqn", scratch / "warm"), progress=False).run()


DISK = Attack(
    "disk", "full, failing, read-only and removed disks, quotas, clock jumps, few descriptors", 700, 700, disk, prepare,
    batch=70, limit=200.0,
)  # fmt: skip
