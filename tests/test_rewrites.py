"""Rewritten graphs compute the same numbers as the operations that they replace."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import batch_for, make_algorithm
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rl_training.algorithms.value.target_rules import take
from rl_training.ops import rng
from rl_training.ops.optim import Optimizer
from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.engine.compiler import compiled

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # the first rewrite asks the C++ compiler what the processor can do
passes = pytest.importorskip("rl_training.runtime.engine.inductor.passes", exc_type=ImportError)
shared_weights = pytest.importorskip("rl_training.runtime.engine.inductor.shared_weights", exc_type=ImportError)
long_sums = pytest.importorskip("rl_training.runtime.engine.inductor.long_sums", exc_type=ImportError)
choices = pytest.importorskip("rl_training.runtime.engine.inductor.choices", exc_type=ImportError)


def rewritten(fn: Any, *inputs: Tensor) -> tuple[torch.fx.GraphModule, Counter[str]]:
    """The operations of `fn` after the rewrite, and how often each occurs."""
    graph = make_fx(fn, tracing_mode="fake")(*inputs)
    passes.CpuRewrites()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_function")


def test_tanh_is_a_rational_function_as_exact_as_the_library() -> None:
    x = torch.cat([torch.linspace(-12.0, 12.0, 2001), torch.linspace(-1e-3, 1e-3, 201), torch.tensor([torch.nan])])
    graph, found = rewritten(torch.tanh, x)
    assert "aten.tanh.default" not in found
    y = graph(x)
    torch.testing.assert_close(y.double(), torch.tanh(x.double()), atol=1e-6, rtol=1e-6, equal_nan=True)
    assert bool((y[:-1].abs() <= 1.0).all())


def test_compiled_tanh_layer_has_the_slopes_of_tanh() -> None:
    """The slope reads the result: nothing is computed twice, and second derivatives are right."""
    layer, x = nn.Tanh(), torch.linspace(-9.0, 9.0, 1001)

    def derivatives(z: Tensor) -> tuple[Tensor, Tensor]:
        def slope(v: Tensor) -> Tensor:
            return torch.func.grad(lambda u: layer(u).sum())(v)

        return slope(z), torch.func.grad(lambda v: slope(v).sum())(z)

    first, second = compiled(derivatives, CPU)(x)
    exact = torch.tanh(x.double())
    torch.testing.assert_close(first.double(), 1.0 - exact**2, atol=2e-6, rtol=0.0)
    torch.testing.assert_close(second.double(), -2.0 * exact * (1.0 - exact**2), atol=4e-6, rtol=0.0)


@pytest.mark.parametrize(
    "shape", [(64, 256, 4), (256, 64, 2), (256, 256, 23), (256, 64, 1), (8, 64, 2), (2, 256, 64), (128, 64, 102)]
)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
def test_products_keep_their_value(shape: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(0)

    def matrix(a: int, b: int, flip: bool) -> Tensor:
        return torch.randn(2, b, a, generator=generator).mT if flip else torch.randn(2, a, b, generator=generator)

    left, right = matrix(rows, inner, transposed[0]), matrix(inner, columns, transposed[1])
    bias = torch.randn(columns, generator=generator)
    for fn, inputs in (
        (torch.mm, (left[0], right[0])),
        (torch.bmm, (left, right)),
        (torch.addmm, (bias, left[0], right[0])),
    ):
        graph, found = rewritten(fn, *inputs)
        assert ("aten.permute.default" in found) == (columns in (1, 2, 4, 23, 102) and rows > 8)
        assert "aten.addmm.default" not in found
        torch.testing.assert_close(graph(*inputs), fn(*inputs), atol=1e-4, rtol=1e-5)


def test_other_types_and_weighted_sums_are_left_alone() -> None:
    double = torch.randn(64, 64, dtype=torch.float64)
    assert set(rewritten(lambda x: torch.tanh(x) @ x[:, :2], double)[1]) >= {"aten.tanh.default", "aten.mm.default"}
    x, bias = torch.randn(64, 64), torch.randn(2)
    _, found = rewritten(lambda a, b: torch.addmm(b, a, a[:, :2], beta=0.5), x, bias)
    assert found["aten.addmm.default"] == 1


def test_numbers_that_many_elements_read_are_stored() -> None:
    grads, norm = torch.randn(2_048), torch.tensor(3.0)
    graph, found = rewritten(lambda g, n: g * torch.clamp(10.0 / (n.sqrt() + 1e-6), max=1.0) + n, grads, norm)
    assert found["rl_training.stored.default"] == 1  # the factor, not the norm, which is in memory already
    torch.testing.assert_close(graph(grads, norm), grads + norm)
    seeds = torch.tensor([3.0, 900.0])
    _, found = rewritten(lambda g, n: g * (10.0 / n)[:, None], grads.view(2, -1), seeds)
    assert found["rl_training.stored.default"] == 1  # one number for each seed of a study, behind a view
    _, found = rewritten(lambda g, n: g * (10.0 / n), grads[:512], norm)
    assert found["rl_training.stored.default"] == 0  # too few readers
    _, found = rewritten(lambda g, n: g * (n + 1.0), grads, norm)
    assert found["rl_training.stored.default"] == 0  # nothing to save


def test_rows_of_a_sample_are_drawn_once_and_compiled_adam_is_adam() -> None:
    adam, width = Optimizer(max_grad_norm=0.5), 1_500
    data, key, params = torch.randn(100, width), rng.key_from_seed(3), torch.randn(2 * width)
    state = {**adam.init(params), "v": torch.rand(2 * width)}

    def sample(key: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        rows = rng.randint(key, (2,), 100)
        return data[rows].flatten(), data[rows, 0] * 2.0

    def step(key: Tensor, data: Tensor, state: dict[str, Tensor], params: Tensor) -> Any:
        grads, first = sample(key, data)
        return first, *adam.update(grads, state, params, 1e-2)

    assert rewritten(sample, key, data)[1]["rl_training.stored.default"] == 1
    fast, plain = compiled(step, CPU)(key, data, state, params), step(key, data, state, params)
    assert torch.equal(fast[0], plain[0])
    torch.testing.assert_close(fast[1:], plain[1:], atol=1e-6, rtol=1e-6)


def test_chosen_actions_are_stored_but_masks_are_not() -> None:
    values, kept, rows = torch.randn(64, 2, 51), torch.randint(2, (500,)).float(), torch.randint(500, (64,))

    def chosen(values: Tensor, kept: Tensor, rows: Tensor) -> Tensor:
        return take(values, kept[rows])  # [64, 51]

    def spread(values: Tensor, kept: Tensor, rows: Tensor) -> Tensor:
        weights = torch.arange(51.0).outer(torch.arange(51.0)).cos()
        return (chosen(values, kept, rows).unsqueeze(-1) * weights).sum(-2)

    graph, _ = rewritten(chosen, values, kept, rows)
    stored = graph.graph.find_nodes(op="call_function", target=torch.ops.rl_training.stored.default)
    assert [tuple(node.meta["val"].shape) for node in stored] == [(64,)]  # the actions, not 64 x 2 masks
    assert rewritten(spread, values, kept, rows)[1]["rl_training.stored.default"] == 2  # and what they choose
    torch.testing.assert_close(compiled(spread, CPU)(values, kept, rows), spread(values, kept, rows))
    assert torch.equal(graph(values, kept, rows), values[torch.arange(64), kept[rows].long()])


def test_sums_over_many_rows_are_products_if_the_matrix_is_stored_anyway() -> None:
    x, weight, y = torch.randn(2, 2_048, 16), torch.randn(2, 16, 40), torch.randn(2, 2_048)

    def gradients(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.bmm(x, weight)
        return hidden.sum(1), (y.unsqueeze(-1) * hidden).sum(1, keepdim=True), (x * x).sum(1)

    graph, found = rewritten(gradients, x, weight, y)
    assert found["rl_training.product.default"] == 3  # for the last sum, the matrix would have to be stored first
    for ours, theirs in zip(graph(x, weight, y), gradients(x, weight, y), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    for ours, theirs in zip(compiled(gradients, CPU)(x, weight, y), gradients(x, weight, y), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


def joined(fn: Any, *inputs: Any) -> tuple[torch.fx.GraphModule, int, int]:
    """The graph with joined products, and the number of products before and after."""

    graph = make_fx(fn, tracing_mode="fake")(*inputs)
    before = count(graph, "mm")
    shared_weights.join_products(graph.graph, "cpu")
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph, before, count(graph, "mm")


def count(graph: torch.fx.GraphModule, name: str) -> int:
    """The number of operations whose name ends like this."""
    return sum(f"{name}.default" in str(n.target) for n in graph.graph.nodes)


def test_products_with_the_same_weights_become_one() -> None:
    generator = torch.Generator().manual_seed(0)
    flat, x, y = (torch.randn(shape, generator=generator) for shape in ((72 + 72,), (5, 8), (5, 8)))

    def forward(flat: Tensor, x: Tensor) -> Tensor:  # two layers with weights that are parts of one vector
        first, second = torch.split(flat, [72, 72])
        return torch.relu(x @ first.view(9, 8)[:8].mT) @ second.view(8, 9)[:, :8]

    def fn(flat: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        near, far = forward(flat, x), forward(flat, y)
        return near, far, forward(flat, far)  # the last one depends on the second: it is not joined

    graph, before, after = joined(fn, flat, x, y)
    assert (before, after) == (6, 4)
    torch.testing.assert_close(graph(flat, x, y), fn(flat, x, y))


def test_biases_and_activations_behind_joined_products_are_joined() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, biases, x, y = (torch.randn(shape, generator=generator) for shape in ((2, 8, 8), (2, 8), (5, 8), (5, 8)))

    def forward(weights: Tensor, biases: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.relu(x @ weights[0] + biases[0]) @ weights[1])

    def fn(weights: Tensor, biases: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        near, far = forward(weights, biases, x), forward(weights, biases, y)
        return near, far, torch.relu(near) + near.mean(0)  # of one half alone

    graph, before, after = joined(fn, weights, biases, x, y)
    assert (before, after) == (4, 2)
    assert (count(graph, "relu"), count(graph, "tanh"), count(graph, "cat")) == (2, 1, 1)
    torch.testing.assert_close(graph(weights, biases, x, y), fn(weights, biases, x, y))


@pytest.mark.parametrize(("name", "seeds"), [("sac", 0), ("sac", 2), ("dqn", 0)])
def test_joined_products_leave_an_update_as_it_was(name: str, seeds: int) -> None:
    algorithm = make_algorithm(name, **({"double": True} if name == "dqn" else {}))
    args: Any = (algorithm.init_state(0), batch_for(algorithm), rng.key_from_seed(3, 9))
    step: Any = algorithm.train_step
    if seeds:
        args = tree_map(lambda x: torch.stack([x] * seeds), args)
        step = torch.vmap(lambda *given: algorithm.train_step(*given)[0])
    leaves = [value for _, value in tree_items(args)]

    def fn(*leaves: Tensor) -> list[Tensor]:
        given = iter(leaves)
        return [value for _, value in tree_items(step(*tree_map(lambda _: next(given), args)))]

    graph, before, after = joined(fn, *leaves)
    assert before - after == 2, "both layers are asked twice"
    torch.testing.assert_close(graph(*leaves), fn(*leaves), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("members", [(), (3,)])
def test_long_sums_are_cut_into_parts(members: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn((*members, 4_096, width), generator=generator) for width in (8, 5))

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return x.mT @ y

    graph = make_fx(gradient, tracing_mode="fake")(x, y)
    long_sums.split_long_sums(graph.graph, "cpu")
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    products = [node for node in graph.graph.nodes if "mm.default" in str(node.target)]
    assert [tuple(node.meta["val"].shape) for node in products] == [(8 * math.prod(members), 8, 5)]
    torch.testing.assert_close(graph(x, y), gradient(x, y), atol=1e-3, rtol=1e-4)


def test_short_sums_and_large_results_stay_one_product() -> None:
    graph = make_fx(torch.matmul, tracing_mode="fake")(torch.zeros(8, 600), torch.zeros(600, 5))
    long_sums.split_long_sums(graph.graph, "cpu")
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"] == ["aten.mm.default"]
    assert long_sums._parts(torch.Size((2_048, 65_536)), torch.Size((65_536, 2_048))) == 1


def test_tiles_of_a_gpus_products() -> None:
    """Large where every multiprocessor gets one, small where most would wait, and never larger than the product."""
    assert choices.tile_for(1, 65_536, 64, 64) == (64, 64, 64, 4)
    assert choices.tile_for(16, 256, 256, 256) == (64, 64, 64, 4)  # 256 tiles
    assert choices.tile_for(2, 256, 256, 256) == (32, 32, 64, 4)  # 32 tiles, so they are cut smaller: 128
    assert choices.tile_for(1, 8, 2, 17) == (16, 16, 32, 4)


def test_which_products_of_a_gpu_are_ours() -> None:
    """Small ones, and those that take as long as their memory; the library multiplies large matrices faster."""
    assert choices.is_ours(2, 256, 256, 256)  # the critics of one seed
    assert not choices.is_ours(16, 256, 256, 256)  # and of eight
    assert choices.is_ours(8, 65_536, 64, 64)
    assert choices.is_ours(256, 256, 256, 23)


@pytest.mark.parametrize(("terms", "results", "split"), [(256, 512, False), (65_536, 64, True), (144_400, 1, True)])
def test_only_long_sums_are_split(terms: int, results: int, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = staticmethod(lambda *_: 7)
    monkeypatch.setattr(choices.names.InductorChoices, "reduction_split_factor", theirs)
    assert choices.GpuChoices.reduction_split_factor(CPU, terms, results, False) == (7 if split else 1)
