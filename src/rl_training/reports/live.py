"""Follows run directories while they are written: what the dashboard shows, read again only where files changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_training.experiment.run.atomic import read_json_object
from rl_training.experiment.run.config import flat, read_yaml
from rl_training.experiment.run.metrics import FILE, events_in, is_finite, last_events, read_from
from rl_training.reports.runs import METRIC, TRAINING, Run, find_runs, relevant_settings

POINTS = 400  # of a curve on the screen
_TAIL = 1 << 14  # bytes at the end of a log that show where the run stands
_QUIET = 120.0  # seconds without a new line after which a run is shown as silent
_USE = ("cpu_cores", "memory_gib", "gpu_memory_gib")  # what a log says about the machine
_KEPT = 64  # runs whose logs stay in memory
_MEDIA = {".mp4": "video", ".webm": "video", ".gif": "image", ".png": "image", ".svg": "image"}
_TEXT = {".json", ".jsonl", ".yaml", ".txt", ".md", ".html", ".csv"}


class LiveRun:
    """One run directory. A file that is missing, damaged or half-written leaves its part empty until it is whole."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.id = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]
        self.stamp = ""
        self.config: Mapping[str, Any] = {}
        self.metadata: Mapping[str, Any] = {}
        self.summary: Mapping[str, Any] = {}
        self._changed: dict[str, tuple[int, int]] = {}
        self._last: list[dict[str, Any]] = []
        self._records: list[dict[str, Any]] = []
        self._offset = 0

    def refresh(self) -> None:
        """Read the files that changed since the last call."""
        if self._is_new("config.yaml"):
            self.config = _read_yaml(self.path / "config.yaml")
        if self._is_new("metadata.json"):
            self.metadata = read_json_object(self.path / "metadata.json")
        if self._is_new("summary.json"):
            self.summary = read_json_object(self.path / "summary.json")
        if self._is_new(FILE):
            self._last = last_events(self.path / FILE, _TAIL)
            if self._changed[FILE][1] < self._offset:  # a resumed run has cut its log
                self.forget()
        self.stamp = hashlib.sha256(repr(sorted(self._changed.items())).encode()).hexdigest()[:12]

    def _is_new(self, name: str) -> bool:
        try:
            status = os.stat(self.path / name)
            now = (status.st_mtime_ns, status.st_size)
        except OSError:
            now = (0, 0)
        before, self._changed[name] = self._changed.get(name, (0, 0)), now
        return now != before

    @property
    def seeds(self) -> list[int]:
        seeds = self.config.get("seeds") or [self.config.get("seed", 0)]
        return [seed for seed in seeds if isinstance(seed, int)] if isinstance(seeds, list) else []

    def overview(self) -> dict[str, Any]:
        """The row of this run in the list."""
        taken, total = self.summary.get("env_steps"), self.config.get("total_timesteps")
        steps = int(max((record["step"] for record in self._last), default=taken if is_finite(taken) else 0))
        total = int(total) if is_finite(total) else None
        speeds = (record.get("time/fps") for record in reversed(self._last))
        speed = next((speed for speed in speeds if is_finite(speed) and speed > 0), None)
        use: Mapping[str, Any] = next((row for row in reversed(self._last) if "time/cpu_cores" in row), {})
        running = self.metadata.get("status") == "running"
        quiet = time.time() - max((record["time"] for record in self._last), default=0.0)
        best, settings = self.summary.get("best_eval"), relevant_settings(self.config)
        identity = json.dumps([self.config.get("algo"), self.config.get("env_id"), settings], sort_keys=True)
        return {
            "id": self.id,
            "name": self.name,
            "stamp": self.stamp,
            "algo": str(self.config.get("algo", "?")),
            "env": str(self.config.get("env_id", "?")),
            "seeds": self.seeds,
            "status": str(self.metadata.get("status", "unknown")),
            "silent": round(quiet) if running and self._last and quiet > _QUIET else None,
            "start": self.metadata.get("start"),
            "step": steps,
            "total": total,
            "speed": speed,
            "use": [x if is_finite(x := use.get(f"time/{name}")) else None for name in _USE],
            "eta": (total - steps) / speed if running and speed and total is not None else None,
            "score": self._score(),
            "best": best.get("mean_return") if isinstance(best, dict) else None,
            "group": hashlib.sha256(identity.encode()).hexdigest()[:12],
        }

    def _score(self) -> float | None:
        """The newest evaluation, or the newest training return; the mean over the seeds of a study."""
        for metric in (METRIC, TRAINING):
            rows = [record for record in self._last if isinstance(record.get(metric), int | float)]
            last = [record[metric] for record in rows if record["step"] == rows[-1]["step"]]
            if last:
                return float(sum(last) / len(last)) if all(map(is_finite, last)) else None
        return None

    def curves(self, metrics: Sequence[str]) -> dict[str, Any]:
        """{metric: [{seed, steps, seconds, values}]} with at most POINTS points each, and the names of all metrics."""
        run = self._run()
        found: dict[str, list[dict[str, Any]]] = {}
        for metric in metrics:
            for seed, series in sorted(run.series(metric).items()):
                keep = _spread(len(series.steps), POINTS)
                columns = {"steps": series.steps, "seconds": series.seconds, "values": series.values}
                shown = {name: column[keep].round(6).tolist() for name, column in columns.items()}
                found.setdefault(metric, []).append({"seed": seed, **shown})
        return {"id": self.id, "metrics": sorted(run.metrics), "curves": found}

    def _run(self) -> Run:
        """All records of the log, of which only new bytes are read."""
        data = read_from(self.path / FILE, self._offset)
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        self._records += events_in(whole)
        self._offset += len(whole)
        return Run(self.path, "", "", tuple(self.seeds), {}, self._records)

    def forget(self) -> None:
        """Drop the log from memory."""
        self._records, self._offset = [], 0

    def detail(self) -> dict[str, Any]:
        """Settings, versions, evaluation and files."""
        settings = {key.removeprefix("algo_kwargs."): value for key, value in flat(dict(self.config)).items()}
        about = {
            key: self.metadata.get(key) for key in ("start", "end", "command", "versions", "git", "host", "reason")
        }
        return {
            "id": self.id, "settings": settings, "about": about, "summary": dict(self.summary),
            "files": list(self.files()),
        }  # fmt: skip

    def files(self) -> Iterator[dict[str, Any]]:
        """What may be looked at: media and text. Checkpoints, TensorBoard files and unfinished files are not listed."""
        for folder, names, files in os.walk(self.path):
            names[:] = sorted(name for name in names if name not in ("checkpoints", "tensorboard"))
            for name in sorted(files):
                path = Path(folder, name)
                kind = _MEDIA.get(path.suffix) or ("text" if path.suffix in _TEXT else None)
                hidden = name.startswith(".")  # still being written
                if kind and not hidden and path.is_file() and not path.is_symlink():
                    status = path.stat()
                    where = path.relative_to(self.path).as_posix()
                    yield {"path": where, "kind": kind, "size": status.st_size, "time": status.st_mtime}

    def file(self, name: str) -> Path | None:
        """The path of a listed file. Anything else, such as a link or `../`, is None."""
        return self.path / name if any(entry["path"] == name for entry in self.files()) else None


class LiveRuns:
    """All runs below a directory, in the order of their start, newest first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[Path, LiveRun] = {}
        self._used: list[str] = []

    def refresh(self) -> None:
        """Find new runs, forget deleted ones, and read what changed."""
        paths = find_runs(self.root)
        self._runs = {path: self._runs.get(path) or LiveRun(path, self._name(path)) for path in paths}
        for run in self._runs.values():
            run.refresh()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path != self.root else path.resolve().name

    def overview(self) -> list[dict[str, Any]]:
        rows = [run.overview() for run in self._runs.values()]
        return sorted(rows, key=lambda row: (str(row["start"] or ""), row["name"]), reverse=True)

    def __getitem__(self, key: str) -> LiveRun:
        return next(run for run in self._runs.values() if run.id == key)

    def curves(self, key: str, metrics: Sequence[str]) -> dict[str, Any]:
        self._used = [*(used for used in self._used if used != key), key]
        while len(self._used) > _KEPT:
            oldest = self._used.pop(0)
            for run in self._runs.values():
                if run.id == oldest:
                    run.forget()
        return self[key].curves(metrics)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        found = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices, evenly spread, the last one included."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
