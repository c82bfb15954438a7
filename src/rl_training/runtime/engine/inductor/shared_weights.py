"""The rewrites for GPUs: long sums are cut into parts (long_sums.py), and products of different inputs with the same
weights become one product of all their rows.

Examples of the second are a policy that is applied to two observations of a batch, and a network that double Q-learning
also applies to the next observation. A small product takes about as long as launching its kernel.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from rl_training.ops.torch_internals import graph_passes
from rl_training.runtime.engine.inductor import long_sums, nodes
from rl_training.runtime.engine.inductor.nodes import Calls

aten = torch.ops.aten
inductor = graph_passes.required()

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
    """The pass that inductor calls. `uuid` makes cached graphs depend on these files."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        join_products(graph, "cuda")
        long_sums.split_long_sums(graph, "cuda")

    def uuid(self) -> Any:
        return inductor.get_hash_for_files((__file__, nodes.__file__, long_sums.__file__))


def join_products(graph: torch.fx.Graph, device: str) -> None:
    """Join the first pair of such products, until there are none left."""
    while (pair := _same_weights(graph, device)) is not None:
        first, second = pair
        with graph.inserting_before(second):
            call = Calls(graph)
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
        inductor.stable_topological_sort(graph)  # the joined product must come before the users of the first


def _same_weights(graph: torch.fx.Graph, device: str) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The first two products with the same right factor that do not depend on each other."""
    found: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.target not in _PRODUCTS or not isinstance(value, Tensor) or value.device.type != device:
            continue
        *bias, left, right = node.args
        shape = left.meta["val"].shape
        has_rows = any(b.meta["val"].shape[-2:-1] not in ((), (1,)) for b in bias)  # a bias for every row
        if has_rows or node.kwargs or 2 * shape.numel() > _MAX_JOINED:
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
