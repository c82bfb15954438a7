"""Settings of all algorithms: a field that several classes declare is the one that Python's method order names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from helpers import spec_for

from rl_training import registry
from rl_training.algorithms.hyper import Hyper
from rl_training.errors import UserError

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


@pytest.mark.parametrize("name", [name for name in ENTRIES if "cnn" in ENTRIES[name].load().Hyper.model_fields])
def test_networks_for_images_are_refused_on_vectors(name: str) -> None:
    spec, fields = spec_for(name, "discrete"), ENTRIES[name].load().Hyper.model_fields
    ENTRIES[name].load()(spec, cnn=fields["cnn"].default)  # the default is only for images, so it says nothing here
    other = "nature" if fields["cnn"].default == "impala" else "impala"
    with pytest.raises(UserError, match=rf"^cnn: {other} needs image observations; .* has none: leave out cnn$"):
        ENTRIES[name].load()(spec, cnn=other)
    if "cnn_width" in fields:
        with pytest.raises(UserError, match="cnn_width: 3 needs image observations"):
            ENTRIES[name].load()(spec, cnn_width=3)
