from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import integrate, stats

from rl_training.ops import quantiles

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_quantile_midpoints() -> None:
    assert quantiles.quantile_midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_quantile_huber_matches_hand_computed_values() -> None:
    predicted, target = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 3.0, -1.0]])
    taus = torch.tensor([0.25, 0.75])
    # u = target - predicted:  tau .25: .5, 3, -1 -> huber .125, 2.5, .5;  tau .75: -.5, 2, -2 -> .125, 1.5, 1.5
    first = (0.25 * 0.125 + 0.25 * 2.5 + 0.75 * 0.5) / 3
    second = (0.25 * 0.125 + 0.75 * 1.5 + 0.25 * 1.5) / 3
    loss = quantiles.quantile_huber(predicted, target, taus)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(first + second, rel=1e-6)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 2.0])
def test_quantile_huber_equals_the_loop_over_pairs(kappa: float) -> None:
    g = torch.Generator().manual_seed(0)
    predicted, target = torch.randn(3, 2, 4, generator=g) * 2, torch.randn(3, 2, 5, generator=g) * 2
    taus = torch.rand(3, 2, 4, generator=g)
    actual = quantiles.quantile_huber(predicted, target, taus, kappa)
    for a in range(3):
        for b in range(2):
            total = 0.0
            for i in range(4):
                for j in range(5):
                    u = float(target[a, b, j] - predicted[a, b, i])
                    if kappa == 0.0:
                        size = abs(u)
                    else:
                        size = (0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)) / kappa
                    total += abs(float(taus[a, b, i]) - (u < 0)) * size / 5
            assert actual[a, b].item() == pytest.approx(total, rel=1e-5)


def test_small_kappa_approaches_the_plain_quantile_loss() -> None:
    predicted, target, taus = torch.randn(7, 4), torch.randn(7, 6), torch.rand(4)
    near = quantiles.quantile_huber(predicted, target, taus, 1e-4)
    torch.testing.assert_close(near, quantiles.quantile_huber(predicted, target, taus, 0.0), atol=1e-3, rtol=0)


def test_descending_the_loss_finds_the_quantiles() -> None:
    target = torch.tensor(stats.norm.ppf((torch.arange(2000).numpy() + 0.5) / 2000), dtype=torch.float32)
    taus = quantiles.quantile_midpoints(5)
    theta = torch.zeros(5)
    gradient = torch.func.grad(lambda q: quantiles.quantile_huber(q, target, taus, 0.0))
    for _ in range(400):
        theta = theta - 0.2 * gradient(theta)
    expected = torch.tensor(stats.norm.ppf(taus.numpy()), dtype=torch.float32)
    torch.testing.assert_close(theta, expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_quantile_huber_gradient_is_the_derivative(kappa: float) -> None:
    """The hand-written derivative against finite differences of the value, in double precision."""
    g = torch.Generator().manual_seed(1)
    predicted, target = torch.randn(3, 4, generator=g).double() * 2, torch.randn(3, 5, generator=g).double() * 2
    taus, weights = torch.rand(4, generator=g).double(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def total(q: torch.Tensor) -> torch.Tensor:
        return (weights * quantiles.quantile_huber(q, target, taus, kappa)).sum()

    gradient = torch.func.grad(total)(predicted)
    for i, j in itertools.product(range(3), range(4)):
        step = torch.zeros_like(predicted)
        step[i, j] = 1e-6
        slope = (total(predicted + step) - total(predicted - step)) / 2e-6
        assert gradient[i, j].item() == pytest.approx(slope.item(), abs=1e-6)


def test_shares_act_like_repeated_targets() -> None:
    predicted, target, taus = torch.randn(6, 4), torch.randn(6, 3), torch.rand(6, 4)
    shares = torch.tensor([0.5, 0.2, 0.3]).expand(6, 3)
    repeated = target.repeat_interleave(torch.tensor([5, 2, 3]), -1)

    def value_and_gradient(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        q = predicted.clone().requires_grad_()
        loss = quantiles.quantile_huber(q, *args)  # type: ignore[arg-type]
        return loss.detach(), torch.autograd.grad(loss.sum(), q)[0]

    expected = value_and_gradient(repeated, taus, 1.0)
    for actual, other in zip(value_and_gradient(target, taus, 1.0, shares), expected):
        torch.testing.assert_close(actual, other)


def test_quantile_huber_vmap_equals_loop() -> None:
    predicted, target, taus = torch.randn(3, 8, 4), torch.randn(3, 8, 5), torch.rand(3, 8, 4)
    batched = torch.vmap(quantiles.quantile_huber)(predicted, target, taus)
    looped = torch.stack([quantiles.quantile_huber(p, t, f) for p, t, f in zip(predicted, target, taus)])
    torch.testing.assert_close(batched, looped)


def test_cosine_features_start_at_frequency_zero() -> None:
    features = quantiles.cosine_embedding_features(torch.tensor([[0.25, 1.0]]), 4)
    assert features.shape == (1, 2, 4)
    expected = [[math.cos(math.pi * i * tau) for i in range(4)] for tau in (0.25, 1.0)]
    torch.testing.assert_close(features[0], torch.tensor(expected), atol=1e-6, rtol=0)


def test_fqf_gradient_is_the_derivative_of_the_wasserstein_distance() -> None:
    inverse_cdf = stats.norm(1.0, 2.0).ppf
    taus = [0.0, 0.15, 0.4, 0.75, 1.0]

    def wasserstein(inner: list[float]) -> float:
        """W1 between Z and its staircase with Z(tau_hat_i) on [tau_i, tau_{i+1}]."""
        edges = [
            1e-9,
            *inner,
            1.0 - 1e-9,
        ]  # just inside [0, 1], where the inverse CDF is finite
        total = 0.0
        for low, high in itertools.pairwise(edges):
            middle = (low + high) / 2
            level = inverse_cdf(middle)
            for a, b in ((low, middle), (middle, high)):  # no kink inside either half
                total += abs(integrate.quad(lambda w, level=level: inverse_cdf(w) - level, a, b, epsabs=1e-11)[0])
        return total

    hats = [(a + b) / 2 for a, b in itertools.pairwise(taus)]
    at_taus = torch.tensor([inverse_cdf(t) for t in taus[1:-1]])
    at_hats = torch.tensor([inverse_cdf(t) for t in hats])
    analytic = quantiles.fqf_fraction_gradient(at_taus, at_hats)
    for i in range(3):
        up, down = list(taus[1:-1]), list(taus[1:-1])
        up[i] += 1e-4
        down[i] -= 1e-4
        numeric = (wasserstein(up) - wasserstein(down)) / 2e-4
        assert analytic[i].item() == pytest.approx(numeric, abs=1e-4)
