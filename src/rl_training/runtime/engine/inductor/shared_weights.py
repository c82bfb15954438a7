"""The rewrites for GPUs: long sums are cut into parts (long_sums.py), and products of different inputs with the same
weights become one product of all their rows.

Examples of the second are a policy that is applied to two observations of a batch, and a network that double Q-learning
also applies to the next observation. A small product takes about as long as launching its kernel. The biases and
activations behind such products are joined as well, so that the kernel of the product can apply them.
"""

from __future__ import annotations

import itertools
import operator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.ops.torch_internals import graph_passes
from rl_training.runtime.engine.inductor import long_sums, nodes
from rl_training.runtime.engine.inductor.nodes import Calls

aten = torch.ops.aten
inductor = graph_passes.required()

_FILES = (__file__, nodes.__file__, long_sums.__file__, str(Path(__file__).with_name("choices.py")))
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_MAX_JOINED = 1 << 20  # elements of the joined input: in larger products the arithmetic takes most of the time
# Operations that select a part of a tensor: with equal arguments they select the same weights.
_PARTS = (
    operator.getitem, aten.split_with_sizes.default, aten.view.default, aten.reshape.default, aten.permute.default,
    aten.t.default, aten.transpose.int, aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default,
)  # fmt: skip
_ALIASES = (aten.detach.default, aten.alias.default)


class GpuRewrites(inductor.CustomGraphPass):  # type: ignore[misc, name-defined]
    """The pass that inductor calls. `uuid` makes cached graphs depend on these files and on the choice of
    kernels."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        join_products(graph, "cuda")
        long_sums.split_long_sums(graph, "cuda")

    def uuid(self) -> Any:
        return inductor.get_hash_for_files(_FILES)


def join_products(graph: torch.fx.Graph, device: str) -> None:
    """Join the first pair of such products, until there are none left."""
    while (pair := _same_weights(graph, device)) is not None:
        first, second = pair
        args: Any = first.args
        *bias, left, right = args
        other: Any = second.args[-2]
        with graph.inserting_before(second):
            call = Calls(graph)
            inputs = _whole(left, other) or call(aten.cat.default, [left, other], -2)
            halves = _halves(call, call(first.target, *bias, inputs, right))
        _replace(graph, pair, halves)
        inductor.stable_topological_sort(graph)  # the joined product must come before the users of the first
        while (pair := _same_activation(*halves)) is not None:
            with graph.inserting_before(pair[0]):
                args = (halves[0].args[0] if arg is halves[0] else arg for arg in pair[0].args)
                halves = _halves(Calls(graph), Calls(graph)(pair[0].target, *args))
            _replace(graph, pair, halves)
            inductor.stable_topological_sort(graph)


Pair = tuple[torch.fx.Node, torch.fx.Node]


def _halves(call: Calls, joined: torch.fx.Node) -> Pair:
    """The two halves of the rows of a joined result."""
    shape = joined.meta["val"].shape
    dim, rows = len(shape) - 2, shape[-2] // 2
    return call(aten.slice.Tensor, joined, dim, 0, rows), call(aten.slice.Tensor, joined, dim, rows, 2 * rows)


def _replace(graph: torch.fx.Graph, old: Pair, new: Pair) -> None:
    for node, half in zip(old, new):
        node.replace_all_uses_with(half)
        graph.erase_node(node)


def _whole(first: torch.fx.Node, second: torch.fx.Node) -> torch.fx.Node | None:
    """The joined result whose halves these are."""
    whole: Any = first.args[0] if first.args else None
    if isinstance(whole, torch.fx.Node) and isinstance(whole.meta.get("val"), Tensor):
        *_, rows, _ = shape = (1, *whole.meta["val"].shape)
        halves = [(whole, len(shape) - 3, start, start + rows // 2) for start in (0, rows // 2)]
        if [node.args for node in (first, second) if node.target is aten.slice.Tensor] == halves:
            return whole
    return None


def _same_activation(first: torch.fx.Node, second: torch.fx.Node) -> Pair | None:
    """The same function of both halves of a joined result, such as a bias or an activation."""
    for one, other in itertools.product(first.users, second.users):
        if one.target is other.target and nodes.is_elementwise(one) and not one.kwargs and not other.kwargs:
            pairs = list(zip(one.args, other.args))
            if all((x is first and y is second) or _is_same_row(x, y) for x, y in pairs):
                return one, other
    return None


def _is_same_row(one: Any, other: Any) -> bool:
    """Are both the same value for every row?"""
    alike: bool = _identity(one) == _identity(other)
    return alike and not (isinstance(one, torch.fx.Node) and _has_rows(one))


def _has_rows(node: torch.fx.Node) -> bool:
    return node.meta["val"].shape[-2:-1] not in ((), (1,))


def _same_weights(graph: torch.fx.Graph, device: str) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The first two products with the same right factor that do not depend on each other."""
    found: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.target not in _PRODUCTS or not isinstance(value, Tensor) or value.device.type != device:
            continue
        *bias, left, right = node.args
        shape = left.meta["val"].shape
        if any(map(_has_rows, bias)) or node.kwargs or 2 * shape.numel() > _MAX_JOINED:
            continue
        key = (node.target, shape, value.dtype, _identity(right), _identity(bias))
        earlier = found.setdefault(key, node)
        if earlier is not node and not _depends_on(node, earlier):
            return earlier, node
    return None


def _identity(node: Any) -> Any:
    """Equal for equal parts of the same tensor."""
    while isinstance(node, torch.fx.Node) and node.target in _ALIASES:
        node = node.args[0]
    if isinstance(node, torch.fx.Node) and node.target in _PARTS:
        return (node.target, *(_identity(arg) for arg in node.args))
    if isinstance(node, (list, tuple)):
        return tuple(_identity(x) for x in node)
    return node


def _depends_on(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    left, seen = [node], set()
    while left:
        current = left.pop()
        if current is other:
            return True
        if current not in seen:
            seen.add(current)
            left.extend(current.all_input_nodes)
    return False
