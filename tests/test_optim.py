"""Functional optimisers against torch.optim; gradient clipping, target updates and schedules."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rl_training.ops.optim import Optimizer, clip_by_norm, periodic, polyak
from rl_training.ops.schedules import Positive, Schedule

REFERENCE = {
    "adam": lambda p, wd: torch.optim.Adam([p], lr=3e-3, eps=1e-5, weight_decay=wd),
    "adamw": lambda p, wd: torch.optim.AdamW([p], lr=3e-3, eps=1e-5, weight_decay=wd),
    "rmsprop": lambda p, wd: torch.optim.RMSprop([p], lr=3e-3, alpha=0.999, eps=1e-5, weight_decay=wd),
    "sgd": lambda p, wd: torch.optim.SGD([p], lr=3e-3, weight_decay=wd),
}


@pytest.mark.parametrize("max_grad_norm", [None, 0.7])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", REFERENCE)
def test_fifty_steps_equal_torch(kind: str, weight_decay: float, max_grad_norm: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    start = torch.randn(40, generator=g)
    ours, theirs = start.clone(), start.clone().requires_grad_()
    optimizer = Optimizer(kind=kind, eps=1e-5, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    state, reference = optimizer.init(ours), REFERENCE[kind](theirs, weight_decay)
    for i in range(50):
        gradient = torch.randn(40, generator=g) * 10.0 ** (i % 5 - 3)
        theirs.grad = gradient.clone()
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_([theirs], max_grad_norm)
        reference.step()
        before = {k: v.clone() for k, v in state.items()}
        new, new_state = optimizer.update(gradient, state, ours, 3e-3)
        assert all(torch.equal(before[k], state[k]) for k in state), "the old state must stay as it was"
        ours, state = new, new_state
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(ours, start)
    assert float(state["count"]) == 50


def test_learning_rate_may_be_a_tensor() -> None:
    optimizer, p, g = Optimizer(), torch.ones(3), torch.ones(3)
    a = optimizer.update(g, optimizer.init(p), p, 0.1)[0]
    assert torch.equal(a, optimizer.update(g, optimizer.init(p), p, torch.tensor(0.1))[0])


def test_clip_by_norm() -> None:
    g = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(clip_by_norm(g, 1.0), torch.tensor([0.6, 0.8]), rtol=1e-6, atol=1e-6)
    assert torch.equal(clip_by_norm(g, 10.0), g)
    assert clip_by_norm(g, None) is g
    assert clip_by_norm(g, 0.0) is g
    assert torch.equal(clip_by_norm(torch.zeros(2), 1.0), torch.zeros(2))


def test_target_updates() -> None:
    target, params = torch.tensor([0.0, 10.0]), torch.tensor([1.0, 0.0])
    torch.testing.assert_close(polyak(target, params, 0.1), torch.tensor([0.1, 9.0]))
    assert polyak(target, params, 1.0) is params
    for step in range(1, 9):
        moved = periodic(target, params, torch.tensor(step), 4)
        assert torch.equal(moved, params if step in (4, 8) else target)
    torch.testing.assert_close(periodic(target, params, torch.tensor(3), 1, 0.5), torch.tensor([0.5, 5.0]))


def value(schedule: Schedule, progress: float) -> float:
    return float(schedule(torch.tensor(progress)))


def test_schedule_values() -> None:
    assert Schedule(start=0.3)(torch.tensor(0.5)) == 0.3
    linear = Schedule(kind="linear", start=1.0, end=0.2)
    assert [value(linear, p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 0.8, 0.6, 0.2])
    early = Schedule(kind="linear", start=1.0, end=0.0, fraction=0.5)
    assert [value(early, p) for p in (0.25, 0.5, 0.9)] == pytest.approx([0.5, 0.0, 0.0], abs=1e-6)
    cosine = Schedule(kind="cosine", start=1.0, end=0.1)
    assert [value(cosine, p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(
        [1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 0.55, 0.1]
    )
    warm = Schedule(kind="linear", start=1.0, end=0.0, warmup=0.2)
    assert [value(warm, p) for p in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0], abs=1e-6)
    flat = Schedule(start=2.0, warmup=0.5)
    assert [value(flat, p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.0, 1.0, 2.0, 2.0])


def test_schedules_are_parsed_and_validated() -> None:
    parse = TypeAdapter(Positive).validate_python
    assert parse(3e-4) == Schedule(start=3e-4)
    assert parse("0.001") == Schedule(start=1e-3)
    assert parse("lin_0.001") == Schedule(kind="linear", start=1e-3, end=0.0)
    assert parse({"kind": "cosine", "start": 0.1, "warmup": 0.1}).kind == "cosine"
    never = {"kind": "linear", "start": 1.0, "warmup": 0.5, "fraction": 0.3}  # ends before the warm-up does
    bad_kinds = ({"kind": "linear", "start": 1.0, "end": -1.0}, {"kind": "step", "start": 1.0}, {"kind": "linear"})
    for bad in (-1.0, True, "fast", [1.0], math.inf, "nan", never, *bad_kinds):
        with pytest.raises(ValidationError):
            parse(bad)
    for given in (3e-4, {"kind": "linear", "start": 0.1, "end": 0.01, "fraction": 1.0, "warmup": 0.1}):
        dumped = parse(given).model_dump(mode="json")
        assert dumped == given
        assert parse(dumped) == parse(given)
