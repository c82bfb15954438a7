"""Runs: configuration, registry, trainer, checkpoints, results. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "TrainConfig": "run.config",
    "make_config": "run.config",
    "Callback": "run.callbacks",
    "EarlyStopping": "run.callbacks",
    "Trainer": "run.trainer",
    "TrainResult": "run.result",
    "ExperimentManager": "run.manager",
    "Agent": "run.agent",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_LAZY)
