"""Runs: configuration, registry, trainer, checkpoints, results. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "TrainConfig": "config",
    "make_config": "config",
    "Callback": "callbacks",
    "EarlyStopping": "callbacks",
    "Trainer": "trainer",
    "TrainResult": "trainer",
    "ExperimentManager": "manager",
    "Agent": "agent",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_LAZY)
