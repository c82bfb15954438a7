"""Custom operations: a graph, a recording or `vmap` treats each as a single step and does not look inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library.Library("rl_training", "FRAGMENT")  # type: ignore[no-untyped-call]


def operation(
    schema: str, function: Callable[..., Any], *kinds: str, shapes: Callable[..., Any] | None = None,
    batched: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Define `torch.ops.rl_training.<name>` by its schema, "name(arguments) -> result".

    `kinds`: the dispatch keys that `function` implements ("CPU", "CUDA"). `shapes` returns empty results for tracing; a
    function made of tensor operations ("CompositeExplicitAutograd") needs none. `batched` is the rule for vmap.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for kind in kinds:
        _library.impl(name, function, kind)
    if shapes is not None:
        torch.library.register_fake(f"rl_training::{name}", shapes, lib=_library)
    if batched is not None:
        torch.library.register_vmap(f"rl_training::{name}", batched, lib=_library)
    return getattr(torch.ops.rl_training, name).default
