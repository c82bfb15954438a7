"""What surrounds a product of a graph for the CPU and can be left to it (products.h), or left out.

- A bias and a relu, and the slope of a relu in the gradient: passes over memory of their own otherwise.
- Columns that nobody reads: the gradient of critics with respect to their inputs is wanted for the actions only.
- Parts of a gradient that are zero: it reaches the outputs of the action taken only.
- Sums over many rows of a matrix (the gradients of a bias, and of the weights of a single output) are products with one
  row: inductor takes them a few columns at a time, and goes through the whole matrix each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_training.runtime.engine.inductor.products import product, relu_layer, relu_slope

aten = torch.ops.aten
Call = Callable[..., torch.fx.Node]
LEAST_ROWS = 32  # fewer rows are sums of another kind in products.h, and nothing to gain
LEAST_WIDTH = 16  # of parts of a matrix that are worth leaving out
MANY_ROWS = 1_024  # a matrix that the caches do not hold

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_REORDERED = (aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default)
_RESHAPES = (aten.reshape.default, aten.view.default, aten.squeeze.dim)


def narrow_products(graph: torch.fx.Graph, call: Call) -> None:
    """Columns of a product are the product with these columns."""
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        chain = _up_to_product(node)
        if not chain:
            continue
        source: Any = chain.pop()
        with graph.inserting_before(node):
            right = call(aten.slice.Tensor, source.args[1], source.meta["val"].dim() - 1, *node.args[2:])
            new = call(source.target, source.args[0], right)
            for step in reversed(chain):
                is_sum = step.target is aten.sum.dim_IntList
                new = call(step.target, new, *step.args[1:]) if is_sum else call(aten.squeeze.dim, new, 0)
        node.replace_all_uses_with(new)
        for old in (node, *chain, source):
            graph.erase_node(old)


def _up_to_product(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What stands between some columns and the product they are of, and that product; nothing where there is none, or
    it has other uses. On the way the members of an ensemble may be added, and the axis of them taken away."""
    chain: list[torch.fx.Node] = []
    source: Any = node.args[0]
    if node.args[1] != source.meta["val"].dim() - 1 or len(node.args) > 4:
        return []
    while len(source.users) == 1:
        chain.append(source)
        if source.target in _PRODUCTS:
            return chain
        before: Any = source.args[0] if source.args else None
        adds = source.target is aten.sum.dim_IntList and source.args[1] == [0]
        if not adds and not (source.target in _RESHAPES and (1, *source.meta["val"].shape) == before.meta["val"].shape):
            return []
        source = before
    return []


def fuse_relus(graph: torch.fx.Graph, call: Call) -> None:
    """relu(a b + bias), and a b where the result of a relu is positive."""
    for node in list(graph.nodes):
        found = _layer(node) or _slope(node)
        if found is None:
            continue
        operation, source, other = found
        with graph.inserting_before(node):
            new = call(operation, *source.args, other, **source.kwargs)
        node.replace_all_uses_with(new)


def _layer(node: torch.fx.Node) -> Any:
    if node.target is not aten.relu.default:
        return None
    add: Any = node.args[0]
    if add.target is not aten.add.Tensor or len(add.users) > 1 or add.kwargs:
        return None
    source, bias = add.args
    if not _alone(source) or not isinstance(bias, torch.fx.Node):
        return None
    *members, _, columns = source.meta["val"].shape
    suits = bias.meta["val"].shape in ((*members, 1, columns), *([(columns,)] if not members else []))
    return (relu_layer, source, bias) if suits else None


def _slope(node: torch.fx.Node) -> Any:
    if node.target is not aten.where.self:
        return None
    condition: Any = node.args[0]
    zero: Any = node.args[1]
    source: Any = node.args[2]
    if condition.target is not aten.le.Scalar or condition.args[1] != 0 or zero.target is not aten.full.default:
        return None
    result = condition.args[0]
    if zero.args[1] != 0 or not _alone(source) or result.meta["val"].shape != source.meta["val"].shape:
        return None
    return relu_slope, source, result


def _alone(node: Any) -> bool:
    """Is it a product that nobody else reads?"""
    if not isinstance(node, torch.fx.Node) or node.target is not product or len(node.users) > 1:
        return False
    return bool(node.meta["val"].shape[-2] >= LEAST_ROWS)


def mark_parts(graph: torch.fx.Graph) -> None:
    """The gradient of values that were chosen among several (the atoms of the action taken) is zero for the others."""
    for node in graph.find_nodes(op="call_function", target=product):
        left: Any = node.args[0]
        size = left.meta["val"].shape
        while left.target in _REORDERED:
            left = left.args[0]
        if left.target is not aten.where.self:
            continue
        chosen, value = left.args[0].meta["val"], left.meta["val"]
        if value.dim() >= 3 and chosen.dim() == value.dim() and chosen.shape[-1] == 1:
            parts, width = value.shape[-2:]
            if parts > 1 and width >= LEAST_WIDTH and parts * width in size[-2:]:
                node.kwargs = {"parts": parts}


def sum_many_rows(graph: torch.fx.Graph, call: Call) -> None:
    """The sum of the rows of x, or of y x with a number y for each row, where x is in memory for a product anyway."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        factor, matrix = _rows_added(node)
        if matrix is None:
            continue
        value = matrix.meta["val"]
        *members, rows, _ = value.shape
        with graph.inserting_before(node):
            if factor is None:
                with value.fake_mode:
                    left = call(aten.full.default, [*members, 1, rows], 1.0, dtype=value.dtype, device=value.device)
            else:
                left = call(aten.view.default, factor, [*members, 1, rows])
            new = call(product, left, matrix)
            if node.meta["val"].dim() != value.dim():
                new = call(aten.squeeze.dim, new, value.dim() - 2)
        node.replace_all_uses_with(new)


def _rows_added(node: torch.fx.Node) -> Any:
    """(number for each row or None, matrix) of such a sum; (None, None) where it is another one."""
    x: Any = node.args[0]
    value = x.meta["val"]
    if value.dim() not in (2, 3) or value.dtype != torch.float32 or value.device.type != "cpu" or node.kwargs:
        return None, None
    if node.args[1] not in ([value.dim() - 2], [-2]) or value.shape[-2] < MANY_ROWS:
        return None, None
    if _in_memory(x):
        return None, x
    if x.target is aten.mul.Tensor:
        for factor, matrix in (x.args, x.args[::-1]):
            both = isinstance(factor, torch.fx.Node) and isinstance(matrix, torch.fx.Node)
            if both and _in_memory(matrix) and factor.meta["val"].shape == (*value.shape[:-1], 1):
                return factor, matrix
    return None, None


def _in_memory(node: torch.fx.Node) -> bool:
    kinds = (*_PRODUCTS, product, relu_layer, relu_slope)
    return node.target in kinds or any(user.target in kinds for user in node.users)
