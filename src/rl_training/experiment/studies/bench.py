"""Runs a suite: as many studies at a time as fit on the machine, each a trial that can be killed and continued.

<bench>/<study>/          one run directory, worker.log, study.json (which run it is and what it needs)
<results>/<study>.json    written when a study ends, or is cut after its first evaluation
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl_training import registry
from rl_training.data.storage import available_memory
from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_json, exclusive_directory, read_json_object
from rl_training.experiment.run.config import TrainConfig, flat
from rl_training.experiment.run.estimate import plan
from rl_training.experiment.run.metrics import FILE as METRICS
from rl_training.experiment.run.metrics import last_events
from rl_training.experiment.run.result import record_of
from rl_training.experiment.studies.pool import Event, Job, Pool
from rl_training.experiment.studies.suite import Study, Suite
from rl_training.experiment.studies.sweep import first_difference, identity
from rl_training.experiment.studies.trials import TrialState, forget_failure, summary_of, trial_state
from rl_training.machine import usable_cpus
from rl_training.runtime.engine.executor import choose_device

FILE = "study.json"
SHARE = 0.9  # of the free memory that studies may take together
GPU_BYTES = 3 << 29  # a process's CUDA context and working memory, beside what `plan` counts
DATASET_ROWS = 1_000_000  # of a dataset whose recipe does not say its size
GRACE = 600.0  # seconds for a study to save a large replay buffer
_PLACE = ("device", "execution", "vectorization", "output_dir", "tags")  # do not change what a study measures


class Needs(NamedTuple):
    """What one study takes: bytes and cores."""

    ram: int
    vram: int
    disk: int
    cores: int


@dataclass
class Task:
    """A study of this bench, its directory and its result file."""

    study: Study
    config: TrainConfig
    directory: Path
    result: Path
    needs: Needs | None = field(default=None, compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What the directory's run must have: all settings except those that only say where it is trained."""
        plain: dict[str, Any] = json.loads(json.dumps(_measured(identity(self.config))))
        return plain

    @property
    def state(self) -> TrialState:
        """The state of the study's run; new if the directory has other settings."""
        mine = read_json_object(self.directory / FILE).get("config") == self.settings
        return trial_state(self.directory) if mine else TrialState("new")

    @property
    def saved(self) -> dict[str, Any]:
        """The result on disk; empty if there is none, or if it has other settings."""
        row = read_json_object(self.result)
        return row if row and not stale(row, self.config) else {}

    @property
    def done(self) -> bool:
        return self.state.status == "done" or bool(self.saved.get("completed"))


class Progress(NamedTuple):
    """Where a running study is."""

    step: int
    steps_per_second: float | None
    score: float | None  # of the last evaluation

    def eta(self, total: int) -> float | None:
        return (total - self.step) / self.steps_per_second if self.steps_per_second else None


class Bench:
    """The chosen studies of a suite. `changes` are settings on top of those of the suite."""

    def __init__(
        self, suite: Suite, directory: Path, results: Path, *, studies: Sequence[Study] | None = None,
        changes: Callable[[Study], dict[str, Any]] = lambda study: {},
    ) -> None:  # fmt: skip
        self.suite, self.directory = suite, directory
        chosen = suite.studies if studies is None else studies
        self.tasks = [
            Task(study, study.config(changes(study)), directory / study.name, results / f"{study.name}.json")
            for study in chosen
        ]

    def run(
        self, jobs: int | None = None, *, minutes: float | None = None,
        on_event: Callable[[Event], None] = lambda event: None, on_plan: Callable[[Task], None] = lambda task: None,
        cluster: str | None = None, gpus: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        """Train what is not complete, for at most `minutes`, and return the table. Calling it again continues.
        `cluster`: studies are tasks of that Ray cluster, with `gpus` each, and Ray decides when there is room."""
        deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        with exclusive_directory(self.directory, "the bench"):
            open_tasks = [task for task in self.tasks if not task.done]
            for task in open_tasks:
                on_plan(task)
                self._open(task)
                forget_failure(task.directory)  # a failure of an earlier start is tried again
            options: dict[str, Any] = {"workers": jobs or max(1, len(open_tasks)), "cluster": cluster, "gpus": gpus}
            if cluster is None:
                room = _Room(open_tasks, jobs)
                options = {"workers": room.jobs, "fits": room.fits}
            tasks = {task.study.name: task for task in self.tasks}

            def happened(event: Event) -> None:
                if event.kind == "done":
                    self._write(tasks[event.job.name])
                on_event(event)

            try:
                pool = Pool(
                    "rl_training.experiment.studies.sweep:work", on_event=happened, deadline=deadline, grace=GRACE,
                    **options,
                )  # fmt: skip
                pool.run(self._jobs(open_tasks))
            finally:
                for task in self.tasks:
                    self._write(task)
            return self.table()

    def _jobs(self, tasks: Sequence[Task]) -> Iterator[Job]:
        for task in tasks:
            assert task.needs is not None
            # The environment's id is the suite's, which was checked: one from a checkpoint must not import a module.
            arguments = (str(task.directory), task.config.to_dict(), task.config.env_id)
            yield Job(task.study.name, task.directory, arguments, threads=task.needs.cores)

    def _open(self, task: Task) -> None:
        """Check that the directory contains this study, or initialise it; what it needs is estimated once."""
        path, mine = task.directory / FILE, {"name": "study", "config": task.settings}
        saved = read_json_object(path)
        if saved:
            if change := first_difference([{**mine, "config": saved["config"]}], [mine]):
                raise UserError(
                    f"{task.directory} contains another study ({change}); remove it or choose another --output-dir"
                )
            task.needs = Needs(**saved["needs"])
            return
        try:
            task.needs = needs_of(task.config)
        except UserError as error:
            raise UserError(f"{task.study.name}: {error}") from None
        task.directory.mkdir(parents=True, exist_ok=True)
        atomic_write_json(path, {"suite": self.suite.name, "config": task.settings, "needs": task.needs._asdict()})

    def _write(self, task: Task) -> None:
        """Write the result of a study that has one, unless it is on disk already."""
        state = task.state
        summary = summary_of(state)
        if state.run_dir is None or not (summary.get("final_eval") or {}).get("per_seed"):
            return
        saved, now = task.saved, (summary["env_steps"], summary["status"] == "completed")
        if saved.get("completed") or (saved.get("env_steps"), saved.get("completed")) == now:
            return
        task.result.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(task.result, self._record(task, state.run_dir, summary))

    def _record(self, task: Task, run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
        study, bar, config = task.study, task.study.bar, task.config
        score = study.score_of(summary["final_eval"]["mean_return"])
        completed = summary["status"] == "completed"
        return {
            "suite": self.suite.name,
            "algo": study.algo,
            "env_id": study.env_id,
            "preset": study.preset,
            "variant": study.variant,
            "total_timesteps": config.total_timesteps,
            "completed": completed,
            "seeds": list(config.all_seeds),
            "published": bar.model_dump() if bar is not None else None,
            "statistic": study.score,
            "score": score,
            "passed": study.passes(score, completed),
            "steps_per_second": round(len(config.all_seeds) * summary["steps_per_second"], 1),
            "gpu": read_json_object(run_dir / "metadata.json").get("host", {}).get("gpu"),
            "command": f"rl-training bench {self.suite.name} --only {study.name}",
            **record_of(config, run_dir, summary),
        }

    def table(self) -> dict[str, Any]:
        """One row for each study, read from the disk."""
        rows = [self._row(task) for task in self.tasks]
        count = {name: sum(row["status"] == name for row in rows) for name in ("done", "failed", "started", "new")}
        missed = [row["name"] for row in rows if row["passed"] is False and row["status"] == "done"]
        return {"suite": self.suite.name, "directory": str(self.directory), "total": len(rows), **count,
                "missed": missed, "studies": rows}  # fmt: skip

    def _row(self, task: Task) -> dict[str, Any]:
        state, saved, bar = task.state, task.saved, task.study.bar
        progress = progress_of(state.run_dir)
        return {
            "name": task.study.name,
            "algo": task.study.algo,
            "env_id": task.study.env_id,
            "seeds": list(task.config.all_seeds),
            "total_timesteps": task.config.total_timesteps,
            "status": "done" if task.done else state.status,
            "env_steps": saved.get("env_steps", max(progress.step if progress else 0, 0)),
            "score": saved.get("score"),
            "bar": bar.threshold if bar is not None and bar.judged else None,
            "published": bar.mean if bar is not None else None,
            "passed": task.study.passes(saved["score"], saved["completed"]) if saved else None,
            "steps_per_second": saved.get("steps_per_second"),
            "wall_time_s": saved.get("wall_time_s"),
            "result": str(task.result) if saved else None,
            "error": state.error,
        }


class _Room:
    """Which studies may run side by side: their memory must fit, and each has the cores it keeps busy."""

    def __init__(self, tasks: Sequence[Task], jobs: int | None) -> None:
        self.needs = {task.study.name: task.needs for task in tasks if task.needs is not None}
        self.count_cores = jobs is None
        self.jobs = jobs or usable_cpus()
        self.ram = available_memory(torch.device("cpu"))
        devices = {choose_device(task.config.device) for task in tasks}
        gpu = next((device for device in devices if device.type == "cuda"), None)
        self.vram = available_memory(gpu) if gpu is not None else None
        for task in tasks:
            self._check(task)

    def _check(self, task: Task) -> None:
        needs = self.needs[task.study.name]
        task.directory.mkdir(parents=True, exist_ok=True)
        free_disk = shutil.disk_usage(task.directory).free
        for what, need, free in (
            ("memory", needs.ram, self.ram), ("GPU memory", needs.vram, self.vram), ("disk", needs.disk, free_disk),
        ):  # fmt: skip
            if free is not None and need > SHARE * free:
                raise UserError(
                    f"{task.study.name} needs {need / 1e9:.1f} GB of {what}, and this machine has {free / 1e9:.1f} GB"
                    " free; choose other studies with --only, or give fewer seeds with --set seeds=0"
                )

    def fits(self, job: Job, running: Sequence[Job]) -> bool:
        beside = [self.needs[one.name] for one in (job, *running)]
        enough = not self.count_cores or sum(needs.cores for needs in beside) <= usable_cpus()
        for free, taken in ((self.ram, sum(n.ram for n in beside)), (self.vram, sum(n.vram for n in beside))):
            enough = enough and (free is None or taken <= SHARE * free)
        return enough


def needs_of(config: TrainConfig) -> Needs:
    """The needs that `plan` estimates for a run. A small random dataset replaces the real one."""
    rows, recipe = 0, getattr(config.hyper(), "dataset", None)
    if recipe is not None:
        small, rows = 1_000, recipe.size or DATASET_ROWS
        stand_in = {"kind": "random", "size": small}
        config = config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "dataset": stand_in}})
    found = plan(config, probe=False)
    grown = found["stored_bytes"] * rows // 1_000 if registry.entry(config.algo).loop == "offline" else 0
    gpu = found["vram_bytes"] + grown + GPU_BYTES if found["vram_bytes"] else 0
    return Needs(found["ram_bytes"] + (0 if gpu else grown), gpu, found["disk_bytes"], found["cores"])


def progress_of(run_dir: Path | None) -> Progress | None:
    """The position of a run, from the end of its metrics file; None before its first event."""
    rows = last_events(run_dir / METRICS, 65_536) if run_dir is not None else []
    if not rows:
        return None
    last: dict[str, Any] = {key: value for row in rows for key, value in row.items()}
    return Progress(max(row["step"] for row in rows), last.get("time/fps"), last.get("eval/mean_reward"))


def stale(row: dict[str, Any], config: TrainConfig) -> bool:
    """Was a result measured with settings that the suite has changed since? Settings added since do not count."""
    old, new = (flat(_measured(one)) for one in (row.get("config", {}), config.resolved().to_dict()))
    new = json.loads(json.dumps(new))
    return any(value != new[key] for key, value in old.items() if key in new)


def _measured(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _PLACE}
