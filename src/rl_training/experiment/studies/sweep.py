"""Sweeps: a list of configs as resumable trials in worker processes.

<sweep>/sweep.json            the list of trials: written once, compared when the sweep is continued
        results.json          a table of results; never read by the sweep itself
        trials/trial_0007/    one run directory, worker.log, and failed.json if the trial failed
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_json, exclusive_directory
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.studies.pool import RETRIES, Event, Job, Pool
from rl_training.experiment.studies.trials import TrialState, forget_failure, run_trial, summary_of, trial_state

PLAN, RESULTS, FORMAT = "sweep.json", "results.json", "rl_training.sweep"
MAX_TRIALS = 10_000  # more are probably a mistake


@dataclass(frozen=True)
class Trial:
    name: str
    config: TrainConfig
    directory: Path
    settings: dict[str, str] = field(default_factory=dict)  # those that differ between trials, for display

    def describe(self) -> str:
        seeds = self.config.all_seeds
        seed = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]}-{seeds[-1]}"
        changes = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.config.algo} on {self.config.env_id}, {seed}{'  ' if changes else ''}{changes}"


class Sweep:
    """`configs` are the trials, in order; `settings[i]` describes how the i-th differs from the others."""

    def __init__(
        self, directory: str | Path, configs: Sequence[TrainConfig], settings: Sequence[dict[str, str]] | None = None
    ) -> None:
        self.directory = Path(directory)
        if not configs:
            raise UserError("a sweep needs at least one trial")
        if len(configs) > MAX_TRIALS:
            raise UserError(f"this grid has {len(configs):,} trials; at most {MAX_TRIALS:,} are allowed")
        names = [f"trial_{i:04d}" for i in range(len(configs))]
        self.trials = [
            Trial(name, config, self.directory / "trials" / name, differences)
            for name, config, differences in zip(names, configs, settings or [{}] * len(configs), strict=True)
        ]
        plain = [identity(config) for config in configs]
        seen: dict[str, str] = {}
        for name, config in zip(names, plain):
            first = seen.setdefault(json.dumps(config, sort_keys=True), name)
            if first != name:
                raise UserError(f"{first} and {name} of this sweep are the same run; list each value only once")
        trials = [{"name": name, "config": config} for name, config in zip(names, plain)]
        self.plan = {"format": FORMAT, "schema": 1, "trials": trials}

    def run(
        self, workers: int = 1, *, retries: int = RETRIES, retry_failed: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
        target: str = "rl_training.experiment.studies.sweep:work", cluster: str | None = None, gpus: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        """Run every trial that is not complete and return the table of results. Calling it again continues the sweep.

        `target(directory, config, env)` runs a trial in its worker; tests use it to inject failures. `cluster`: the
        workers are tasks of that Ray cluster, with `gpus` each.
        """
        if workers < 1:
            raise UserError(f"workers = {workers}: a sweep needs at least one")
        with exclusive_directory(self.directory, "the sweep"):
            self._open()
            if retry_failed:
                for trial in self.trials:
                    forget_failure(trial.directory)
            pool = Pool(target, workers, retries=retries, on_event=on_event, cluster=cluster, gpus=gpus)
            pool.run(self._jobs())
            table = self.results()
            atomic_write_json(self.directory / RESULTS, table)
            return table

    def _jobs(self) -> Iterator[Job]:
        for trial in self.trials:
            # The environment's id comes from this command: an id from a checkpoint must not import a module.
            yield Job(trial.name, trial.directory, (str(trial.directory), trial.config.to_dict(), trial.config.env_id))

    def _open(self) -> None:
        """Check that the directory contains this sweep, or initialise it."""
        for leftover in self.directory.glob("*.tmp-*"):  # of a process that was killed
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        path = self.directory / PLAN
        if path.exists():
            self._compare(path)
        elif any(self.directory.iterdir()):
            raise UserError(f"{self.directory} is not empty and does not contain a sweep; choose another --output-dir")
        else:
            atomic_write_json(path, self.plan)

    def _compare(self, path: Path) -> None:
        try:
            saved = json.loads(path.read_text())
            old, new = saved["trials"], json.loads(json.dumps(self.plan))["trials"]
            if saved["format"] != FORMAT or saved["schema"] != 1:
                raise ValueError("it has another format or version")
            difference = first_difference(old, new)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read as a sweep: {error}") from None
        if difference:
            raise UserError(
                f"{self.directory} contains another sweep ({difference}); repeat the command that started it,"
                " or choose another --output-dir"
            )

    def results(self) -> dict[str, Any]:
        """A table with one row for each trial, read from the disk."""
        rows = [self._row(trial, trial_state(trial.directory)) for trial in self.trials]
        count = {name: sum(row["status"] == name for row in rows) for name in ("done", "failed", "started", "new")}
        ranking = rank(rows)
        return {"directory": str(self.directory), "total": len(rows), **count, "trials": rows, "ranking": ranking}

    def _row(self, trial: Trial, state: TrialState) -> dict[str, Any]:
        summary = summary_of(state)
        return {
            "name": trial.name,
            "algo": trial.config.algo,
            "env_id": trial.config.env_id,
            "seeds": list(trial.config.all_seeds),
            "settings": trial.settings,
            "status": state.status,
            "run_dir": str(state.run_dir.relative_to(self.directory)) if state.run_dir is not None else None,
            "env_steps": summary.get("env_steps"),
            "mean_return": (summary.get("final_eval") or {}).get("mean_return"),
            "error": state.error,
        }


def rank(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The combinations of a sweep by mean return over their seeds, best first within each environment."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["mean_return"] is not None:
            groups.setdefault((row["env_id"], row["algo"], json.dumps(row["settings"])), []).append(row)
    table = [
        {
            "env_id": env_id, "algo": algo, "settings": found[0]["settings"],
            "mean_return": sum(row["mean_return"] for row in found) / len(found),
            "seeds": sum(len(row["seeds"]) for row in found),
            "lowest": min(row["mean_return"] for row in found), "highest": max(row["mean_return"] for row in found),
            "trials": [row["name"] for row in found],
        }
        for (env_id, algo, _), found in groups.items()
    ]  # fmt: skip
    return sorted(table, key=lambda row: (row["env_id"], -row["mean_return"]))


def work(directory: str, config: dict[str, Any], env: str) -> None:
    """Run a trial in a worker."""
    run_trial(Path(directory), TrainConfig.from_file(config), env=env)


def identity(config: TrainConfig) -> dict[str, Any]:
    """What identifies a trial: all settings except those that change nothing about its agent."""
    return {key: value for key, value in config.to_dict().items() if key not in ("output_dir", "eval_video")}


def first_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """A description of the first difference between two lists of trials; empty if they are equal."""
    for a, b in itertools.zip_longest(old, new):
        if a is None or b is None:
            return f"it has {len(old)} trial{'s' * (len(old) != 1)} instead of {len(new)}"
        for key in dict.fromkeys([*a["config"], *b["config"]]):
            x, y = a["config"].get(key), b["config"].get(key)
            if x != y and isinstance(x, dict) and isinstance(y, dict):
                key, x, y = next((f"{key}.{k}", x.get(k), y.get(k)) for k in {**x, **y} if x.get(k) != y.get(k))
            if x != y:
                return f"its {a['name']} has {key} = {x}, this one {y}"
    return ""
