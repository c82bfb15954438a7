from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rl_training.ops import categorical

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def project_by_algorithm_1(next_probs: Tensor, reward: float, discount: float, atoms: Tensor) -> list[float]:
    """C51 Algorithm 1 for one sample, in Python floats; also correct when an atom falls on the support."""
    z = atoms.tolist()
    n, v_min, v_max = len(z), z[0], z[-1]
    mass = [0.0] * n
    for j in range(n):
        b = (min(max(reward + discount * z[j], v_min), v_max) - v_min) / ((v_max - v_min) / (n - 1))
        low, high = math.floor(b), math.ceil(b)
        if low == high:
            mass[low] += float(next_probs[j])
        else:
            mass[low] += float(next_probs[j]) * (high - b)
            mass[high] += float(next_probs[j]) * (b - low)
    return mass


def test_projection_matches_hand_computed_values() -> None:
    atoms = categorical.support(-1.0, 1.0, 3)
    assert atoms.tolist() == [-1.0, 0.0, 1.0]
    probs = torch.tensor([[0.25, 0.5, 0.25]] * 4)
    rewards = torch.tensor([0.0, 0.25, 5.0, -0.5])
    discounts = torch.tensor([1.0, 0.0, 1.0, 0.5])
    expected = [
        [0.25, 0.5, 0.25],  # nothing moves: every shifted atom falls on the support, and no mass is lost
        [0.0, 0.75, 0.25],  # terminal: all mass at r = 0.25
        [0.0, 0.0, 1.0],  # clamped to v_max
        [0.5, 0.5, 0.0],  # atoms at -1, -0.5, 0
    ]
    assert categorical.project(probs, rewards, discounts, atoms).tolist() == expected


def test_projection_equals_algorithm_1_and_conserves_mass_and_mean() -> None:
    g = torch.Generator().manual_seed(0)
    atoms = categorical.support(-10.0, 10.0, 51)
    probs = torch.randn(64, 51, generator=g).mul(3).softmax(-1)
    rewards = torch.randn(64, generator=g) * 4
    discounts = 0.99 * (torch.rand(64, generator=g) > 0.2).float()
    projected = categorical.project(probs, rewards, discounts, atoms)
    for b in range(64):
        expected = project_by_algorithm_1(probs[b], float(rewards[b]), float(discounts[b]), atoms)
        torch.testing.assert_close(projected[b], torch.tensor(expected), atol=2e-5, rtol=0)
    torch.testing.assert_close(projected.sum(-1), torch.ones(64), atol=1e-6, rtol=0)
    shifted_mean = (probs * (rewards[:, None] + discounts[:, None] * atoms).clamp(-10, 10)).sum(-1)
    torch.testing.assert_close((projected * atoms).sum(-1), shifted_mean, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("v_min", "v_max", "n"), [(-10.0, 10.0, 51), (0.0, 200.0, 101), (-150.0, 150.0, 51)])
def test_every_integer_shift_keeps_all_mass(v_min: float, v_max: float, n: int) -> None:
    atoms = categorical.support(v_min, v_max, n)
    step = (v_max - v_min) / (n - 1)
    rewards = torch.arange(-n, n + 1) * step
    probs = torch.full((2 * n + 1, n), 1.0 / n)
    for discount in (0.0, 1.0):
        mass = categorical.project(probs, rewards, torch.full_like(rewards, discount), atoms).sum(-1)
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-5, rtol=0)


def test_projection_vmap_equals_loop() -> None:
    atoms = categorical.support(-1.0, 1.0, 7)
    probs, rewards, discounts = torch.rand(3, 5, 7).softmax(-1), torch.randn(3, 5), torch.rand(3, 5)
    batched = torch.vmap(categorical.project, in_dims=(0, 0, 0, None))(probs, rewards, discounts, atoms)
    looped = torch.stack([categorical.project(p, r, d, atoms) for p, r, d in zip(probs, rewards, discounts)])
    torch.testing.assert_close(batched, looped)


def test_cross_entropy_value_and_gradient() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]]))
    target = torch.tensor([[0.1, 0.6, 0.3]])
    expected = -(0.1 * math.log(0.2) + 0.6 * math.log(0.3) + 0.3 * math.log(0.5))
    assert categorical.cross_entropy(logits, target).item() == pytest.approx(expected, rel=1e-6)
    gradient = torch.func.grad(lambda x: categorical.cross_entropy(x, target).sum())(logits)
    torch.testing.assert_close(gradient, torch.tensor([[0.1, -0.3, 0.2]]))  # softmax - target


def test_log_probabilities_and_probabilities_share_an_exponential() -> None:
    logits = torch.tensor([[0.3, -2.0, 1.5], [200.0, -200.0, 199.0], [-1e4, -1e4, -1e4]])
    weights = torch.tensor([[0.5, -1.0, 2.0]])

    def pulled(fn: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        return torch.func.grad(lambda x: sum((weights * y).sum() for y in fn(x)))(logits)

    for ours, theirs in zip(categorical.log_softmax_and_softmax(logits), (logits.log_softmax(-1), logits.softmax(-1))):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        pulled(categorical.log_softmax_and_softmax), pulled(lambda x: (x.log_softmax(-1), x.softmax(-1)))
    )
