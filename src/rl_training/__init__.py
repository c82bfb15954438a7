"""rl_training: reinforcement learning in PyTorch. Nothing heavy is imported before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "TrainConfig": "rl_training.experiment.config",
    "make_config": "rl_training.experiment.config",
    "TrainResult": "rl_training.experiment.trainer",
    "Callback": "rl_training.experiment.callbacks",
    "EarlyStopping": "rl_training.experiment.callbacks",
    "ExperimentManager": "rl_training.experiment.manager",
    "ManagedAlgorithm": "rl_training.api.managed",
    "algorithm_class": "rl_training.api.managed",
    "load": "rl_training.api.managed",
    "UserError": "rl_training.errors",
}

if TYPE_CHECKING:
    from rl_training.api.managed import ManagedAlgorithm, algorithm_class, load
    from rl_training.errors import UserError
    from rl_training.experiment.callbacks import Callback, EarlyStopping
    from rl_training.experiment.config import TrainConfig, make_config
    from rl_training.experiment.manager import ExperimentManager
    from rl_training.experiment.trainer import TrainResult


def list_algorithms(family: str | None = None) -> list[str]:
    """Names of the algorithms, of one family or all."""
    from rl_training.experiment import registry

    return [e.name for e in registry.entries().values() if family in (None, e.family)]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name.startswith("train_") or name[:1].isupper():
        from rl_training.experiment import registry

        if name.startswith("train_") and name.removeprefix("train_") in registry.entries():
            return importlib.import_module("rl_training.api.managed").train_function(name.removeprefix("train_"))
        entry = registry.entry_of_class(name)
        if entry is not None:
            return importlib.import_module("rl_training.api.managed").algorithm_class(entry.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from rl_training.experiment import registry

    return sorted([*_LAZY, "list_algorithms", "__version__", *(e.class_name for e in registry.entries().values())])


__all__ = [
    "Callback",
    "EarlyStopping",
    "ExperimentManager",
    "ManagedAlgorithm",
    "TrainConfig",
    "TrainResult",
    "UserError",
    "algorithm_class",
    "list_algorithms",
    "load",
    "make_config",
]
