"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TrainResult:
    """What `learn()` returns."""

    run_dir: Path
    checkpoint_path: Path
    final_eval: dict[str, Any]
    best_eval: dict[str, Any] | None
    metrics: dict[str, float]  # the last logged values
    status: str  # completed, stopped (early) or interrupted (by a signal)
    summary: dict[str, Any] = field(default_factory=dict)
    signal: int | None = None  # the signal that interrupted the run
