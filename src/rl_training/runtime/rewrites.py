"""What is changed in the operations of a graph before it is compiled for the CPU. The meaning stays the same.

- tanh becomes a rational function: the vectorised library call costs as much as the matrix products of a small policy
  network. Its derivative, 1 - tanh^2, reads the result as before.
- A product whose result has few columns is computed transposed: the library's kernels work along rows, and are several
  times slower where a row is narrower than their registers.
- A bias is added by the kernel that reads the product, not by the product: that one would first copy it to every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten

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

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


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
        return None
    order = (1, 0) if node.target is aten.mm.default else (0, 2, 1)
    left, right = (call(aten.permute.default, arg, order) for arg in node.args)
    return call(aten.permute.default, call(node.target, right, left), order)
