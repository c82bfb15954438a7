"""Experiment trackers (Weights & Biases, MLflow, Trackio) behind one small interface.

A tracker receives a copy of metrics.jsonl from a thread of its own, so that a slow network never delays a run. If a
tracker fails there is one warning, and training continues: the run directory has all metrics. Each tool's own settings
decide where the data goes (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_json, read_json_object
from rl_training.experiment.run.config import flat

PROJECT = "rl-training"
FILE = "trackers.json"  # the trackers' own ids of the run, so that a resumed run continues them
_MAX_WAITING = 10_000  # events that may wait for a slow tracker before it is given up
_CLOSE_TIMEOUT = 30.0  # seconds that a tracker gets at the end of a run


class Tracker(Protocol):
    """What a tracker must implement; all methods are called from one thread."""

    id: str  # identifies the run, so that a resumed run can continue it

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, failed: bool) -> None: ...


class WandbTracker:
    """Weights & Biases. Steps are logged as a metric, because `step=` refuses the steps that a resumed run repeats."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path, id: str | None) -> None:
        wandb = importlib.import_module("wandb")
        self.id = id or name
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=name, id=self.id, resume="allow",
            config=dict(config), dir=str(folder), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "env_steps": step})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """MLflow, through its client: the fluent functions would use the user's global run."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path, id: str | None) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient()
        if id is not None:
            self.id = id
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self.id = self._client.create_run(number, run_name=name).info.run_id
        for key, value in flat(config).items():
            self._client.log_param(self.id, key, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


class TrackioTracker:
    """Trackio. Its messages go to stderr, because stdout is reserved for the JSON object of `--json`."""

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path, id: str | None) -> None:
        trackio = importlib.import_module("trackio")
        for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "trackio"]:
            vars(module)["print"] = functools.partial(print, file=sys.stderr)
        self.id = id or name
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(project=project, name=self.id, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


class Feed:
    """A tracker and its thread. `log` and `close` never raise, and `log` never waits for the network."""

    def __init__(self, name: str, make: Callable[[], Tracker], started: Callable[[str], None]) -> None:
        self.name = name
        self._make, self._started = make, started
        self._queue: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue(_MAX_WAITING)
        self._broken = False
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._broken:
            return
        try:
            self._queue.put_nowait((step, values))
        except queue.Full:
            self._fail(f"it is {_MAX_WAITING} events behind")

    def close(self, failed: bool, patience: float = _CLOSE_TIMEOUT) -> None:
        if not self._broken:
            try:
                self._queue.put(failed, timeout=patience)
            except queue.Full:
                self._fail(f"it is {_MAX_WAITING} events behind")
        self._thread.join(0.0 if self._broken else patience)
        if self._thread.is_alive() and not self._broken:
            self._fail(f"it did not finish within {patience:g} s")

    def _serve(self) -> None:
        try:
            tracker = self._make()
            self._started(tracker.id)
            while not isinstance(item := self._queue.get(), bool):
                tracker.log(*item)
            tracker.finish(item)
        except BaseException as error:  # some libraries raise SystemExit when nobody is logged in
            self._fail(" ".join(f"{type(error).__name__}: {error}".split())[:300])

    def _fail(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            warnings.warn(
                f"the tracker {self.name} stopped ({reason}); training continues, all metrics are in metrics.jsonl",
                stacklevel=2,
            )


class Trackers:
    """The trackers of a run; usually there are none."""

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> None:
        self._path, self._lock = run_dir / FILE, threading.Lock()
        self._ids = {name: str(id) for name, id in read_json_object(self._path).items()}  # of a resumed run
        self._feeds = [self._open(name, config) for name in dict.fromkeys(names) if _installed(name)]

    def log(self, step: int, values: Mapping[str, float], seed: int | None = None) -> None:
        """Send one event of the metric log, under the same names as in TensorBoard."""
        if self._feeds:
            tail = "" if seed is None else f"/seed_{seed}"
            finite = {key + tail: float(value) for key, value in values.items() if math.isfinite(value)}
            for feed in self._feeds:
                feed.log(int(step), finite)

    def close(self, failed: bool = False) -> None:
        for feed in self._feeds:
            feed.close(failed)
        self._feeds = []

    def _open(self, name: str, config: Mapping[str, Any]) -> Feed:
        run_dir = self._path.parent
        return Feed(
            name, lambda: TRACKERS[name](run_dir.name, config, run_dir, self._ids.get(name)),
            lambda id: self._remember(name, id),
        )  # fmt: skip

    def _remember(self, name: str, id: str) -> None:
        with self._lock:
            self._ids[name] = id
            atomic_write_json(self._path, self._ids)


def check_trackers(names: Sequence[str], *, required: bool) -> None:
    """A missing package is an error if `required`; otherwise a warning, and the run continues without the tracker."""
    for name in names:
        if not _installed(name):
            sentence = f"the tracker {name} is not installed: pip install 'rl-training[tracking]'"
            if required:
                raise UserError(sentence)
            warnings.warn(f"{sentence}; the run continues without it", stacklevel=2)


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None
