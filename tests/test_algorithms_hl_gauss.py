"""HL-Gauss critics: the histogram against scipy's normal, the loss by hand, and the range that is found in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import BATCH, batch_for, make_algorithm
from scipy.stats import norm
from torch import Tensor

from rl_training.ops import rng
from rl_training.ops.categorical import gaussian_histogram

KEY = rng.key_from_seed(9)
EDGES = torch.linspace(-5.0, 5.0, 11)


@pytest.mark.parametrize("sigma", [0.3, 0.75, 2.0])
def test_histogram_is_that_of_a_truncated_normal(sigma: float) -> None:
    x = torch.tensor([-5.0, -4.9, -0.5, 0.0, 0.123, 2.5, 5.0])
    below = norm.cdf((EDGES.double().numpy() - x.double().numpy()[:, None]) / sigma)
    expected = np.diff(below, axis=-1) / (below[:, -1:] - below[:, :1])
    histogram = gaussian_histogram(x, EDGES, sigma)
    np.testing.assert_allclose(histogram.numpy(), expected, atol=2e-6)
    torch.testing.assert_close(histogram.sum(-1), torch.ones(7))


def test_histogram_has_the_mean_of_its_value_away_from_the_ends() -> None:
    """With the paper's deviation of 0.75 bins, to a hundredth of a bin."""
    centres = 0.5 * (EDGES[1:] + EDGES[:-1])
    x = torch.linspace(-2.0, 2.0, 37)
    assert float(((gaussian_histogram(x, EDGES, 0.75) * centres).sum(-1) - x).abs().max()) < 0.01


def test_values_beyond_the_ends_count_as_the_ends() -> None:
    beyond = gaussian_histogram(torch.tensor([-1e6, 99.0]), EDGES, 0.75)
    assert torch.equal(beyond, gaussian_histogram(torch.tensor([-5.0, 5.0]), EDGES, 0.75))
    assert torch.isfinite(beyond).all()


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_loss_is_the_cross_entropy_to_the_histogram_of_the_target(name: str) -> None:
    critic = {"kind": "hl_gauss", "num_atoms": 8, "v_min": -4.0, "v_max": 4.0, "sigma_ratio": 0.6, "num_critics": 3}
    algorithm = make_algorithm(name, critic=critic)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state = state._replace(target=algorithm.init_state(1).target)
    action, bonus = batch["actions"].roll(1, 0), torch.linspace(-1.0, 1.0, BATCH)
    loss, report = algorithm.critic.loss(state.params["critic"], state, batch, action, bonus, KEY)
    net, centres = algorithm.nets["critic"], torch.arange(8) - 3.5
    next_q = (net(state.target["critic"], batch["next_obs"], action).softmax(-1) * centres).sum(-1).amin(0)
    target = batch["rewards"] + batch["discounts"] * (next_q + bonus)
    edges = np.arange(-4.0, 4.5, 1.0)
    below = norm.cdf((edges - target.double().clamp(-4.0, 4.0).numpy()[:, None]) / 0.6)
    share = torch.from_numpy(np.diff(below, axis=-1) / (below[:, -1:] - below[:, :1])).float()
    logits = net(state.params["critic"], batch["obs"], batch["actions"])
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), share.repeat(3, 1), reduction="none"
    ).view(3, BATCH)  # fmt: skip
    torch.testing.assert_close(loss, expected.sum(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(report.target, target)
    q = (logits.softmax(-1) * centres).sum(-1)
    torch.testing.assert_close(report.error, (q - target).abs().mean(0), rtol=1e-4, atol=1e-5)
    assert report.extra == {}


def fitted(algorithm: object, batch: dict[str, Tensor], updates: int) -> tuple[object, dict[str, Tensor]]:
    state = algorithm.init_state(0)  # type: ignore[attr-defined]
    for i in range(updates):
        state, aux = algorithm.train_step(state, batch, rng.fold(KEY, i))  # type: ignore[attr-defined]
    return state, aux.metrics


def test_values_are_learned_as_regression_would_learn_them() -> None:
    algorithm = make_algorithm("sac", critic={"kind": "hl_gauss", "num_atoms": 41, "v_min": -10.0, "v_max": 10.0},
                               learning_rate=1e-2, hidden_sizes=[32])  # fmt: skip
    batch = batch_for(algorithm)
    batch["discounts"] = torch.zeros(BATCH)
    batch["rewards"] = torch.linspace(-6.0, 6.0, BATCH)
    state, _ = fitted(algorithm, batch, 150)
    q = algorithm.critic.expected(state.params["critic"], state.extra, batch["obs"], batch["actions"])
    assert float((q - batch["rewards"]).abs().mean()) < 0.5


def test_range_is_found_from_rewards_and_widens_where_it_clips() -> None:
    algorithm = make_algorithm("td3", critic={"kind": "hl_gauss", "num_atoms": 21})
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    assert state.extra["support"]["range"].tolist() == [-1.0, 1.0]
    batch["rewards"] = torch.linspace(0.0, 3.0, BATCH)
    state, _ = algorithm.train_step(state, batch, KEY)
    low, high = state.extra["support"]["range"].tolist()
    assert low <= 0.0
    assert high > 3.0
    assert algorithm.critic.edges(state.extra)[[0, -1]].tolist() == pytest.approx([low, high])
    # A quarter of the targets at the very end: its histogram cannot have their mean.
    late = state._replace(step=torch.tensor(10_000))
    batch["discounts"] = torch.zeros(BATCH)
    batch["rewards"] = torch.where(torch.arange(BATCH) % 4 == 0, high, 0.5 * (low + high))
    for i in range(60):
        late, _ = algorithm.train_step(late, batch, rng.fold(KEY, i))
    assert late.extra["support"]["range"].tolist() == pytest.approx([low, high + (high - low)])
