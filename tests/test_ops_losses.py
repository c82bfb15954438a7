from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rl_training.ops import losses

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_weighted_mean_handles_importance_weights_and_masks() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert losses.weighted_mean(x, torch.ones(4)).item() == 2.5
    assert losses.weighted_mean(x, torch.full((4,), 0.5)).item() == 1.25  # not renormalised: the step halves
    assert losses.weighted_mean(x, torch.tensor([1.0, 0.0, 1.0, 0.0])).item() == 2.0  # not 1.0: masked rows don't count
    assert losses.weighted_mean(x, torch.tensor([0.5, 0.0, 1.0, 0.0])).item() == 1.75
    assert losses.weighted_mean(x, torch.zeros(4)).item() == 0.0


def test_weighted_mean_gradient_is_zero_for_masked_rows() -> None:
    weights = torch.tensor([2.0, 0.0, 1.0])
    gradient = torch.func.grad(losses.weighted_mean)(torch.randn(3), weights)
    assert gradient.tolist() == [1.0, 0.0, 0.5]


def test_weighted_mean_rejects_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"loss has shape \(4, 1\), but weights has \(4,\)"):
        losses.weighted_mean(torch.zeros(4, 1), torch.ones(4))


def test_weighted_mean_counts_rows_per_seed_under_vmap() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    weights = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert torch.vmap(losses.weighted_mean)(x, weights).tolist() == [1.0, 4.0]


def test_weighted_normalise_uses_the_unbiased_std_of_the_counted_rows() -> None:
    x = torch.randn(32, generator=torch.Generator().manual_seed(0)).double() * 3 + 5
    plain = (x - x.mean()) / (x.std() + 1e-8)
    torch.testing.assert_close(losses.weighted_normalise(x, torch.ones(32).double()), plain)
    torch.testing.assert_close(losses.weighted_normalise(x, torch.full((32,), 0.25).double()), plain)
    keep = torch.arange(32) < 20
    masked = losses.weighted_normalise(x, keep.double())[keep]
    torch.testing.assert_close(masked, (x[keep] - x[keep].mean()) / (x[keep].std() + 1e-8))


def test_weighted_normalise_of_one_row_and_of_none() -> None:
    x = torch.tensor([3.0, 7.0])
    assert losses.weighted_normalise(x, torch.tensor([1.0, 0.0]))[0].item() == 0.0
    assert losses.weighted_normalise(x, torch.zeros(2)).isfinite().all()


@pytest.mark.parametrize("delta", [0.5, 1.0, 2.0])
def test_huber_and_its_gradient_match_torch(delta: float) -> None:
    error = torch.linspace(-4, 4, 41).double()
    torch.testing.assert_close(
        losses.huber(error, delta), F.huber_loss(error, torch.zeros_like(error), delta=delta, reduction="none")
    )
    gradient = torch.func.grad(lambda e: losses.huber(e, delta).sum())(error)
    torch.testing.assert_close(gradient, error.clamp(-delta, delta))


def test_expectile_loss_values_and_minimiser() -> None:
    assert losses.expectile_loss(torch.tensor([2.0, -2.0]), 0.75).tolist() == [3.0, 1.0]
    # at the minimiser, tau * E[(x - m)+] = (1 - tau) * E[(m - x)+]; for {0, 1} that is m = tau
    data = torch.tensor([0.0, 1.0], dtype=torch.float64)
    slope = torch.func.grad(lambda m: losses.expectile_loss(data - m, 0.7).sum())
    assert slope(torch.tensor(0.7, dtype=torch.float64)).abs().item() < 1e-12
    assert slope(torch.tensor(0.5, dtype=torch.float64)).item() < -0.1


def test_mse_is_per_sample() -> None:
    assert losses.mse(torch.tensor([3.0, -2.0])).tolist() == [9.0, 4.0]
