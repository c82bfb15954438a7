"""Hooks into a run. Override the methods you need; `trainer.request_stop(reason)` ends the run with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl_training.envs.vector import Step
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.result import TrainResult


class TrainingRun(Protocol):
    """The part of a run that callbacks may use."""

    config: TrainConfig
    run_dir: Path

    @property
    def env_steps(self) -> int:
        """Environment steps that each seed has taken so far."""

    def request_stop(self, reason: str) -> None:
        """End the run cleanly, with a checkpoint, at the next safe point."""

    def agent(self, seed: int | None = None) -> Agent:
        """An agent with the current policy."""


class Callback:
    def on_train_start(self, trainer: TrainingRun) -> None: ...

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        """Called after every step of the environments, with their observations, rewards, endings and finished episodes
        (`envs.vector.Step`). The arrays are used again: copy what you keep. It slows training down, so only callbacks
        that override it are called. Not called by offline algorithms."""

    def on_collect_end(self, trainer: TrainingRun, result: dict[str, Any]) -> None:
        """Called after each block of training steps; `result` has env_steps and gradient_steps."""

    def on_update_end(self, trainer: TrainingRun, result: dict[str, float]) -> None:
        """Called when the metrics of the last update are logged; they stay on the device until then."""

    def on_eval_end(self, trainer: TrainingRun, metrics: dict[str, Any]) -> None: ...

    def on_checkpoint(self, trainer: TrainingRun, path: Path) -> None: ...

    def on_train_end(self, trainer: TrainingRun, result: TrainResult) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """The callback's state as JSON: saved in every checkpoint and passed to `load_state_dict` on resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def check_callbacks(callbacks: Any) -> list[Callback]:
    """The callbacks as a list; anything else is a UserError."""
    given: list[Any] = list(callbacks) if isinstance(callbacks, Iterable) else [None]
    if not all(isinstance(callback, Callback) for callback in given):
        raise UserError(f"callbacks must be a list of Callback objects, not {callbacks!r}")
    return given


def callbacks_by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by class name and number within the class, so that a resumed run finds the same names."""
    names = [type(callback).__qualname__ for callback in callbacks]
    return {f"{name}.{names[:i].count(name)}": callbacks[i] for i, name in enumerate(names)}


class EarlyStopping(Callback):
    """Stop when `patience` evaluations in a row have not been better than the best one by more than `min_delta`."""

    def __init__(self, patience: int = 5, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise UserError(f"patience must be at least 1 evaluation; got {patience}")
        self.patience, self.min_delta = patience, min_delta
        self.best, self.waited = float("-inf"), 0

    def on_eval_end(self, trainer: TrainingRun, metrics: dict[str, Any]) -> None:
        if metrics["mean_return"] > self.best + self.min_delta:
            self.best, self.waited = metrics["mean_return"], 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.request_stop(f"the last {self.patience} evaluations were not better than {self.best:.1f}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
