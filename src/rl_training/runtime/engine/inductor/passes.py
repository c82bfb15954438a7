"""The rewrite of graphs for the CPU. It changes how a graph computes its results, not the results.

- tanh becomes a rational function: the vectorised library call takes as long as the matrix products of a small policy
  network. Its derivative, 1 - tanh^2, still reads the result.
- A product with few columns is computed transposed: the library's kernels work along rows and are several times slower
  where a row is narrower than their registers. The same goes for a small product whose rows, but not its columns, fill
  registers evenly (the 51 atoms of two actions): its readers then work on rows of the batch, without remainders.
- A bias is added by the kernel that reads the product. The product itself would first copy it to every row.
- Small products become code of the graph (products.py), together with the biases and relus around them (epilogues.py).
- Results that many elements read are computed once and stored (stored.py).
- Intermediate results keep their memory from call to call (intermediates.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.ops.torch_internals import graph_passes
from rl_training.runtime.engine.inductor import epilogues, intermediates, nodes, products, stored
from rl_training.runtime.engine.inductor.nodes import Calls

aten = torch.ops.aten
inductor = graph_passes.required()

# Coefficients of the rational minimax approximation of tanh on [-7.9, 7.9] that Eigen and XLA use (error: a few ulp).
_TANH_LIMIT = 7.90531110763549805
_TANH_ODD = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
             1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_TANH_EVEN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_LANES = 8  # numbers in a register, at least
_FILES = (
    __file__, nodes.__file__, epilogues.__file__, stored.__file__, intermediates.__file__, products.__file__,
    str(intermediates.SOURCE), str(products.SOURCE),
)  # fmt: skip


class CpuRewrites(inductor.CustomGraphPass):  # type: ignore[misc, name-defined]
    """The pass that inductor calls. `uuid` makes cached graphs depend on these files."""

    def __init__(self) -> None:
        self.keeps_intermediates = intermediates.keep_for(CpuRewrites)

    def __call__(self, graph: torch.fx.Graph) -> None:
        call = Calls(graph)
        epilogues.narrow_products(graph, call)
        rules = {aten.tanh.default: _tanh, aten.addmm.default: _addmm, aten.mm.default: _mm, aten.bmm.default: _mm}
        for node in list(graph.nodes):
            rule = rules.get(node.target) if node.op == "call_function" else None
            value = node.meta.get("val")
            if rule is None or node.kwargs or not isinstance(value, Tensor):
                continue
            if value.dtype == torch.float32 and value.device.type == "cpu":
                with graph.inserting_before(node):
                    new = rule(call, node)
                if new is not None:
                    node.replace_all_uses_with(new)
                    graph.erase_node(node)
        epilogues.mark_parts(graph)
        epilogues.fuse_relus(graph, call)
        epilogues.sum_many_rows(graph, call)
        stored.store_shared_results(graph)

    def uuid(self) -> Any:
        settings = f"one thread: {torch.get_num_threads() == 1}, kept: {self.keeps_intermediates}"
        return inductor.get_hash_for_files(_FILES, settings)


def _tanh(call: Calls, node: torch.fx.Node) -> torch.fx.Node:
    x = call(aten.clamp_max.default, call(aten.clamp_min.default, node.args[0], -_TANH_LIMIT), _TANH_LIMIT)
    square = call(aten.mul.Tensor, x, x)

    def polynomial(coefficients: tuple[float, ...]) -> torch.fx.Node:
        total = call(aten.mul.Tensor, square, coefficients[0])
        for coefficient in coefficients[1:-1]:
            total = call(aten.mul.Tensor, call(aten.add.Tensor, total, coefficient), square)
        return call(aten.add.Tensor, total, coefficients[-1])

    return call(aten.div.Tensor, call(aten.mul.Tensor, x, polynomial(_TANH_ODD)), polynomial(_TANH_EVEN))


def _addmm(call: Calls, node: torch.fx.Node) -> torch.fx.Node:
    bias, left, right = node.args
    product = call(aten.mm.default, left, right)
    return call(aten.add.Tensor, _mm(call, product) or product, bias)


def _mm(call: Calls, node: torch.fx.Node) -> torch.fx.Node | None:
    """a b as (b^T a^T)^T where that is faster. The library has a separate kernel for a single column."""
    (rows, columns), (left, right) = node.meta["val"].shape[-2:], node.args
    narrow = columns < 32 and rows >= max(32, 2 * columns)
    uneven = columns > 32 and rows >= 32 and columns % _LANES != 0 and rows % _LANES == 0
    if not narrow and not uneven:
        return _product(call, left, right)
    order = (1, 0) if node.target is aten.mm.default else (0, 2, 1)
    transposed = [call(aten.permute.default, arg, order) for arg in (right, left)]
    product = _product(call, *transposed)
    if product is None and narrow and columns > 1:
        product = call(node.target, *transposed)
    return product and call(aten.permute.default, product, order)


def _product(call: Calls, left: Any, right: Any) -> torch.fx.Node | None:
    if products.is_faster(left.meta["val"], right.meta["val"]):
        return call(products.product, left, right)
    return None
