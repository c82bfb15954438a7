"""BRO: the averaged quantile target, the exploring policy and its two weights, by hand and by plain autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers import ACTION_DIM, BATCH, batch_for, make_algorithm, modules_of, spec_for
from torch import Tensor

from rl_training import registry
from rl_training.algorithms.continuous.bro import bounded, unbounded, upper_value
from rl_training.errors import UserError
from rl_training.models import MLPSACModel
from rl_training.ops import rng

KEY = rng.key_from_seed(6)


def parts(**fields: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """The algorithm, a state in which no network equals its slow copy and the shift is not small, and a batch."""
    algorithm = make_algorithm("bro", **fields)
    state, other = algorithm.init_state(0), algorithm.init_state(1)
    params = {**state.params, "explorer": 3.0 * state.params["explorer"]}
    return algorithm, state._replace(params=params, target=other.target), batch_for(algorithm)


def test_defaults_are_those_of_bro_fast() -> None:
    algorithm = registry.entry("bro").load()(spec_for("bro"))
    published = {
        "network": "bro", "hidden_sizes": (256,), "critic_hidden_sizes": (512, 512), "num_quantiles": 100,
        "num_critics": 2, "optimizer": "adamw", "weight_decay": 1e-4, "batch_size": 128, "gradient_steps": 2,
        "tau": 0.005, "gamma": 0.99, "kl_target": 0.05, "std_multiplier": 0.75, "optimism_init": 1.0,
        "kl_weight_init": 0.25, "dual_learning_rate": 3e-5, "ent_coef_init": 1.0,
    }  # fmt: skip
    assert {name: getattr(algorithm.hp, name) for name in published} == published
    assert algorithm.target_entropy == -0.5 * ACTION_DIM
    # The first environment step after 15,000 at which the authors reset, at two updates for each step.
    assert algorithm.hp.reset_at == (2 * (15_000 - algorithm.hp.learning_starts),)


def test_weights_start_at_their_settings_and_stay_within_bounds() -> None:
    duals = make_algorithm("bro").init_state(0).extra["duals"]
    torch.testing.assert_close(bounded(duals), torch.tensor([1.0, 0.25]))
    assert float(bounded(torch.tensor(-50.0))) == pytest.approx(math.exp(-10.0))
    assert float(bounded(torch.tensor(50.0))) == pytest.approx(math.exp(7.5))
    assert unbounded(1.0) == pytest.approx(math.atanh(1.0 / 7.0))  # (0 + 10) / 8.75 - 1


def test_upper_value_adds_half_the_difference_of_two_critics() -> None:
    first, second = torch.tensor([[1.0, 4.0]]), torch.tensor([[3.0, 0.0]])  # [1, M]
    # (1 + 3) / 2 + 2 x 2 / 2 = 4 and (4 + 0) / 2 + 2 x 4 / 2 = 6: their mean is 5
    assert upper_value(torch.stack([first, second]), torch.tensor(2.0)).tolist() == [5.0]


def test_target_averages_the_critics_quantile_by_quantile() -> None:
    algorithm, state, batch = parts()
    nets, bonus = modules_of(algorithm, state), torch.linspace(-1.0, 1.0, BATCH)
    next_action = batch["actions"].roll(1, 0)
    loss, report = algorithm.critic.loss(state.params["critic"], state, batch, next_action, bonus, KEY)
    with torch.no_grad():
        next_q = nets["slow_critic"](batch["next_obs"], next_action)  # [2, B, 5]
        q = nets["critic"](batch["obs"], batch["actions"])
    target = 0.5 * (next_q[0] + next_q[1]) + bonus.unsqueeze(-1)
    target = batch["rewards"].unsqueeze(-1) + batch["discounts"].unsqueeze(-1) * target  # [B, 5]
    torch.testing.assert_close(report.target, target.mean(-1))
    for row in range(3):
        total = 0.0
        for e in range(2):
            for i in range(5):
                for j in range(5):
                    u = float(target[row, j] - q[e, row, i])
                    huber = 0.5 * u * u if abs(u) <= 1.0 else abs(u) - 0.5
                    total += abs((2 * i + 1) / 10 - (u < 0)) * huber / 5
        assert float(loss[row]) == pytest.approx(total / (2 * 5), rel=1e-4)


def test_exploring_policy_learns_by_the_papers_loss() -> None:
    algorithm, state, batch = parts()
    _, metrics = algorithm.policy_step(state, batch, KEY)
    after, _ = algorithm.policy_step(state, batch, KEY)
    nets = modules_of(algorithm, after)  # the actor is updated first
    before = copy.deepcopy(nets["explorer"])
    algorithm.nets["explorer"].write_to(before, state.params["explorer"])
    with torch.no_grad():
        mean, log_std = nets["actor"](batch["obs"]).chunk(2, -1)
        std = log_std.clamp(-5.0, 2.0).exp()
    noise = rng.normal(rng.fold(KEY, 4), (BATCH, ACTION_DIM))
    shifted = mean + before(batch["obs"], mean)
    old, new = torch.distributions.Normal(mean, std), torch.distributions.Normal(shifted, std)
    kl = torch.distributions.kl_divergence(new, old).sum(-1)
    q1, q2 = nets["critic"](batch["obs"], torch.tanh(shifted + 0.75 * std * noise))
    upper = (0.5 * (q1 + q2) + 1.0 * 0.5 * (q1 - q2).abs()).mean(-1)
    loss = (batch["weights"] * (0.25 * kl - upper)).mean()
    assert float(metrics["explorer_loss"]) == pytest.approx(loss.item(), rel=1e-4)
    assert float(metrics["kl"]) == pytest.approx((batch["weights"] * kl).mean().item() / ACTION_DIM, rel=1e-4)
    loss.backward()
    moment = algorithm.nets["explorer"].named(after.opt["explorer"]["m"])  # (1 - 0.9) x gradient
    for name, parameter in before.named_parameters():
        torch.testing.assert_close(moment[name], 0.1 * parameter.grad, rtol=1e-3, atol=1e-6)


def test_weights_are_tuned_by_the_gradients_of_their_losses() -> None:
    algorithm, state, batch = parts()
    after, metrics = algorithm.policy_step(state, batch, KEY)
    raw = state.extra["duals"].clone().requires_grad_()
    optimism, kl_weight = bounded(raw)
    excess = float(metrics["kl"]) - 0.05
    (optimism * excess - kl_weight * excess).backward()
    torch.testing.assert_close(after.opt["duals"]["m"], 0.5 * raw.grad, rtol=1e-4, atol=1e-8)
    # Too far away: less optimism and a heavier penalty; one Adam step of 3e-5.
    assert excess > 0.0
    torch.testing.assert_close(
        after.extra["duals"] - state.extra["duals"], torch.tensor([-3e-5, 3e-5]), rtol=0.01, atol=0
    )


def test_exploring_shifts_the_mean_and_evaluation_does_not() -> None:
    algorithm, state, batch = parts()
    nets, obs = modules_of(algorithm, state), batch["obs"]
    carry = algorithm.init_carry(BATCH)
    _, noise = algorithm.exploration.noise(carry, KEY, BATCH, None)
    mean, log_std = nets["actor"](obs).chunk(2, -1)
    explored = torch.tanh(mean + nets["explorer"](obs, mean) + 0.75 * log_std.clamp(-5.0, 2.0).exp() * noise)
    torch.testing.assert_close(algorithm.select_action(state, carry, obs, KEY, explore=True)[1], explored)
    torch.testing.assert_close(algorithm.select_action(state, carry, obs, KEY, explore=False)[1], torch.tanh(mean))
    fresh = algorithm.init_state(0)  # at the start the two policies have nearly the same mean
    assert float(algorithm.shifted(fresh.params["explorer"], obs, nets["actor"](obs))[0].abs().max().detach()) < 0.1


def test_bad_settings_are_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="average_critics leaves out no atoms"):
        make_algorithm("bro", top_quantiles_to_drop_per_net=1)
    with pytest.raises(UserError, match="three networks: actor, critic and explorer"):
        registry.entry("bro").load()(spec_for("bro"), model=MLPSACModel(5, 2, (8,), critic_outputs=100))
