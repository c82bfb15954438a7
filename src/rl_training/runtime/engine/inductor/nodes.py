"""How rewrites read a graph and add operations to it."""

from __future__ import annotations

from typing import Any

import torch


class Calls:
    """Adds operations to a graph, each with the fake tensor that describes its result."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph

    def __call__(self, operation: Any, *args: Any, **options: Any) -> torch.fx.Node:
        node = self.graph.call_function(operation, args, options)
        node.meta["val"] = operation(*torch.fx.map_arg(args, lambda n: n.meta["val"]), **options)
        return node


def is_elementwise(node: torch.fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def without_views(node: torch.fx.Node) -> torch.fx.Node:
    """The result that a node is a view of, or the node itself."""
    while getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node
