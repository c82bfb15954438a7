"""Products with long sums and few results are cut into parts, whose sums are added.

The gradient of a layer's weights sums over all rows of a minibatch, tens of thousands of them, and has as many elements
as the layer has weights. The library gives each of its thread blocks a tile of the result: a layer of 64 x 64 for eight
seeds is eight blocks, and the other 124 multiprocessors wait.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl_training.runtime.engine.inductor.nodes import Calls

aten = torch.ops.aten

_TILE = 64  # rows and columns of a result that one thread block computes
_BLOCKS = 264  # blocks that keep a GPU busy: two for each multiprocessor of the largest
_MIN_TERMS = 512  # of a part: in shorter ones, reading the parts again costs as much as it gains
_PRODUCTS = (aten.mm.default, aten.bmm.default)


def split_long_sums(graph: torch.fx.Graph, device: str) -> None:
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.target in _PRODUCTS and not node.kwargs and isinstance(value, Tensor) and value.device.type == device:
            left, right = node.args
            parts = _parts(left.meta["val"].shape, right.meta["val"].shape)
            if parts > 1:
                with graph.inserting_before(node):
                    new = _sum_of_parts(Calls(graph), left, right, parts)
                node.replace_all_uses_with(new)
                graph.erase_node(node)


def _parts(left: torch.Size, right: torch.Size) -> int:
    """How many parts of equal length the sums are cut into."""
    rows, terms, columns = left[-2], left[-1], right[-1]
    blocks = math.prod(left[:-2]) * -(-rows // _TILE) * -(-columns // _TILE)
    most = min(_BLOCKS // blocks, terms // _MIN_TERMS)
    return next((parts for parts in range(most, 1, -1) if terms % parts == 0), 1)


def _sum_of_parts(call: Calls, left: Any, right: Any, parts: int) -> torch.fx.Node:
    """The sum over `parts` products of matrices. Both factors keep their memory: their rows are only counted anew."""
    *batch, rows, terms = left.meta["val"].shape
    members, columns = math.prod(batch), right.meta["val"].shape[-1]
    left = call(aten.reshape.default, left, (members, rows, parts, terms // parts))
    left = call(aten.permute.default, left, (0, 2, 1, 3))
    left = call(aten.reshape.default, left, (members * parts, rows, terms // parts))
    right = call(aten.reshape.default, right, (members * parts, terms // parts, columns))
    product = call(aten.reshape.default, call(aten.bmm.default, left, right), (*batch, parts, rows, columns))
    return call(aten.sum.dim_IntList, product, [len(batch)])
