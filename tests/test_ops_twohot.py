from __future__ import annotations

import math

import pytest
import torch

from rl_training.ops import twohot

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_symlog_symexp_values_and_round_trip() -> None:
    x = torch.tensor([-1000.0, -1.0, 0.0, 1e-6, 1.0, 1e6], dtype=torch.float64)
    expected = [math.copysign(math.log1p(abs(v)), v) for v in x.tolist()]
    torch.testing.assert_close(twohot.symlog(x), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(twohot.symexp(twohot.symlog(x)), x)


@pytest.mark.parametrize("function", [twohot.symlog, twohot.symexp])
def test_symlog_and_symexp_have_slope_one_at_zero(function) -> None:
    gradient = torch.vmap(torch.func.grad(function))(torch.tensor([0.0, 1.0, -1.0]))
    away = 0.5 if function is twohot.symlog else math.e
    torch.testing.assert_close(gradient, torch.tensor([1.0, away, away]))
    x = torch.tensor(0.0, requires_grad=True)
    assert torch.autograd.grad(function(x), x)[0].item() == 1.0


def test_twohot_with_uneven_bins_matches_hand_computed_values() -> None:
    bins = torch.tensor([-1.0, 0.0, 4.0])
    x = torch.tensor([[-5.0, -1.0, -0.25], [0.0, 1.0, 9.0]])
    expected = [[[1, 0, 0], [1, 0, 0], [0.25, 0.75, 0]], [[0, 1, 0], [0, 0.75, 0.25], [0, 0, 1]]]
    assert twohot.twohot_encode(x, bins).tolist() == expected


def test_twohot_round_trip_over_dreamer_bins() -> None:
    bins = twohot.symexp_bins()
    assert bins.shape == (255,)
    assert bins[127].item() == 0.0
    assert bins[-1].item() == pytest.approx(math.expm1(20.0), rel=1e-5)
    x = twohot.symexp(torch.linspace(-19.9, 19.9, 1001))
    encoded = twohot.twohot_encode(x, bins)
    assert (encoded.sum(-1) == 1.0).all()
    assert ((encoded > 0).sum(-1) <= 2).all()
    assert (encoded >= 0).all()
    torch.testing.assert_close(twohot.twohot_decode(encoded, bins), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [255, 254])
def test_uniform_head_predicts_exactly_zero(n: int) -> None:
    bins = twohot.symexp_bins(n)
    uniform = torch.zeros(3, n).softmax(-1)
    assert twohot.twohot_decode(uniform, bins).tolist() == [0.0, 0.0, 0.0]


def test_twohot_vmap_equals_loop() -> None:
    bins, x = twohot.symexp_bins(21, 3.0), torch.randn(4, 6) * 5
    batched = torch.vmap(twohot.twohot_encode, in_dims=(0, None))(x, bins)
    assert torch.equal(batched, torch.stack([twohot.twohot_encode(row, bins) for row in x]))


def test_value_rescale_matches_hand_computed_values() -> None:
    x = torch.tensor([0.0, 3.0, -8.0, 99.0])
    torch.testing.assert_close(twohot.value_rescale(x), torch.tensor([0.0, 1.003, -2.008, 9.099]))


@pytest.mark.parametrize("eps", [1e-3, 1e-2])
def test_value_rescale_inverse_round_trip(eps: float) -> None:
    x = torch.cat((torch.linspace(-1e-3, 1e-3, 21), torch.linspace(-1e4, 1e4, 2001)))
    # float32 throughout: the textbook formula is off by 1e-4 here
    round_trip = twohot.value_rescale_inverse(twohot.value_rescale(x, eps), eps)
    torch.testing.assert_close(round_trip, x, rtol=2e-6, atol=1e-9)
    y = torch.linspace(-50, 50, 101, dtype=torch.float64)
    root = (1 + 4 * eps * (y.abs() + 1 + eps)).sqrt()
    textbook = y.sign() * (((root - 1) / (2 * eps)) ** 2 - 1)  # Pohlen 2018, Proposition A.2
    torch.testing.assert_close(twohot.value_rescale_inverse(y, eps), textbook)


def test_value_rescale_slopes_are_reciprocal() -> None:
    x = torch.tensor([-4.0, 0.0, 0.5, 30.0], dtype=torch.float64)
    slope = torch.vmap(torch.func.grad(twohot.value_rescale))(x)
    inverse_slope = torch.vmap(torch.func.grad(twohot.value_rescale_inverse))(twohot.value_rescale(x))
    torch.testing.assert_close(slope * inverse_slope, torch.ones_like(x))
