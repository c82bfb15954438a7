"""rl_training: reinforcement learning in PyTorch. Nothing heavy is imported before it is used.

Type checkers read `__init__.pyi`, which `make docs` writes, instead of this file.
"""

from __future__ import annotations

import importlib
from typing import Any

from rl_training.version import __version__ as __version__

_LAZY = {
    "TrainConfig": "rl_training.experiment.run.config",
    "make_config": "rl_training.experiment.run.config",
    "TrainResult": "rl_training.experiment.run.result",
    "Callback": "rl_training.experiment.run.callbacks",
    "EarlyStopping": "rl_training.experiment.run.callbacks",
    "ExperimentManager": "rl_training.experiment.run.manager",
    "ManagedAlgorithm": "rl_training.api.managed",
    "algorithm_class": "rl_training.api.managed",
    "load": "rl_training.api.managed",
    "UserError": "rl_training.errors",
    "allow_import": "rl_training.imports",
}


def list_algorithms(family: str | None = None) -> list[str]:
    """Names of the algorithms, of one family or all."""
    from rl_training import registry

    return [e.name for e in registry.entries().values() if family in (None, e.family)]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name.startswith("train_") or name[:1].isupper():
        from rl_training import registry

        if name.startswith("train_") and name.removeprefix("train_") in registry.entries():
            return importlib.import_module("rl_training.api.managed").train_function(name.removeprefix("train_"))
        entry = registry.entry_of_class(name)
        if entry is not None:
            return importlib.import_module("rl_training.api.managed").algorithm_class(entry.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from rl_training import registry

    return sorted([*_LAZY, "list_algorithms", "__version__", *(e.class_name for e in registry.entries().values())])


__all__ = sorted([*_LAZY, "__version__", "list_algorithms"])
