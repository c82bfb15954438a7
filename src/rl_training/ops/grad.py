"""Gradients of a pure loss, with two implementations of each function. The `torch.func` transform works under compile
and vmap. In eager mode, `torch.autograd.grad` on detached leaves is twice as fast (measured in docs/engine.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_training.ops.torch_internals import is_wrapped
from rl_training.ops.tree import tree_leaves, tree_map

P = TypeVar("P")
Outcome = tuple[Any, Any, Any]  # (value, aux, gradients)
_exchange: Callable[[Callable[[], Outcome]], Outcome] | None = None


@contextmanager
def gradient_exchange(exchange: Callable[[Callable[[], Outcome]], Outcome]) -> Iterator[None]:
    """Within this context, `exchange(compute)` decides what a gradient is: it may average the outcome of `compute()`
    over processes, keep it, or return another one. In eager mode only: a graph would not call it again."""
    global _exchange
    previous, _exchange = _exchange, exchange
    try:
        yield
    finally:
        _exchange = previous


def value_and_grad(loss: Callable[[P], tuple[Tensor, Any]], params: P) -> tuple[Tensor, Any, P]:
    """`(value, aux, gradients)` of `loss(params) -> (value, aux)`, with respect to every leaf of `params`."""
    if _transformed(tree_leaves(params)[0]):
        grads, (value, aux) = torch.func.grad_and_value(loss, has_aux=True)(params)
        return value, aux, grads

    def compute() -> Outcome:
        with torch.enable_grad():
            tracked = tree_map(lambda p: p.detach().requires_grad_(), params)
            value, aux = loss(tracked)
            flat = iter(torch.autograd.grad(value, tree_leaves(tracked)))
        return value.detach(), tree_map(lambda x: x.detach(), aux), tree_map(lambda _: next(flat), tracked)

    return compute() if _exchange is None else _exchange(compute)


def pullback(fn: Callable[[P], tuple[Any, Any]], params: P) -> tuple[Any, Any, Callable[[Any], P]]:
    """`(out, aux, pull)` of `fn(params) -> (out, aux)`. `pull` maps a gradient with respect to `out` to the gradient
    with respect to `params`; call it once."""
    if _transformed(tree_leaves(params)[0]):
        result: Any = torch.func.vjp(fn, params, has_aux=True)
        out, pull, aux = result
        return out, aux, lambda grads: pull(grads)[0]
    with torch.enable_grad():
        tracked = tree_map(lambda p: p.detach().requires_grad_(), params)
        out, aux = fn(tracked)

    def back(grads: Any) -> P:
        flat = iter(torch.autograd.grad(tree_leaves(out), tree_leaves(tracked), tree_leaves(grads)))
        found = tree_map(lambda _: next(flat), tracked)
        return found if _exchange is None else _exchange(lambda: (None, None, found))[2]

    return tree_map(lambda x: x.detach(), out), tree_map(lambda x: x.detach(), aux), back


def hessian_product(fn: Callable[[Tensor], Tensor], params: Tensor) -> Callable[[Tensor], Tensor]:
    """`v -> H v` for the Hessian of the scalar `fn` at the vector `params`. The gradient's graph is built only once."""
    if _transformed(params):
        pull: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(torch.func.grad(fn), params)[1]
        return lambda vector: pull(vector)[0]  # H is symmetric
    with torch.enable_grad():
        tracked = params.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(fn(tracked), tracked, create_graph=True)
    return lambda vector: torch.autograd.grad(gradient, tracked, vector, retain_graph=True)[0]


def _transformed(x: Tensor) -> bool:
    """Whether `x` is under `torch.compile`, `vmap` or another functional transform."""
    return torch.compiler.is_compiling() or is_wrapped(x)
