"""Results that many elements read are computed once and stored.

Inductor would repeat their arithmetic: that of a scalar (a clipped norm, a remainder) for every few elements that read
it, that of sampled row numbers in every gather, and a gather (the actions of a batch) or a choice between a few actions
for every atom.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_training.ops.operations import operation
from rl_training.ops.torch_internals import lowering
from rl_training.runtime.engine.inductor.nodes import is_elementwise, without_views

aten = torch.ops.aten
inductor = lowering.required()

_MIN_READERS = 1_024  # elements that read a stored tensor, at least
_MIN_READERS_EACH = 16  # the same for each element of it
_INDEXING = (aten.index.Tensor, aten.gather.default)
_REDUCTIONS = (aten.sum.dim_IntList, aten.amax.default, aten.argmax.default)
_UNROLLED = 8  # inductor writes out sums of up to so many terms
_SLOW = {"div", "reciprocal", "sqrt", "rsqrt", "pow", "exp", "log", "remainder", "tanh", "sigmoid"}
_MANY_OPERATIONS = 6

_stored = operation("stored(Tensor x) -> Tensor", torch.clone, "CompositeExplicitAutograd")


@inductor.register_lowering(_stored, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _store(x: Any) -> Any:
    """The same values in memory of their own, in the order in which they are computed."""
    x.realize()
    _fix_layout(x.data.data)
    return x


def _fix_layout(buffer: Any) -> None:
    """Give a buffer, and first those that it is computed from, the layout that suits what they read. Inductor does so
    later, but a view taken before that would force contiguous rows on the buffer whatever it reads."""
    ir = inductor.ir
    if isinstance(buffer, ir.ComputedBuffer) and isinstance(buffer.layout, ir.FlexibleLayout):
        for name in buffer.get_read_names():
            _fix_layout(inductor.V.graph.try_get_buffer(name))
        buffer.decide_layout()


def store_shared_results(graph: torch.fx.Graph) -> None:
    for node in _worth_storing(graph):
        with graph.inserting_after(node):
            new = graph.call_function(_stored, (node,))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))


def _worth_storing(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    found: dict[torch.fx.Node, None] = {}  # in order
    for node in graph.nodes:
        value = node.meta.get("val")
        if not is_elementwise(node) and node.target not in _INDEXING:
            continue
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            continue
        for source in map(_without_masks, node.all_input_nodes):
            if not _is_recomputed(source):
                continue
            size = source.meta["val"].numel()
            shared = value.numel() >= max(_MIN_READERS, _MIN_READERS_EACH * size) and is_elementwise(node)
            index = node.target in _INDEXING and source.meta["val"].dtype == torch.int64 and size > 1
            if (shared or (index and is_elementwise(source))) and _is_expensive(source):
                found[source] = None
    return list(found)


def _is_recomputed(node: torch.fx.Node) -> bool:
    """Does inductor compute this again for every reader? Arithmetic, gathers, and reductions of a few elements."""
    if node.target in _REDUCTIONS:
        return bool(node.all_input_nodes[0].meta["val"].numel() <= _UNROLLED * node.meta["val"].numel())
    return is_elementwise(node) or node.target in _INDEXING


def _without_masks(node: torch.fx.Node) -> torch.fx.Node:
    """The input of a comparison with constants. A mask is computed where it is read: reading it from memory is
    slower."""
    node = without_views(node)
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.dtype == torch.bool and is_elementwise(node):
        expensive = [x for x in map(without_views, node.all_input_nodes) if _is_expensive(x)]
        return expensive[0] if len(expensive) == 1 else node
    return node


def _is_expensive(node: torch.fx.Node) -> bool:
    """Does it take a slow operation, or many, to compute this from what is in memory? Constants do not count: inductor
    folds them."""
    seen: set[torch.fx.Node] = set()
    left, slow, reads = [node], False, False
    while left:
        one = without_views(left.pop())
        if one in seen:
            continue
        seen.add(one)
        if _is_recomputed(one):
            slow |= not is_elementwise(one) or one.target.overloadpacket.__name__ in _SLOW  # type: ignore[union-attr]
            left += one.all_input_nodes
        else:
            reads |= one.op != "call_function" or bool(one.all_input_nodes)  # not arange, full, ...
    return reads and (slow or len(seen) >= _MANY_OPERATIONS)
