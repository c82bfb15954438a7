"""Recurrent loops: the same numbers as a loop written out, as one operation, over seeds, and with a compiled step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_training.ops import pieces as module
from rl_training.ops.grad import pullback
from rl_training.ops.pieces import compiled_pieces
from rl_training.ops.scan import register_step, scan
from rl_training.runtime.engine import recorder
from rl_training.runtime.engine.compiler import compiler_available
from rl_training.runtime.engine.executor import Executor

T, B, D = 5, 3, 4
NAME = "test_ops_scan: a state, and how often it was changed"


def step(weights: list[torch.Tensor], state: list[torch.Tensor], row: list[torch.Tensor]) -> list[torch.Tensor]:
    (weight,), (x, count), (added, keep) = weights, state, row
    return [torch.tanh((x * keep) @ weight) + added, count + 1]


@pytest.fixture
def given() -> Any:
    register_step(NAME, step)
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(D, D, generator=g)]
    start = [torch.randn(B, D, generator=g), torch.zeros(B, dtype=torch.int64)]
    rows = [torch.randn(T, B, D, generator=g), torch.randint(0, 2, (T, B, 1), generator=g).float()]
    return weights, start, rows


def by_hand(weights: Any, start: Any, rows: Any, reverse: bool) -> list[torch.Tensor]:
    x, found = start[0], [torch.empty(0)] * T
    for t in range(T - 1, -1, -1) if reverse else range(T):
        found[t] = x = torch.tanh((x * rows[1][t]) @ weights[0]) + rows[0][t]
    counts = torch.arange(T, 0, -1) if reverse else torch.arange(1, T + 1)
    return [torch.stack(found), counts.unsqueeze(-1).expand(T, B)]


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_equals_a_loop(given: Any, reverse: bool) -> None:
    torch.testing.assert_close(scan(NAME, *given, reverse=reverse), by_hand(*given, reverse))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_under_vmap_equals_a_loop_per_seed(given: Any, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and rows of each seed its own, the start common to all."""
    monkeypatch.setattr(module, "_compile", lambda fn: fn)
    monkeypatch.setattr(module, "_compiled", {})
    weights, start, rows = given
    seeds = [([weights[0] * s], start, [rows[0] + s, rows[1]]) for s in (1.0, 0.5)]
    both = ([torch.stack([s[0][0] for s in seeds])], start, [torch.stack([s[2][0] for s in seeds]), rows[1]])

    def run(weight: torch.Tensor, added: torch.Tensor) -> list[torch.Tensor]:
        return scan(NAME, [weight], start, [added, rows[1]], reverse=reverse)

    with compiled_pieces():
        torch.testing.assert_close(run(seeds[0][0][0], seeds[0][2][0]), by_hand(*seeds[0], reverse))
        found = torch.vmap(run)(both[0][0], both[2][0])
    for i, one in enumerate(seeds):
        torch.testing.assert_close([x[i] for x in found], by_hand(*one, reverse))


@pytest.mark.slow
@pytest.mark.skipif(not compiler_available(), reason="needs a C++ compiler")
def test_compiled_scan_in_a_recorded_function_equals_a_loop(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "RECORD_AFTER", 2)
    weights, start, rows = given
    spread = torch.zeros(B, 2 * D)
    spread[:, ::2] = start[0]
    start = [spread[:, ::2], start[1]]  # not contiguous, as parts of a larger tensor are

    def fn(tree: dict[str, Any]) -> list[torch.Tensor]:
        return scan(NAME, tree["weights"], tree["start"], tree["rows"])

    run = Executor("compile", torch.device("cpu")).wrap(fn, dict, whole=False)
    before, tree = len(module._compiled), {"weights": weights, "start": start, "rows": rows}
    for _ in range(4):  # the second call is recorded, later ones come from the recording
        torch.testing.assert_close(run(tree), by_hand(weights, start, rows, False))
    assert run.run is not None
    assert len(module._compiled) == before + 1


def test_pullback_is_the_transposed_derivative() -> None:
    x, direction = torch.randn(D), torch.randn(D)
    out, aux, pull = pullback(lambda x: (x.sin(), x.sum()), x)
    torch.testing.assert_close((out, aux), (x.sin(), x.sum()))
    torch.testing.assert_close(pull(direction), x.cos() * direction)
    mapped = torch.vmap(lambda x, v: pullback(lambda y: ((y.sin(), y * y), ()), x)[2]((v, v)))
    rows, directions = torch.randn(2, D), torch.randn(2, D)
    torch.testing.assert_close(mapped(rows, directions), (rows.cos() + 2.0 * rows) * directions)
