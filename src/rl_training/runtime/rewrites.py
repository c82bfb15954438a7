"""What is changed in the operations of a graph before it is compiled for the CPU. The meaning stays the same.

- tanh becomes a rational function: the vectorised library call costs as much as the matrix products of a small policy
  network. Its derivative, 1 - tanh^2, reads the result as before.
- A product whose result has few columns is computed transposed: the library's kernels work along rows, and are several
  times slower where a row is narrower than their registers.
- A bias is added by the kernel that reads the product, not by the product: that one would first copy it to every row.
- Small products are code of the graph itself (products.py).
- What many elements read is computed once and stored: inductor would repeat the arithmetic of a scalar (a clipped norm,
  a remainder) for every few elements that it meets, and that of sampled rows in every gather.

Where the results are put is changed too: intermediates.py.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import register_lowering

from rl_training.runtime import intermediates, products

aten = torch.ops.aten

_library = torch.library.Library("rl_training", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("stored(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("stored", torch.clone, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_stored = torch.ops.rl_training.stored.default


@register_lowering(_stored, type_promotion_kind=None)
def _store(x: Any) -> Any:
    """The same values, in memory of their own."""
    x.realize()
    return x


# Coefficients of the rational minimax approximation of tanh on [-7.9, 7.9] that Eigen and XLA use (error: a few ulp).
_TANH_LIMIT = 7.90531110763549805
_TANH_ODD = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
             1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_TANH_EVEN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


class CpuRewrites(CustomGraphPass):
    """The pass that inductor calls; `uuid` makes cached graphs depend on this file."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        rules = {aten.tanh.default: _tanh, aten.addmm.default: _addmm, aten.mm.default: _mm, aten.bmm.default: _mm}
        for node in list(graph.nodes):
            rule = rules.get(node.target) if node.op == "call_function" else None
            value = node.meta.get("val")
            if rule is None or node.kwargs or not isinstance(value, Tensor):
                continue
            if value.dtype == torch.float32 and value.device.type == "cpu":
                with graph.inserting_before(node):
                    new = rule(_Calls(graph), node)
                if new is not None:
                    node.replace_all_uses_with(new)
                    graph.erase_node(node)
        for node in _read_often(graph):
            with graph.inserting_after(node):
                new = graph.call_function(_stored, (node,))
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))

    def uuid(self) -> Any:
        files = (__file__, intermediates.__file__, products.__file__, str(products.SOURCE))
        return get_hash_for_files(files, f"one thread: {products.one_thread()}")


intermediates.keep(lambda: isinstance(config.post_grad_custom_post_pass, CpuRewrites))


class _Calls:
    """Adds operations to a graph, each with the tensor that describes its result."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph

    def __call__(self, operation: Any, *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(operation, args)
        node.meta["val"] = operation(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        return node


def _tanh(call: _Calls, node: torch.fx.Node) -> torch.fx.Node:
    x = call(aten.clamp_max.default, call(aten.clamp_min.default, node.args[0], -_TANH_LIMIT), _TANH_LIMIT)
    square = call(aten.mul.Tensor, x, x)

    def polynomial(coefficients: tuple[float, ...]) -> torch.fx.Node:
        total = call(aten.mul.Tensor, square, coefficients[0])
        for coefficient in coefficients[1:-1]:
            total = call(aten.mul.Tensor, call(aten.add.Tensor, total, coefficient), square)
        return call(aten.add.Tensor, total, coefficients[-1])

    return call(aten.div.Tensor, call(aten.mul.Tensor, x, polynomial(_TANH_ODD)), polynomial(_TANH_EVEN))


def _addmm(call: _Calls, node: torch.fx.Node) -> torch.fx.Node:
    bias, left, right = node.args
    product = call(aten.mm.default, left, right)
    return call(aten.add.Tensor, _mm(call, product) or product, bias)


def _mm(call: _Calls, node: torch.fx.Node) -> torch.fx.Node | None:
    """a b as (b^T a^T)^T where that is the faster one; a single column has a kernel of its own."""
    rows, columns = node.meta["val"].shape[-2:]
    if not (1 < columns < 32 and rows >= max(32, 2 * columns)):
        return _product(call, node.target, *node.args)
    order = (1, 0) if node.target is aten.mm.default else (0, 2, 1)
    left, right = (call(aten.permute.default, arg, order) for arg in node.args)
    product = _product(call, node.target, right, left) or call(node.target, right, left)
    return call(aten.permute.default, product, order)


def _product(call: _Calls, operation: Any, left: Any, right: Any) -> torch.fx.Node | None:
    if not products.suits(left.meta["val"], right.meta["val"]):
        return None
    return call(products.product, left, right)


_MANY = 1_024  # elements that read a number, for it to be worth storing
_EACH = 16  # of them to each number, at least
_INDEXING = (aten.index.Tensor, aten.gather.default)
_LONG = 6  # operations


def _read_often(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Results of elementwise arithmetic that should be stored, in order."""
    found: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not _is_elementwise(node) and node.target not in _INDEXING:
            continue
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            continue
        for source in map(_behind_views, node.all_input_nodes):
            if not _is_elementwise(source):
                continue
            size = source.meta["val"].numel()
            repeated = value.numel() >= max(_MANY, _EACH * size) and _is_elementwise(node)
            index = node.target in _INDEXING and source.meta["val"].dtype == torch.int64 and size > 1
            if (repeated or index) and _is_dear(source):
                found[source] = None
    return list(found)


def _is_elementwise(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _behind_views(node: torch.fx.Node) -> torch.fx.Node:
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


_SLOW = {"div", "reciprocal", "sqrt", "rsqrt", "pow", "exp", "log", "remainder", "tanh", "sigmoid"}


def _is_dear(node: torch.fx.Node) -> bool:
    """Does this result take a slow operation, or many, from what is in memory? Constants are not: they are folded."""
    seen: set[torch.fx.Node] = set()
    left, slow, reads = [node], False, False
    while left:
        one = _behind_views(left.pop())
        if one in seen:
            continue
        seen.add(one)
        if _is_elementwise(one):
            slow |= one.target.overloadpacket.__name__ in _SLOW  # type: ignore[union-attr]
            left += one.all_input_nodes
        else:
            reads |= one.op != "call_function" or bool(one.all_input_nodes)  # not arange, full, ...
    return reads and (slow or len(seen) >= _LONG)
