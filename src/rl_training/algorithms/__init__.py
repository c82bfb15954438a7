"""Bare algorithms by name: `from rl_training.algorithms import DQN`, then `DQN(q_network=...).update(batch)`. There is
also `train_<algo>(config)` for each of them.

`rl_training.DQN` is the managed class: it takes a TrainConfig, and trains, saves and evaluates."""

from __future__ import annotations

import importlib
from typing import Any

from rl_training import registry
from rl_training.algorithms.base import Algorithm, Aux, TrainState, UpdateResult

__all__ = ["Algorithm", "Aux", "TrainState", "UpdateResult"]

_LOSSES = {  # losses that can be used on their own, by module
    "naf_loss": "continuous.naf", "d4pg_loss": "continuous.d4pg", "iql_loss": "offline.iql",
    "mopo_model_loss": "model_based.model_fit",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("train_") and name.removeprefix("train_") in registry.entries():
        return registry.train_function(name.removeprefix("train_"))
    if name in _LOSSES:
        return getattr(importlib.import_module(f"{__name__}.{_LOSSES[name]}"), name)
    entry = registry.entry_of_class(name)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return entry.load()


def __dir__() -> list[str]:
    return sorted([*__all__, *_LOSSES, *(e.class_name for e in registry.entries().values())])
