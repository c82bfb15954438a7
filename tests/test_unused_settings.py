"""A setting that an algorithm has changes what it learns, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ALGORITHMS, is_quick, slow_unless, updated

from rl_training import registry
from rl_training.errors import UserError
from rl_training.experiment.studies.search_space import default_space
from rl_training.ops.tree import tree_leaves

CHANGES: dict[str, Any] = {"hidden_sizes": [24, 24], "activation": "elu", "optimizer": "rmsprop"}
NO_EFFECT = {"openai_es": "activation", "ars": "activation"}  # this test gives them returns, and evaluates no policy


def outcome(name: str, **fields: Any) -> list[torch.Tensor]:
    kind = registry.entry(name).actions[0]
    return [
        x for x in tree_leaves(updated(name, kind, (0,), "eager", steps=1, **fields)) if isinstance(x, torch.Tensor)
    ]


@pytest.mark.parametrize("name", slow_unless(is_quick, ALGORITHMS))
def test_every_setting_has_an_effect_or_is_refused(name: str) -> None:
    hyper, base = registry.entry(name).load().Hyper, outcome(name)
    refused: list[str] = []
    for field, value in CHANGES.items():
        if (
            field not in hyper.model_fields
            or field == NO_EFFECT.get(name)
            or value == hyper.model_fields[field].default
        ):
            continue
        try:
            found = outcome(name, **{field: value})
        except UserError as error:
            refused.append(str(error))
            continue
        shapes = [[x.shape for x in leaves] for leaves in (base, found)]
        same = shapes[0] == shapes[1] and all(torch.equal(a, b) for a, b in zip(base, found, strict=True))
        assert not same, f"{name}: {field} = {value} changes nothing"
    assert all(any(field in sentence for field in CHANGES) for sentence in refused)


def test_settings_without_effect_are_refused_but_not_their_defaults() -> None:
    pets = registry.entry("pets").load().Hyper
    assert pets(**{name: getattr(pets(), name) for name in pets.unused}) == pets()
    with pytest.raises(ValueError, match="hidden_sizes has no effect here: leave it out"):
        pets(hidden_sizes=(32,))
    assert default_space("pets").keys().isdisjoint(pets.unused)
    assert default_space("pets")
