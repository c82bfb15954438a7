"""Settings of all algorithms: a field that several classes declare is the one that Python's method order names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rl_training import registry
from rl_training.algorithms.hyper import Hyper

ENTRIES = registry.entries()


def all_settings() -> list[type[Hyper]]:
    """Every class of settings, those that only others inherit from included."""
    for entry in ENTRIES.values():
        entry.load()
    found, pending = [], [Hyper]
    while pending:
        cls = pending.pop()
        found.append(cls)
        pending += cls.__subclasses__()
    return list(dict.fromkeys(found))


def described(model: Any, field: str) -> tuple[Any, ...]:
    info = model.model_fields[field]
    return info.get_default(call_default_factory=True), info.annotation, info.metadata, info.description


def test_inherited_fields_follow_the_method_order() -> None:
    """Pydantic copies the fields of the first base as a whole, also those that it only inherits, so that a default of a
    later base can be lost. Such a class must list its bases in another order, or declare the field itself."""
    classes = all_settings()
    assert {entry.load().Hyper for entry in ENTRIES.values()} <= set(classes)
    wrong = []
    for cls in classes:
        for field in cls.model_fields:
            owner: Any = next(c for c in cls.__mro__ if field in inspect.get_annotations(c))
            if described(cls, field) != described(owner, field):
                wrong.append(f"{cls.__name__}.{field} is not that of {owner.__name__}")
    assert not wrong


@pytest.mark.parametrize("name", ["mbpo", "mopo", "combo", "sac"])
def test_networks_of_soft_actor_critics_are_256_wide(name: str) -> None:
    assert ENTRIES[name].load().Hyper().hidden_sizes == (256, 256)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_a_setting_has_a_description(name: str) -> None:
    fields = ENTRIES[name].load().Hyper.model_fields
    assert [field for field, info in fields.items() if not info.description] == []
