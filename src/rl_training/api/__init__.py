"""Managed classes by name: `from rl_training.api import DQN`."""

from __future__ import annotations

from typing import Any

from rl_training import registry
from rl_training.api.managed import ManagedAlgorithm, algorithm_class, load

__all__ = ["ManagedAlgorithm", "algorithm_class", "load"]


def __getattr__(name: str) -> Any:
    entry = registry.entry_of_class(name)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return algorithm_class(entry.name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(e.class_name for e in registry.entries().values())])
