"""What is changed in the operations of a graph before it is compiled. The meaning stays the same.

On the CPU:
- tanh becomes a rational function: the vectorised library call costs as much as the matrix products of a small policy
  network. Its derivative, 1 - tanh^2, reads the result as before.
- A product whose result has few columns is computed transposed: the library's kernels work along rows, and are several
  times slower where a row is narrower than their registers. So is a small one whose rows, but not whose columns, fill
  registers evenly (the 51 atoms of two actions): what reads it then works on rows of the batch, without remainders.
- A bias is added by the kernel that reads the product, not by the product: that one would first copy it to every row.
- Small products are code of the graph itself (products.py), with the biases and relus around them (layers.py).
- What many elements read is computed once and stored: inductor would repeat the arithmetic of a scalar (a clipped norm,
  a remainder) for every few elements that it meets, that of sampled rows in every gather, and a gather (the actions of
  a batch) or a choice among a few actions for every atom.
- Intermediate results are kept from call to call (intermediates.py).

On a GPU:
- Products of different inputs with the same weights become one product of all their rows: a policy that is asked about
  two observations of a batch, a network that double Q-learning asks about the next one too. Small products cost what
  starting them costs.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import register_lowering
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V

from rl_training.ops.operations import operation

aten = torch.ops.aten

_stored = operation("stored(Tensor x) -> Tensor", torch.clone, "CompositeExplicitAutograd")


@register_lowering(_stored, type_promotion_kind=None)
def _store(x: Any) -> Any:
    """The same values, in memory of their own, in the order in which they are computed."""
    x.realize()
    _settle(x.data.data)
    return x


def _settle(buffer: Any) -> None:
    """Give a buffer, and before it those that it is computed from, the layout that suits what they read. Inductor
    would do so later, unless somebody takes a view of it before: then its rows become contiguous, whatever it reads."""
    if isinstance(buffer, ir.ComputedBuffer) and isinstance(buffer.layout, ir.FlexibleLayout):
        for name in buffer.get_read_names():
            _settle(V.graph.try_get_buffer(name))
        buffer.decide_layout()


# Coefficients of the rational minimax approximation of tanh on [-7.9, 7.9] that Eigen and XLA use (error: a few ulp).
_TANH_LIMIT = 7.90531110763549805
_TANH_ODD = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
             1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_TANH_EVEN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


class CpuRewrites(CustomGraphPass):
    """The pass that inductor calls; `uuid` makes cached graphs depend on these files."""

    def __init__(self) -> None:
        from rl_training.runtime.engine.inductor import epilogues as layers
        from rl_training.runtime.engine.inductor import (
            intermediates,
            products,  # need a newer torch than graphs for a GPU do
        )

        intermediates.keep(CpuRewrites)
        self.layers = layers
        sources = (intermediates.SOURCE, products.SOURCE)
        self.files = (__file__, intermediates.__file__, layers.__file__, products.__file__, *map(str, sources))

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.layers.narrow_products(graph, _Calls(graph))
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
        self.layers.mark_parts(graph)
        self.layers.fuse_relus(graph, _Calls(graph))
        self.layers.sum_many_rows(graph, _Calls(graph))
        for node in _read_often(graph):
            with graph.inserting_after(node):
                new = graph.call_function(_stored, (node,))
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))

    def uuid(self) -> Any:
        return get_hash_for_files(self.files, f"one thread: {torch.get_num_threads() == 1}")


class GpuRewrites(CustomGraphPass):
    """The pass that inductor calls; `uuid` makes cached graphs depend on this file."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        join_products(graph, "cuda")

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


class _Calls:
    """Adds operations to a graph, each with the tensor that describes its result."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph

    def __call__(self, operation: Any, *args: Any, **options: Any) -> torch.fx.Node:
        node = self.graph.call_function(operation, args, options)
        node.meta["val"] = operation(*torch.fx.map_arg(args, lambda n: n.meta["val"]), **options)
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


_LANES = 8  # numbers that a register holds, at least


def _mm(call: _Calls, node: torch.fx.Node) -> torch.fx.Node | None:
    """a b as (b^T a^T)^T where that is the faster one; for a single column the library has a kernel of its own."""
    (rows, columns), (left, right) = node.meta["val"].shape[-2:], node.args
    narrow = columns < 32 and rows >= max(32, 2 * columns)
    uneven = columns > 32 and rows >= 32 and columns % _LANES != 0 and rows % _LANES == 0
    if not narrow and not uneven:
        return _product(call, left, right)
    order = (1, 0) if node.target is aten.mm.default else (0, 2, 1)
    turned = [call(aten.permute.default, arg, order) for arg in (right, left)]
    product = _product(call, *turned)
    if product is None and narrow and columns > 1:
        product = call(node.target, *turned)
    return product and call(aten.permute.default, product, order)


def _product(call: _Calls, left: Any, right: Any) -> torch.fx.Node | None:
    from rl_training.runtime.engine.inductor.products import product, suits

    return call(product, left, right) if suits(left.meta["val"], right.meta["val"]) else None


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
        for source in map(_behind_masks, node.all_input_nodes):
            if not _is_repeated(source):
                continue
            size = source.meta["val"].numel()
            repeated = value.numel() >= max(_MANY, _EACH * size) and _is_elementwise(node)
            index = node.target in _INDEXING and source.meta["val"].dtype == torch.int64 and size > 1
            if (repeated or (index and _is_elementwise(source))) and _is_dear(source):
                found[source] = None
    return list(found)


def _is_elementwise(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


_FEW = 8  # terms of a sum that inductor writes out
_REDUCTIONS = (aten.sum.dim_IntList, aten.amax.default, aten.argmax.default)


def _is_repeated(node: torch.fx.Node) -> bool:
    """Is this computed anew wherever it is read? Arithmetic, gathers, and reductions of a few elements."""
    if node.target in _REDUCTIONS:
        return bool(node.all_input_nodes[0].meta["val"].numel() <= _FEW * node.meta["val"].numel())
    return _is_elementwise(node) or node.target in _INDEXING


def _behind_views(node: torch.fx.Node) -> torch.fx.Node:
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _behind_masks(node: torch.fx.Node) -> torch.fx.Node:
    """What a comparison with constants compares. Masks are made where they are read: from memory they are slower."""
    node = _behind_views(node)
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.dtype == torch.bool and _is_elementwise(node):
        dear = [x for x in map(_behind_views, node.all_input_nodes) if _is_dear(x)]
        return dear[0] if len(dear) == 1 else node
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
        if _is_repeated(one):
            slow |= not _is_elementwise(one) or one.target.overloadpacket.__name__ in _SLOW  # type: ignore[union-attr]
            left += one.all_input_nodes
        else:
            reads |= one.op != "call_function" or bool(one.all_input_nodes)  # not arange, full, ...
    return reads and (slow or len(seen) >= _LONG)


# --- products with the same weights ----------------------------------------------------------------------------------

_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_JOINED_AT_MOST = 1 << 20  # numbers in the joined input: beyond that the product itself is what takes the time
# Operations that only name a part of a tensor: two of them with the same arguments are the same weights.
_PARTS = (
    operator.getitem, aten.split_with_sizes.default, aten.view.default, aten.reshape.default, aten.permute.default,
    aten.t.default, aten.transpose.int, aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default,
)  # fmt: skip
_SAME = (aten.detach.default, aten.alias.default)


def join_products(graph: torch.fx.Graph, device: str) -> None:
    """Products of the first such pair become one, until there is none left."""
    while (pair := _same_weights(graph, device)) is not None:
        first, second = pair
        with graph.inserting_before(second):
            call = _Calls(graph)
            args: Any = first.args
            *bias, left, right = args
            rows = left.meta["val"].shape[-2]
            product = call(first.target, *bias, call(aten.cat.default, [left, second.args[-2]], -2), right)
            dim = product.meta["val"].dim() - 2
            parts = [
                call(aten.slice.Tensor, product, dim, start, stop)
                for start, stop in ((0, rows), (rows, product.meta["val"].shape[dim]))
            ]
        for node, part in zip(pair, parts):
            node.replace_all_uses_with(part)
            graph.erase_node(node)
        stable_topological_sort(graph)  # what used the first product stands before the joined one


def _same_weights(graph: torch.fx.Graph, device: str) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The first two products of one right-hand side, neither of which needs the other."""
    found: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.target not in _PRODUCTS or not isinstance(value, Tensor) or value.device.type != device:
            continue
        *bias, left, right = node.args
        shape = left.meta["val"].shape
        wide = any(b.meta["val"].shape[-2:-1] not in ((), (1,)) for b in bias)  # it has rows of its own
        if wide or node.kwargs or 2 * shape.numel() > _JOINED_AT_MOST:
            continue
        key = (node.target, shape, value.dtype, _identity(right), _identity(bias))
        earlier = found.setdefault(key, node)
        if earlier is not node and not _needs(node, earlier):
            return earlier, node
    return None


def _identity(node: Any) -> Any:
    """Equal for what is the same part of the same tensor."""
    while isinstance(node, torch.fx.Node) and node.target in _SAME:
        node = node.args[0]
    if isinstance(node, torch.fx.Node) and node.target in _PARTS:
        return (node.target, *(_identity(arg) for arg in node.args))
    if isinstance(node, (list, tuple)):
        return tuple(_identity(x) for x in node)
    return node


def _needs(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Is `other` among what `node` is computed from?"""
    open_nodes, seen = [node], set()
    while open_nodes:
        current = open_nodes.pop()
        if current is other:
            return True
        if current not in seen:
            seen.add(current)
            open_nodes.extend(current.all_input_nodes)
    return False
