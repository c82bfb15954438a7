"""What a run remembers between its events: evaluations, events that are due, how its time was spent and on what."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_training.machine import memory_in_use
from rl_training.runtime.loops.base import Loop


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
        """The part of a checkpoint's metadata that `from_json` reads."""
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


class Clock:
    """Shares of the time since the last call of `split`. Evaluations, checkpoints and logging do not count.

    On a GPU, updates run while the environments step: the time for learning is what the host waits for.
    """

    def __init__(self) -> None:
        self.advanced = 0.0  # seconds in `Loop.advance`
        self._last = (0.0, 0.0, 0.0)
        self._used = (time.monotonic(), time.process_time())

    def use(self, device: torch.device) -> dict[str, float]:
        """CPU cores that this process kept busy since the last call, and the memory that it holds now."""
        now = (time.monotonic(), time.process_time())
        (elapsed, busy), self._used = (new - old for new, old in zip(now, self._used)), now
        out = {"time/cpu_cores": busy / elapsed} if elapsed > 0.0 else {}
        if (memory := memory_in_use()) is not None:
            out["time/memory_gib"] = memory / 2**30
        if device.type == "cuda":
            out["time/gpu_memory_gib"] = torch.cuda.memory_reserved(device) / 2**30
        return out

    def split(self, loop: Loop) -> dict[str, float]:
        now = (self.advanced, loop.env_seconds, loop.learn_seconds)
        total, env, learn = (new - old for new, old in zip(now, self._last))
        self._last = now
        if total <= 0.0:
            return {}
        shares = {"environment": env / total, "learning": learn / total}
        shares["acting"] = max(0.0, 1.0 - sum(shares.values()))
        return {f"time/{name}": share for name, share in shares.items()}
