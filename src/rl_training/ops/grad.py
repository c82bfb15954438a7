"""Gradients of a pure loss. Two bodies, one meaning: the functional transform is what compiles and vmaps,
`torch.autograd.grad` on detached leaves is twice as fast in eager mode (docs/engine.md has the measurements)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_training.ops.tree import tree_leaves, tree_map

P = TypeVar("P")


def value_and_grad(loss: Callable[[P], tuple[Tensor, Any]], params: P) -> tuple[Tensor, Any, P]:
    """`(value, aux, gradients)` of `loss(params) -> (value, aux)`, with respect to every leaf of `params`."""
    leaves = tree_leaves(params)
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(leaves[0]):
        grads, (value, aux) = torch.func.grad_and_value(loss, has_aux=True)(params)
        return value, aux, grads
    with torch.enable_grad():
        tracked = tree_map(lambda p: p.detach().requires_grad_(), params)
        value, aux = loss(tracked)
        flat = iter(torch.autograd.grad(value, tree_leaves(tracked)))
    return value.detach(), tree_map(lambda x: x.detach(), aux), tree_map(lambda _: next(flat), tracked)
