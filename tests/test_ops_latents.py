"""Discrete latents, percentiles of returns, LaProp and adaptive clipping: each against an independent computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl_training.ops import latents, rng
from rl_training.ops.distributions import BoundedGaussian
from rl_training.ops.optim import Optimizer, clip_adaptively
from rl_training.ops.running_stats import init_percentiles, masked_quantile, percentile_scale, update_percentiles

G = torch.Generator().manual_seed(0)


def logits(*shape: int) -> torch.Tensor:
    return 3.0 * torch.randn(*shape, generator=G)


def test_unimix_mixes_in_the_uniform_distribution() -> None:
    x = logits(5, 4, 7)
    mixed = latents.unimix(x, 0.1).exp()
    torch.testing.assert_close(mixed, 0.9 * x.softmax(-1) + 0.1 / 7)
    assert float(mixed.min()) >= 0.1 / 7 - 1e-7
    assert torch.equal(latents.unimix(x, 0.0), x.log_softmax(-1))


def test_sample_codes_inverts_the_cumulative_distribution() -> None:
    log_probs, u = latents.unimix(logits(200, 6), 0.01), torch.rand(200, generator=G)
    expected = [int(np.searchsorted(np.cumsum(p), x, side="right")) for p, x in zip(log_probs.exp().numpy(), u.numpy())]
    assert latents.sample_codes(log_probs, u).tolist() == np.minimum(expected, 5).tolist()
    ends = torch.tensor([0.0, 1.0 - 2.0**-24])  # the smallest and the largest number that the generator returns
    assert latents.sample_codes(log_probs[:1].expand(2, 6), ends).tolist() == [0, 5]


def test_drawn_codes_have_the_right_frequencies() -> None:
    log_probs = latents.unimix(logits(3), 0.05)
    codes = latents.sample_codes(log_probs.expand(100_000, 3), rng.uniform(rng.key_from_seed(1), (100_000,)))
    shares = torch.bincount(codes, minlength=3) / len(codes)
    torch.testing.assert_close(shares, log_probs.exp(), rtol=0, atol=0.006)


def test_one_hot_of_a_negative_code_is_zero() -> None:
    assert latents.one_hot(torch.tensor([-1, 0, 2]), 3).tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 1]]


def test_straight_through_is_one_hot_with_the_gradient_of_the_probabilities() -> None:
    x, direction = logits(5, 4).requires_grad_(), torch.randn(5, 4, generator=G)
    codes = torch.tensor([0, 3, 1, 2, 2])
    sample = latents.straight_through(latents.unimix(x, 0.01), codes)
    torch.testing.assert_close(sample, torch.nn.functional.one_hot(codes, 4).float(), rtol=0, atol=1e-6)
    (ours,) = torch.autograd.grad((sample * direction).sum(), x)
    (expected,) = torch.autograd.grad(((0.99 * x.softmax(-1) + 0.0025) * direction).sum(), x)
    torch.testing.assert_close(ours, expected)


def test_balanced_kl_with_free_nats_and_stopped_gradients() -> None:
    post, prior = logits(6, 3, 4).requires_grad_(), logits(6, 3, 4).requires_grad_()
    p, q = post.detach().double().softmax(-1).numpy(), prior.detach().double().softmax(-1).numpy()
    exact = (p * (np.log(p) - np.log(q))).sum((-1, -2))
    free = float(np.median(exact)) + 1e-3  # half of the rows are below, half above
    dynamics, representation = latents.balanced_kl(post.log_softmax(-1), prior.log_softmax(-1), free)
    expected = torch.tensor(np.maximum(exact, free), dtype=torch.float32)
    torch.testing.assert_close(dynamics, expected)
    torch.testing.assert_close(representation, expected)
    to_post, to_prior = torch.autograd.grad(dynamics.sum(), [post, prior], allow_unused=True)
    assert to_post is None
    assert [bool(row.any()) for row in to_prior] == (exact > free).tolist()
    to_post, to_prior = torch.autograd.grad(representation.sum(), [post, prior], allow_unused=True)
    assert to_prior is None
    assert [bool(row.any()) for row in to_post] == (exact > free).tolist()


@pytest.mark.parametrize("q", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_masked_quantile_equals_numpy(q: float) -> None:
    x, mask = torch.randn(3, 41, generator=G), torch.rand(3, 41, generator=G) < 0.6
    expected = [np.quantile(row[keep].numpy(), q) for row, keep in zip(x, mask)]
    found = torch.vmap(lambda a, m: masked_quantile(a, m, q))(x, mask)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))
    assert masked_quantile(x, torch.zeros_like(mask), q) == 0.0
    one = torch.zeros_like(mask)
    one[1, 7] = True
    assert masked_quantile(x, one, q) == x[1, 7]


def test_percentiles_are_moving_averages_and_the_scale_has_a_floor() -> None:
    x, everything = torch.linspace(-50.0, 150.0, 201), torch.ones(201, dtype=torch.bool)
    moving = init_percentiles()
    assert percentile_scale(moving) == 1.0  # small returns are not amplified
    for step in range(1, 4):
        moving = update_percentiles(moving, x, everything, rate=0.25)
        share = 1.0 - 0.75**step
        assert float(moving["low"]) == pytest.approx(-40.0 * share, rel=1e-5)
        assert float(moving["high"]) == pytest.approx(140.0 * share, rel=1e-5)
        assert float(percentile_scale(moving)) == pytest.approx(180.0 * share, rel=1e-5)


def test_laprop_equals_a_scalar_reference() -> None:
    optimizer, params = Optimizer("laprop", eps=1e-20), torch.tensor([0.5, -2.0, 3.0])
    state = optimizer.init(params)
    expected, n, m = params.tolist(), [0.0] * 3, [0.0] * 3
    for step in range(1, 21):
        grads = torch.randn(3, generator=G) * 10.0 ** (step % 7 - 4)
        params, state = optimizer.update(grads, state, params, 0.01)
        for i, g in enumerate(grads.tolist()):  # Ziyin 2020, Algorithm 1, in double precision
            n[i] = 0.999 * n[i] + 0.001 * g * g
            m[i] = 0.9 * m[i] + 0.1 * g / (math.sqrt(n[i] / (1.0 - 0.999**step)) + 1e-20)
            expected[i] -= 0.01 * m[i] / (1.0 - 0.9**step)
        torch.testing.assert_close(params, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_laprop_does_not_move_on_zero_gradients() -> None:
    optimizer, params = Optimizer("laprop", eps=1e-20), torch.ones(2)
    moved, _ = optimizer.update(torch.zeros(2), optimizer.init(params), params, 0.1)
    assert torch.equal(moved, params)


def test_adaptive_clipping_scales_each_tensor() -> None:
    sizes = [4, 3, 5, 2]
    params = torch.cat([torch.full((4,), 2.0), torch.full((3,), 0.1), torch.zeros(5), torch.full((2,), 8.0)])
    grads = torch.cat([torch.full((4,), 9.0), torch.full((3,), 0.001), torch.full((5,), 7.0), torch.zeros(2)])
    clipped = torch.split(clip_adaptively(grads, params, sizes, 0.3), sizes)
    parts = zip(clipped, torch.split(grads, sizes), torch.split(params, sizes))
    for new, grad, weight in parts:
        limit = 0.3 * max(float(weight.norm()), 1e-3)
        size = float(grad.norm())
        expected = grad if size <= limit else grad * limit / size
        torch.testing.assert_close(new, expected)
    assert clipped[0].norm() == pytest.approx(1.2)  # 0.3 x the norm of [2, 2, 2, 2]
    assert torch.equal(clipped[1], torch.full((3,), 0.001))
    assert clipped[2].norm() == pytest.approx(0.3e-3)  # parameters that start at zero can still move
    assert clip_adaptively(grads, params, sizes, 0.0) is grads


def test_bounded_gaussian_matches_torch() -> None:
    distribution, out = BoundedGaussian(2), logits(50, 4)
    mean, log_std = distribution.split(out)
    normal = torch.distributions.Normal(out[:, :2].tanh(), 0.1 + 0.9 * torch.sigmoid(out[:, 2:] + 2.0))
    torch.testing.assert_close(mean, normal.mean)
    torch.testing.assert_close(log_std.exp(), normal.stddev)
    action = distribution.sample(out, rng.key_from_seed(4))
    torch.testing.assert_close(distribution.log_prob(out, action), normal.log_prob(action).sum(-1))
    torch.testing.assert_close(distribution.entropy(out), normal.entropy().sum(-1))
    assert torch.equal(distribution.mode(out), mean)
