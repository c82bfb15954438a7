"""What a run remembers between its events: evaluations, events that are due, and the time spent training."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunHistory:
    best_eval: dict[str, Any] | None = None
    last_eval: dict[str, Any] | None = None
    evaluated_at: int = -1  # step of the last evaluation
    due: list[str] = field(default_factory=list)  # events of the current step that have not happened yet, in order
    seconds_before: float = 0.0  # of training, before this process took over
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Of training, without the time between an interruption and its resume."""
        return self.seconds_before + time.monotonic() - self.started

    def to_json(self) -> dict[str, Any]:
        """The part of a checkpoint's meta data that `from_json` reads."""
        return {
            "best_eval": self.best_eval,
            "last_eval": self.last_eval,
            "evaluated_at": self.evaluated_at,
            "owed": [event for event in self.due if event != "save"],  # the checkpoint itself is not due again
            "elapsed_s": self.seconds,
        }

    @classmethod
    def from_json(cls, meta: dict[str, Any]) -> RunHistory:
        evaluations = meta["best_eval"], meta["last_eval"], meta["evaluated_at"]
        return cls(*evaluations, due=list(meta["owed"]), seconds_before=meta["elapsed_s"])
