"""MPO: the dual and its gradients numerically, decoupled KLs against torch.distributions, the M-step's direction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import ACTION_DIM, BATCH, batch_for, make_algorithm

from rl_training.algorithms.continuous.mpo import gaussian_kls, temperature_loss
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def dual(q: np.ndarray, eta: float, epsilon: float) -> float:
    """g(eta) in float64, straight from the definition."""
    return float(np.mean(eta * epsilon + eta * np.log(np.mean(np.exp(q / eta), 0))))


@pytest.mark.parametrize("eta", [0.3, 1.0, 10.0])
def test_temperature_loss_and_its_gradient_numerically(eta: float) -> None:
    q = np.random.default_rng(0).normal(size=(20, 7))
    temperature = torch.tensor(eta, requires_grad=True)
    loss = temperature_loss(torch.tensor(q, dtype=torch.float32), temperature, 0.1).mean()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(dual(q, eta, 0.1), rel=1e-4)
    slope = (dual(q, eta + 1e-5, 0.1) - dual(q, eta - 1e-5, 0.1)) / 2e-5
    assert float(temperature.grad) == pytest.approx(slope, rel=1e-3, abs=1e-4)
    # Analytically: epsilon minus the KL of the weights to uniform (their bound is what the dual enforces).
    share = np.exp(q / eta) / np.exp(q / eta).sum(0)
    kl = (share * np.log(share * 20)).sum(0).mean()
    assert slope == pytest.approx(0.1 - kl, rel=1e-3, abs=1e-5)


def test_temperature_loss_survives_large_values() -> None:
    q = torch.tensor([[1e4], [2e4]])
    assert float(temperature_loss(q, torch.tensor(0.1), 0.1)) == pytest.approx(2e4, rel=1e-4)


def test_dual_gradients_of_a_train_step_numerically() -> None:
    """The first moment of the duals' Adam is a tenth of the gradient: compare it with finite differences."""
    algorithm = make_algorithm("mpo", init_temperature=0.7, init_alpha_mean=2.0, init_alpha_std=3.0, epsilon_std=1e-3)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state = state._replace(params={**state.params, "actor": 1.3 * state.params["actor"]})  # away from the target policy
    new, aux = algorithm.train_step(state, batch, KEY)
    gradient = new.opt["duals"]["m"] / 0.1

    actor = algorithm.nets["actor"]
    mean, log_std = actor(state.params["actor"], batch["next_obs"]).double().chunk(2, -1)
    old_mean, old_log_std = actor(state.target["actor"], batch["next_obs"]).double().chunk(2, -1)
    pre = old_mean.float() + old_log_std.float().exp() * rng.normal(KEY, (20, BATCH, ACTION_DIM))
    q = algorithm.sampled_q(state.target["critic"], batch["next_obs"], pre.tanh()).double()
    kl_mean = 0.5 * ((mean - old_mean) / old_log_std.exp()) ** 2
    kl_std = log_std - old_log_std + 0.5 * ((2 * (old_log_std - log_std)).exp() - 1)
    weights = batch["weights"].double()

    def objective(duals: np.ndarray) -> float:
        positive = np.log1p(np.exp(duals)) + 1e-8
        eta, alpha_mean, alpha_std = positive[0], torch.tensor(positive[1:3]), torch.tensor(positive[3:5])
        g = eta * 0.1 + eta * torch.log(torch.exp(q / eta).mean(0))
        total = g + (alpha_mean * (2.5e-3 - kl_mean)).sum(-1) + (alpha_std * (1e-3 - kl_std)).sum(-1)
        return float((weights * total).sum() / BATCH)

    duals = state.extra["duals"].double().numpy()
    assert float(aux.metrics["dual_loss"]) == pytest.approx(objective(duals), rel=1e-4)
    for i in range(5):
        step = np.zeros(5)
        step[i] = 1e-5
        slope = (objective(duals + step) - objective(duals - step)) / 2e-5
        assert float(gradient[i]) == pytest.approx(slope, rel=2e-3, abs=1e-5)


def test_decoupled_kls_equal_torch_distributions() -> None:
    torch.manual_seed(0)
    mean, log_std, old_mean, old_log_std = torch.randn(4, 6, 3).unbind(0)
    normal, kl = torch.distributions.Normal, torch.distributions.kl_divergence
    old = normal(old_mean, old_log_std.exp())
    by_mean, by_std = gaussian_kls(mean, log_std, old_mean, old_log_std)
    torch.testing.assert_close(by_mean, kl(old, normal(mean, old_log_std.exp())), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_std, kl(old, normal(old_mean, log_std.exp())), rtol=1e-4, atol=1e-5)


def test_duals_start_where_they_are_told() -> None:
    algorithm = make_algorithm("mpo", init_temperature=0.5, init_alpha_mean=10.0, init_alpha_std=1000.0)
    temperature, alpha_mean, alpha_std = algorithm.split_duals(algorithm.init_state(0).extra["duals"])
    assert float(temperature) == pytest.approx(0.5, rel=1e-5)
    assert alpha_mean.tolist() == pytest.approx([10.0] * ACTION_DIM, rel=1e-5)
    assert alpha_std.tolist() == pytest.approx([1000.0] * ACTION_DIM, rel=1e-5)


def test_penalties_rise_when_the_policy_has_moved_too_far_and_fall_when_it_has_not() -> None:
    algorithm = make_algorithm("mpo", target_update_interval=1000)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    moved = state._replace(params={**state.params, "actor": 3.0 * state.params["actor"]})
    for start, sign in ((moved, 1), (state, -1)):
        after, _ = algorithm.train_step(start, batch, KEY)
        assert (sign * (after.extra["duals"] - start.extra["duals"])[1:] > 0).all()


def test_targets_are_copied_every_interval() -> None:
    algorithm = make_algorithm("mpo", target_update_interval=3)
    state = algorithm.init_state(0)
    for i in range(1, 7):
        state, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), rng.fold(KEY, i))
        for name in ("actor", "critic"):
            assert torch.equal(state.target[name], state.params[name]) == (i % 3 == 0)


def test_policy_moves_towards_better_actions() -> None:
    """A critic that likes large actions in the first dimension and small ones in the second pulls the mean there."""
    algorithm = make_algorithm(
        "mpo", learning_rate=1e-2, init_alpha_mean=1e-3, init_alpha_std=1e-3, init_temperature=0.1
    )
    state, batch = algorithm.init_state(0), batch_for(algorithm)

    def liking(params: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return (actions[:, 0] - actions[:, 1]).unsqueeze(0) + 0.0 * params.sum()

    algorithm.nets["critic"] = liking  # type: ignore[assignment]
    before = algorithm.greedy(state, batch["next_obs"]).mean(0)
    for i in range(60):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    after = algorithm.greedy(state, batch["next_obs"]).mean(0)
    assert float(after[0] - before[0]) > 0.2
    assert float(after[1] - before[1]) < -0.2
