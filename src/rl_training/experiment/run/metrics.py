"""The metric log: one JSON object per line in metrics.jsonl, and the same scalars in TensorBoard.

A checkpoint stores the length of the log in bytes. A resumed run truncates the file to it, so that the log reads as if
the run had never stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_bytes, os_reason, write_error

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from rl_training.experiment.run.trackers import Trackers

FILE = "metrics.jsonl"
TENSORBOARD_INTERVAL_S = 1.0  # between transfers; TensorBoard itself writes its file every two minutes
_LARGEST = 1e100  # of the numbers in a log that reports use
_RESERVED = {"step", "time", "seed", "nonfinite"}


class MetricsLogger:
    """Appends to the log of a run, after truncating it to `resume_position` (the `position` in a checkpoint)."""

    def __init__(
        self, run_dir: str | Path, *, tensorboard: bool = True, resume_position: int | None = None,
        trackers: Trackers | None = None,
    ) -> None:  # fmt: skip
        self._path, self._trackers = Path(run_dir) / FILE, trackers
        self._tensorboard = tensorboard
        self._writer: SummaryWriter | None = None
        self._summary: Any = None
        self._purge_step: int | None = None
        self._waiting: list[tuple[int, float, dict[str, float]]] = []  # events for TensorBoard: step, time, values
        self.reached = max((event["step"] for event in last_events(self._path, 1 << 16)), default=0)
        """The last step that the log had before it was truncated."""
        try:
            if self._path.exists():
                _cut(self._path, resume_position)
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise write_error(f"Cannot open {self._path}", error) from error
        if resume_position is not None:
            if self._file.tell() != resume_position:
                warnings.warn(f"{self._path} is shorter than its checkpoint says: some metrics are lost.", stacklevel=2)
            steps = [record["step"] for record in read_metrics(self._path)]
            self._purge_step = max(steps, default=-1) + 1

    def log(self, step: int, values: Mapping[str, float], seed: int | None = None) -> None:
        """Write one event. NaN and infinity are written as null and listed under "nonfinite"."""
        if _RESERVED & values.keys():
            raise ValueError(f"metric names may not be {sorted(_RESERVED & values.keys())}")
        now = time.time()
        scalars = {key: value if isinstance(value, int) else float(value) for key, value in values.items()}
        record: dict[str, Any] = {"step": int(step), "time": round(now, 3)}
        if seed is not None:
            record["seed"] = int(seed)
        record |= {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        nonfinite = {key: str(value) for key, value in scalars.items() if not math.isfinite(value)}
        if nonfinite:
            record["nonfinite"] = nonfinite
        line = memoryview(json.dumps(record, allow_nan=False).encode() + b"\n")
        try:
            self._recreate_if_removed()
            while line:  # an unbuffered write may write only a part
                line = line[self._file.write(line) :]
        except OSError as error:
            raise write_error(f"Cannot write {self._path}", error) from error
        if self._tensorboard and scalars:
            tags = list(scalars) if seed is None else [f"{key}/seed_{seed}" for key in scalars]
            self._waiting.append((step, now, dict(zip(tags, scalars.values()))))
            if self._writer is None or now - self._waiting[0][1] >= TENSORBOARD_INTERVAL_S:
                with self._optional():
                    self._to_tensorboard()
        if self._trackers is not None:
            self._trackers.log(step, scalars, seed)

    def _recreate_if_removed(self) -> None:
        """If somebody removed or replaced the log, write it again: the open file still has all of it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        warnings.warn(f"{self._path} was removed or replaced during the run; it is written again", stacklevel=3)
        self._file.seek(0)
        atomic_write_bytes(self._path, self._file.read())
        self._file.close()
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115

    @property
    def position(self) -> int:
        """Length of the log in bytes, after an fsync: a checkpoint must not refer to bytes that a crash can lose."""
        try:
            self._recreate_if_removed()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(f"Cannot write {self._path}", error) from error
        return self._file.tell()

    def close(self, failed: bool = False) -> None:
        self._file.close()
        if self._trackers is not None:
            self._trackers.close(failed)
        with self._optional():
            if self._waiting:
                self._to_tensorboard()
            if self._writer is not None:
                self._writer.close()
        self._writer, self._tensorboard = None, False

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    @contextlib.contextmanager
    def _optional(self) -> Iterator[None]:
        """A failure of TensorBoard only switches TensorBoard off, with a warning: the run still has its log."""
        try:
            yield
        except OSError as error:
            reason = os_reason(error)
            warnings.warn(f"TensorBoard was switched off ({reason}): metrics go to metrics.jsonl only.", stacklevel=4)
            self._writer, self._tensorboard = None, False

    def _to_tensorboard(self) -> None:
        """Hand over all waiting events at once: its thread takes several times longer if it is woken for each one."""
        waiting, self._waiting = self._waiting, []
        if self._writer is None:
            try:
                from tensorboard.compat.proto.summary_pb2 import Summary
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                warnings.warn("tensorboard is not installed: metrics go to metrics.jsonl only.", stacklevel=3)
                self._tensorboard = False
                return
            directory = str(self._path.with_name("tensorboard"))
            self._writer = SummaryWriter(directory, purge_step=self._purge_step)
            self._summary = Summary
        events: Any = self._writer.file_writer
        for step, now, scalars in waiting:
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            # One event for all values: add_scalar makes one for each value, at several times the cost.
            events.add_summary(self._summary(value=values), step, walltime=now)


def evaluation_rows(summary: Mapping[str, Any]) -> Iterator[tuple[int | None, dict[str, float]]]:
    """The log entries of an evaluation (`stats.eval_summary`): (seed, values) of each agent, then those of all."""
    seeds, success = summary["per_seed"], ("success_rate",) if "success_rate" in summary else ()
    names = {"mean_return": "mean_reward", "std_return": "std_reward", "mean_length": "mean_ep_length"}
    for row in seeds:
        own = {f"eval/{names.get(key, key)}": row[key] for key in (*names, *success)}
        yield (row["seed"] if len(seeds) > 1 else None), own
    if len(seeds) > 1:
        values = {"eval/mean_reward": summary["mean_return"], "eval/iqm": summary["iqm"]}
        values |= {f"eval/{key}": summary[key] for key in success}
        low, high = summary["ci95"]
        yield None, {**values, "eval/ci95_low": low, "eval/ci95_high": high}


def _cut(path: Path, position: int | None) -> None:
    """Truncate the log to `position`, or to the last complete line before it: a kill can leave an incomplete line."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if position is not None:
            end = min(end, position)
        kept = 0
        while end > kept:
            start = max(end - (1 << 16), 0)
            file.seek(start)
            kept = start + file.read(end - start).rfind(b"\n") + 1
            if kept > start or start == 0:
                break
            end, kept = start, 0
        file.truncate(kept)


def last_events(path: Path, size: int) -> list[dict[str, Any]]:
    """The events in the last `size` bytes of a log, which a run may be writing; none if it cannot be read."""
    return list(events_in(read_from(path, -size)))


def read_from(path: Path, offset: int) -> bytes:
    """The bytes of a file from an offset on, which counts from the end if it is negative; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end + offset, 0) if offset < 0 else offset)
            return file.read()
    except OSError:
        return b""


def events_in(data: bytes) -> Iterator[dict[str, Any]]:
    """The events in whole lines of a log. Damaged lines, such as the first one of a tail, are skipped."""
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and all(is_finite(record.get(key)) for key in ("step", "time")):
                yield record


def is_finite(value: Any) -> TypeGuard[int | float]:
    """Is it a number that can be drawn: not NaN or infinity, and not so large that differences become infinite?"""
    return isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """All events of a run (or a metrics file), with NaN and infinity restored; an incomplete last line is left out."""
    path = Path(run_dir)
    if path.is_dir():
        path = path / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"Cannot read metrics from {path}: {error.strerror}.") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is incomplete
        try:
            record = json.loads(line)
            for key, text in record.pop("nonfinite", {}).items():
                record[key] = float(text)
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{path} is damaged: line {number} is not a JSON object.") from error
        records.append(record)
    return records
