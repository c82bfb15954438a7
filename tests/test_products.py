"""Products as code of the graph (products.h), and intermediate results that keep their memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from rl_training.algorithms.value.target_rules import take
from rl_training.runtime.engine.compiler import CPU_GRAPHS_SINCE, compiled, torch_version

pytestmark = pytest.mark.skipif(torch_version() < CPU_GRAPHS_SINCE, reason="graphs of an older torch are not rewritten")

CPU = torch.device("cpu")
passes = pytest.importorskip("rl_training.runtime.engine.inductor.passes", exc_type=ImportError)
PRODUCTS = [  # rows, terms, columns, left transposed?, right transposed? Whole blocks and remainders of each kind
    (12, 16, 32, False, False), (7, 130, 17, False, True), (13, 5, 40, True, False), (2, 19, 9, False, True),
    (1, 8, 24, False, False), (64, 3, 5, True, True), (5, 1, 10, False, True), (33, 12, 1, False, False),
    (1_030, 9, 16, False, False), (1_100, 20, 24, False, True),
]  # fmt: skip


def matrix(rows: int, columns: int, flip: bool, generator: torch.Generator) -> Tensor:
    """A part of a larger matrix, so that it has an offset."""
    size = (columns, rows) if flip else (rows, columns)
    inner = torch.randn(size[0] + 1, *size[1:], generator=generator)[1:]
    return inner.mT if flip else inner


def hidden_layers(x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Results that are a buffer, a view of a buffer, a part of one, or stored in the memory of another."""
    hidden = torch.relu(x @ weights)
    joined = torch.cat([hidden, 2.0 * hidden])
    return {
        "buffer": hidden @ weights,
        "view": (hidden.softmax(-1) @ weights)[2:].mT,
        "part": joined[3:],
        "reused": torch.tanh((hidden - 1.0) @ weights),
        "sum": joined.sum(0),
        "sorted": 2.0 * torch.sort(joined[1:, 3:9] - 1.0, dim=0).values,  # a library operation on a part
    }


@pytest.mark.slow
def test_products_of_every_size_and_layout_and_results_that_the_caller_keeps() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [
        (matrix(rows, terms, left, generator), matrix(terms, columns, right, generator))
        for rows, terms, columns, left, right in PRODUCTS
    ]
    shared = torch.randn(7, 12, generator=generator).expand(3, 7, 12)  # the same matrix for every member
    given.append((shared, torch.randn(3, 18, 12, generator=generator).mT))
    weights = torch.randn(16, 16, generator=generator)
    inputs = [torch.randn(8, 16, generator=generator) for _ in range(3)]

    def fn(given: list[tuple[Tensor, Tensor]], x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        return [left @ right for left, right in given], hidden_layers(x, weights)

    graph = torch.no_grad()(compiled(fn, CPU))
    results = [graph(given, x) for x in inputs]  # no call may overwrite the results of the previous one
    for x, (products, layers) in zip(inputs, results, strict=True):
        for got, (left, right) in zip(products, given, strict=True):
            torch.testing.assert_close(got.double(), left.double() @ right.double(), atol=2e-5, rtol=1e-5)
        for name, value in hidden_layers(x, weights).items():
            torch.testing.assert_close(layers[name], value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.slow
def test_gradients_of_the_action_taken_leave_out_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, pull = (torch.randn(shape, generator=generator) for shape in ((40, 48), (3, 17, 48), (40, 17)))
    actions = torch.randint(2, (40,), generator=generator)  # the third one is never taken
    pull[5] = 0.0  # a row without any gradient

    def gradients(x: Tensor, weight: Tensor, actions: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            values = torch.nn.functional.linear(torch.relu(x), weight.flatten(0, 1)).view(40, 3, 17)
            return (take(values, actions) * pull).sum()

        return torch.func.grad(loss, (0, 1))(x, weight)

    graph = make_fx(gradients, tracing_mode="fake")(x, weight, actions, pull)
    passes.CpuRewrites()(graph.graph)
    assert [node.kwargs["parts"] for node in graph.graph.nodes if "parts" in node.kwargs] == [3, 3]
    fast = compiled(gradients, CPU)
    for given in (pull, torch.zeros_like(pull)):
        got, exact = fast(x, weight, actions, given), gradients(x, weight, actions, given)
        torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)


def gradients(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Any:
    """Two layers with relu."""

    def loss(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        return (torch.relu(torch.relu(x @ w1 + b1) @ w2 + b2) ** 2).sum()

    return torch.func.grad_and_value(loss, argnums=(0, 1, 2, 3))(x, w1, b1, w2)


@pytest.mark.slow
def test_relus_are_part_of_the_products_and_rows_of_zeros_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one network and of an ensemble, with remainders in every dimension; then large products, as in the
    gradient of the lower of two critics, where each row is nonzero in only one of them."""
    found: Counter[str] = Counter()
    ordinary = passes.CpuRewrites.__call__

    def rewrite(self: Any, graph: torch.fx.Graph) -> None:
        ordinary(self, graph)
        graph.eliminate_dead_code()
        found.update(str(node.target) for node in graph.nodes)

    monkeypatch.setattr(passes.CpuRewrites, "__call__", rewrite)
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    networks = [  # a second layer has more terms than products.h adds at a time
        (normal(37, 5), normal(300, 5).mT, normal(300), normal(300, 21), normal(21)),
        (normal(2, 33, 9), normal(2, 9, 17), normal(2, 1, 17), normal(2, 35, 17).mT, normal(2, 1, 35)),
    ]
    weights, result = normal(200, 170), normal(130, 170)

    def fn(networks: list[tuple[Tensor, ...]], left: Tensor, weights: Tensor, result: Tensor) -> Any:
        slope = torch.where(result <= 0, 0.0, (2.0 * left) @ weights)
        return [gradients(*layers) for layers in networks], left @ weights, slope

    graph = torch.no_grad()(compiled(fn, CPU))
    with fresh_cache():  # a graph from the cache would not be rewritten
        graph(networks, torch.zeros(130, 200), weights, result)
    for live in (0, 1, 13, 77, 111, 130):  # from 98 on, all rows are multiplied
        rows, left = torch.randperm(130, generator=generator)[:live], torch.zeros(130, 200)
        left[rows] = normal(live, 200)
        left[rows, :150] = 0.0  # a row may begin with zeros
        layers, plain, slope = graph(networks, left, weights, result)
        exact = left.double() @ weights.double()
        torch.testing.assert_close(plain.double(), exact, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(slope.double(), torch.where(result <= 0, 0.0, 2.0 * exact), atol=2e-4, rtol=1e-5)
    for got, network in zip(layers, networks, strict=True):
        grads, value = gradients(*(x.double() for x in network))
        for x, y in zip((*got[0], got[1]), (*grads, value), strict=True):
            torch.testing.assert_close(x.double(), y, atol=2e-3, rtol=2e-5)
    assert (found["rl_training.relu_layer.default"], found["rl_training.relu_slope.default"]) == (4, 3)


def test_columns_that_nobody_reads_are_not_computed() -> None:
    generator = torch.Generator().manual_seed(2)
    grads, weights = torch.randn(2, 64, 40, generator=generator), torch.randn(2, 40, 23, generator=generator)

    def fn(grads: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = torch.bmm(grads, weights).sum([0], keepdim=True).reshape(64, 23)
        whole = torch.mm(grads[0], weights[0])
        return inputs[:, 17:], torch.mm(grads[1], weights[1])[:, 3:9], whole[:, 2:] + whole.sum()

    from rl_training.runtime.engine.inductor.epilogues import narrow_products

    graph = make_fx(fn, tracing_mode="fake")(grads, weights)
    narrow_products(graph.graph, passes.Calls(graph.graph))
    graph.recompile()
    products = [n for n in graph.graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)]
    assert sorted(n.meta["val"].shape[-1] for n in products) == [6, 6, 23]  # the last one is also read as a whole
    torch.testing.assert_close(graph(grads, weights), fn(grads, weights), atol=1e-5, rtol=1e-5)


def test_intermediate_results_are_allocated_once() -> None:
    from rl_training.runtime.engine.inductor.intermediates import _kept

    made = "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, a, b, f32, cpu, 0, &buf7_handle));"
    named = "RAIIAtenTensorHandle buf7(buf7_handle);"
    kept = _kept(made, named, "buf7", 4)
    assert kept is not None
    first, code = kept
    assert made.replace("_handle", "_kept") in first
    assert first.startswith("static thread_local AtenTensorHandle buf7_kept")
    assert code == "rl_training::Kept buf7(buf7_kept, buf7_data, 4);"
    assert _kept("buf7.reset();", named, "buf7", 4) is None
    assert _kept(made, "RAIIAtenTensorHandle buf7(buf7_handle_restrided);", "buf7", 4) is None
