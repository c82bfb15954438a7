"""Operations around a product of a graph for the CPU that the product can do itself (products.h) or that can be left
out.

- A bias and a relu, and the slope of a relu in the gradient: otherwise each is a separate pass over memory.
- Columns that nobody reads: of the gradient of critics with respect to their inputs, only the actions' part is used.
- Parts of a gradient that are zero: it reaches only the outputs of the action taken.
- Sums over many rows of a matrix (the gradients of a bias, and of the weights of a single output) become products with
  one row: inductor adds up a few columns at a time and reads the whole matrix each time.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_training.runtime.engine.inductor.nodes import Calls
from rl_training.runtime.engine.inductor.products import product, relu_layer, relu_slope

aten = torch.ops.aten
MIN_ROWS = 32  # products.h computes fewer rows in another way, which gains nothing here
MIN_PART_WIDTH = 16  # columns of a part of a matrix that is worth leaving out
MANY_ROWS = 1_024  # a matrix that does not fit into the caches

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_REORDERED = (aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default)
_RESHAPES = (aten.reshape.default, aten.view.default, aten.squeeze.dim)


def narrow_products(graph: torch.fx.Graph, call: Calls) -> None:
    """Compute only the columns of a product that are read."""
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        chain = _path_to_product(node)
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


def _path_to_product(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes between a slice of columns and the product that they come from, and that product. Empty if there is no
    such product or something else reads it. Between them, the members of an ensemble may be added up and their axis
    removed."""
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


def fuse_relus(graph: torch.fx.Graph, call: Calls) -> None:
    """Make one operation of relu(a b + bias), and of a b masked by where the result of a relu is positive."""
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
    if not _has_one_reader(source) or not isinstance(bias, torch.fx.Node):
        return None
    *members, _, columns = source.meta["val"].shape
    fits = bias.meta["val"].shape in ((*members, 1, columns), *([(columns,)] if not members else []))
    return (relu_layer, source, bias) if fits else None


def _slope(node: torch.fx.Node) -> Any:
    if node.target is not aten.where.self:
        return None
    condition: Any = node.args[0]
    zero: Any = node.args[1]
    source: Any = node.args[2]
    if condition.target is not aten.le.Scalar or condition.args[1] != 0 or zero.target is not aten.full.default:
        return None
    result = condition.args[0]
    if zero.args[1] != 0 or not _has_one_reader(source) or result.meta["val"].shape != source.meta["val"].shape:
        return None
    return relu_slope, source, result


def _has_one_reader(node: Any) -> bool:
    """Is this a product that nothing else reads?"""
    if not isinstance(node, torch.fx.Node) or node.target is not product or len(node.users) > 1:
        return False
    return bool(node.meta["val"].shape[-2] >= MIN_ROWS)


def mark_parts(graph: torch.fx.Graph) -> None:
    """Mark products with the gradient of a choice (the atoms of the action taken): it is zero for all other parts."""
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
            if parts > 1 and width >= MIN_PART_WIDTH and parts * width in size[-2:]:
                node.kwargs = {"parts": parts}


def sum_many_rows(graph: torch.fx.Graph, call: Calls) -> None:
    """Make a product of the sum of the rows of x, or of y x with a number y for each row, if x is stored for another
    product anyway."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        factor, matrix = _row_sum(node)
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


def _row_sum(node: torch.fx.Node) -> Any:
    """(the number for each row or None, the matrix) of such a sum; (None, None) for any other sum."""
    x: Any = node.args[0]
    value = x.meta["val"]
    if value.dim() not in (2, 3) or value.dtype != torch.float32 or value.device.type != "cpu" or node.kwargs:
        return None, None
    if node.args[1] not in ([value.dim() - 2], [-2]) or value.shape[-2] < MANY_ROWS:
        return None, None
    if _is_stored(x):
        return None, x
    if x.target is aten.mul.Tensor:
        for factor, matrix in (x.args, x.args[::-1]):
            both = isinstance(factor, torch.fx.Node) and isinstance(matrix, torch.fx.Node)
            if both and _is_stored(matrix) and factor.meta["val"].shape == (*value.shape[:-1], 1):
                return factor, matrix
    return None, None


def _is_stored(node: torch.fx.Node) -> bool:
    kinds = (*_PRODUCTS, product, relu_layer, relu_slope)
    return node.target in kinds or any(user.target in kinds for user in node.users)
