"""Reads run directories for reports: what was trained, with which settings, and the curve of every seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.errors import UserError, did_you_mean
from rl_training.experiment.run.config import flat, read_config
from rl_training.experiment.run.metrics import FILE, is_finite, read_metrics
from rl_training.experiment.run.run_dir import read_status
from rl_training.experiment.run.stats import Array

METRIC = "eval/mean_reward"
TRAINING = "rollout/ep_rew_mean"  # used as the curve of a run that was evaluated only at its end
_CONFIG = "config.yaml"
_FINISHED = ("completed", "stopped")
_MAX_DEPTH = 4  # levels of directories that are searched for runs
# Settings that do not change what is learned: runs that differ only in these form one group.
_IRRELEVANT = {
    "algo", "env_id", "seed", "seeds", "output_dir", "device", "execution", "vectorization", "eval_episodes",
    "eval_interval", "log_interval", "checkpoint_interval", "keep_checkpoints", "stop_at_return", "tags",
    "eval_video",
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One metric of one seed, in order of steps."""

    steps: Array
    seconds: Array  # since the start, without the time between an interruption and its resume
    values: Array

    def until(self, step: int | None) -> Series:
        kept = slice(None) if step is None else self.steps <= step
        return Series(self.steps[kept], self.seconds[kept], self.values[kept])


@dataclass(frozen=True)
class Run:
    path: Path
    algo: str
    env_id: str
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]  # flat: "learning_rate" -> 1e-3
    records: Sequence[Mapping[str, Any]]

    @property
    def metrics(self) -> set[str]:
        return {key for record in self.records for key in record} - {"step", "time", "seed"}

    def series(self, metric: str) -> dict[int, Series]:
        """The metric by seed, without the seeds that never logged it."""
        clock = _clock(self.records)
        found: dict[int, list[tuple[float, float]]] = {}
        for record in self.records:
            value = record.get(metric)
            if is_finite(value):
                if isinstance(record.get("seed"), int):
                    found.setdefault(record["seed"], []).append((record["step"], value))
                elif len(self.seeds) == 1:  # in a study, a line without a seed describes all seeds
                    found.setdefault(self.seeds[0], []).append((record["step"], value))
        out = {}
        for seed, points in found.items():
            steps, values = np.array(points, dtype=np.float64).T
            out[seed] = Series(steps, np.interp(steps, *clock), values)
        return out


def load_runs(
    paths: Iterable[str | Path], *, partial: bool = False, warn: Callable[[str], None] = lambda message: None
) -> list[Run]:
    """The runs at or below each path.

    An unfinished run is an error if its own directory is given; inside another directory it is skipped with a warning.
    `partial` includes unfinished runs with the results they have.
    """
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        is_run = (path / _CONFIG).is_file()
        for directory in [path] if is_run else runs_below(path):
            status = read_status(directory)
            if status not in _FINISHED and not partial:
                problem = _unfinished(directory, status)
                if is_run:
                    raise UserError(f"{problem}, or add --partial to use the results it has")
                warn(f"skipped: {problem}")
                continue
            found.setdefault(directory.resolve(), _read(directory))
    if not found:
        raise UserError("there are no finished runs to report on; --partial includes unfinished ones")
    return list(found.values())


def runs_below(path: Path) -> list[Path]:
    """The run directories at or below a path, of which there must be at least one."""
    if not path.is_dir():
        raise UserError(f"{path} {'is not a directory' if path.exists() else 'does not exist'}; pass run directories")
    found = find_runs(path)
    if not found:
        empty = next(path.iterdir(), None) is None
        raise UserError(f"{path} {'is empty' if empty else 'contains no run'}; a run directory has a {_CONFIG}")
    return found


def find_runs(path: Path) -> list[Path]:
    """The run directories at or below a path."""
    found = []
    for folder, names, files in os.walk(path):
        if _CONFIG in files:
            found.append(Path(folder))
            names.clear()
        elif len(Path(folder).relative_to(path).parts) >= _MAX_DEPTH:
            names.clear()
        names.sort()
    return found


def relevant_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings that change what is learned, as text: "learning_rate" -> "0.001"."""
    relevant = flat({key: value for key, value in config.items() if key not in _IRRELEVANT})
    return {k.removeprefix("algo_kwargs."): json.dumps(value, default=str) for k, value in relevant.items()}


def _unfinished(path: Path, status: str | None) -> str:
    state = "its status cannot be read" if status is None else f"its status is '{status}'"
    return f"{path} is an unfinished run ({state}); finish it with `rl-training resume --checkpoint {path}`"


def _read(path: Path) -> Run:
    config = read_config(path / _CONFIG)
    algo, env_id = config.get("algo"), config.get("env_id")
    seeds = config.get("seeds") or [config.get("seed", 0)]
    whole = isinstance(seeds, list | tuple) and all(isinstance(seed, int) for seed in seeds)
    if not (isinstance(algo, str) and isinstance(env_id, str) and whole):
        raise UserError(f"{path / _CONFIG} is damaged: algo, env_id or seeds are missing")
    if not (path / FILE).is_file():
        raise UserError(f"{path} is an unfinished run: it has no {FILE}")
    records = read_metrics(path)
    for number, record in enumerate(records, start=1):
        if not all(is_finite(record.get(key)) for key in ("step", "time")):
            raise UserError(f"{path / FILE} is damaged: line {number} has no step and time")
    return Run(path, algo, env_id, tuple(seeds), relevant_settings(config), records)


def _clock(records: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds of training against steps, from the logged speed, which does not include interruptions."""
    known = {0.0: 0.0}
    for record in records:
        speed = record.get("time/fps")
        if is_finite(speed) and speed > 0 and is_finite(seconds := record["step"] / speed):
            known[float(record["step"])] = seconds
    if len(known) == 1 and records:
        start = records[0]["time"]
        known = {float(record["step"]): record["time"] - start for record in records}
    steps = sorted(known)
    return steps or [0.0], [known[step] for step in steps] or [0.0]


# --- groups -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Runs of one algorithm, with the same settings, on one environment: every seed is one score."""

    name: str  # the algorithm, and the settings that distinguish it from the other groups
    algo: str
    env_id: str
    runs: tuple[Path, ...]
    series: Mapping[int, Series]  # by seed
    curves: Mapping[int, Series]  # the same, or the training return if the metric has only one value
    curve_metric: str

    @property
    def seeds(self) -> list[int]:
        return sorted(self.series)

    @property
    def scores(self) -> Array:
        """The last value of each seed."""
        return np.array([self.series[seed].values[-1] for seed in self.seeds])

    @property
    def steps(self) -> int:
        return int(max(series.steps[-1] for series in self.series.values()))

    @property
    def seconds(self) -> float:
        """Duration of the longest run. The seeds of a study are trained together and have the same duration."""
        return float(max(series.seconds[-1] for series in self.series.values()))


def group_runs(
    runs: Sequence[Run], metric: str = METRIC, *, at: int | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> list[Group]:  # fmt: skip
    """Pool runs that differ only in their seeds. If a seed was run twice, the later run counts."""
    known = set().union(*(run.metrics for run in runs))
    if metric not in known:
        raise UserError(f"unknown metric '{metric}'.{did_you_mean(metric, known)} The runs log: {_list(known)}")
    pools: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.algo, run.env_id)):
        pools.setdefault((run.algo, run.env_id), []).append(run)
    groups = []
    for (algo, env_id), pool in pools.items():
        keys = {key for run in pool for key in run.settings}
        differing = sorted(key for key in keys if len({run.settings.get(key) for run in pool}) > 1)
        by_settings: dict[tuple[Any, ...], list[Run]] = {}
        for run in pool:
            by_settings.setdefault(tuple(run.settings.get(key) for key in differing), []).append(run)
        for values, members in by_settings.items():
            what = ", ".join(f"{key}={value}" for key, value in zip(differing, values) if value is not None)
            groups.append(_pool(f"{algo} ({what})" if what else algo, algo, env_id, members, metric, at, warn))
    return groups


def _pool(
    name: str, algo: str, env_id: str, runs: Sequence[Run], metric: str, at: int | None, warn: Callable[[str], None]
) -> Group:
    series: dict[int, Series] = {}
    training: dict[int, Series] = {}
    origin: dict[int, Path] = {}
    for run in sorted(runs, key=lambda run: min((record["time"] for record in run.records), default=0.0)):
        found = {seed: values.until(at) for seed, values in run.series(metric).items()}
        missing = [seed for seed in run.seeds if seed not in found or not len(found[seed].values)]
        if missing:
            late = f" up to step {at:,}" if at is not None and metric in run.metrics else ""
            raise UserError(f"{run.path} is an unfinished run: seed {missing[0]} has no '{metric}'{late} yet")
        for seed in run.seeds:
            if seed in origin:
                warn(f"seed {seed} of {name} on {env_id} was run twice: using {run.path}, ignoring {origin[seed]}")
            origin[seed] = run.path
        series |= found
        training |= {seed: values.until(at) for seed, values in run.series(TRAINING).items()}
    short = metric == METRIC and min(len(one.values) for one in series.values()) < 2
    usable = set(training) == set(series) and min(len(one.values) for one in training.values()) > 1
    curves, curve_metric = (training, TRAINING) if short and usable else (series, metric)
    kept = tuple(dict.fromkeys(origin[seed] for seed in sorted(origin)))
    return Group(name, algo, env_id, kept, series, curves, curve_metric)


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:12]) + (f" and {len(ordered) - 12} more" if len(ordered) > 12 else "")
