"""NAF's quadratic Q against NumPy, its maximum, its loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import BATCH, batch_for, make_algorithm

from rl_training.algorithms import NAF, naf_loss
from rl_training.models import MLPNAFModel
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def model_of(dim: int) -> MLPNAFModel:
    torch.manual_seed(dim)
    model = MLPNAFModel(4, dim, (16, 16))
    torch.nn.init.normal_(model.head.weight, std=0.5)  # L far from the identity, so that every entry matters
    return model


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_q_equals_the_quadratic_form_of_numpy(dim: int) -> None:
    model = model_of(dim)
    obs, actions = torch.randn(9, 4), torch.rand(9, dim) * 2.0 - 1.0
    with torch.no_grad():
        q, mean, value = model.q_values(obs, actions), model.actor(obs), model.state_values(obs)
        out = model.head(model.torso(obs)).double().numpy()  # mu before its tanh, V, then L row by row
    mistakes = []
    for b in range(9):
        entries = iter(out[b, dim + 1 :])
        lower = np.zeros((dim, dim))
        for row in range(dim):
            for column in range(row + 1):
                entry = next(entries)
                lower[row, column] = np.exp(entry) if row == column else entry
        precision = lower @ lower.T
        assert (np.linalg.eigvalsh(precision) > 0.0).all()
        mu = np.tanh(out[b, :dim])
        distance = actions[b].double().numpy() - mu
        expected = out[b, dim] - 0.5 * distance @ precision @ distance
        assert float(q[b]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
        np.testing.assert_allclose(mean[b].numpy(), mu, atol=1e-5)
        assert float(value[b]) == pytest.approx(out[b, dim], rel=1e-5, abs=1e-6)
        mistakes.append(abs(out[b, dim] - 0.5 * distance @ (lower * lower) @ distance - expected))
    assert (max(mistakes) > 0.1) == (dim > 1)  # the known mistake, P = L * L, is another number


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_best_action_is_mu_and_its_value_is_v(dim: int) -> None:
    model = model_of(dim)
    obs = torch.randn(3, 4)
    grid = torch.cartesian_prod(*[torch.linspace(-1, 1, 21)] * dim).view(-1, dim)
    with torch.no_grad():
        mean, value = model.actor(obs), model.state_values(obs)
        torch.testing.assert_close(model.q_values(obs, mean), value)
        for b in range(3):
            candidates = torch.cat(
                [grid, mean[b : b + 1], (mean[b] + 0.01 * torch.eye(dim)), mean[b] - 0.01 * torch.eye(dim)]
            )
            q = model.q_values(obs[b].expand(len(candidates), 4), candidates)
            assert int(q.argmax()) == len(grid)


def test_greedy_policy_is_mu_and_value_is_v() -> None:
    model = MLPNAFModel(4, 2, (8,))
    algorithm = NAF(model=model)
    obs = torch.randn(5, 4)
    np.testing.assert_allclose(algorithm.act(obs, deterministic=True), model.actor(obs).detach().numpy(), atol=1e-6)
    torch.testing.assert_close(algorithm.value(algorithm.state, obs), model.state_values(obs).detach())


def test_loss_and_update() -> None:
    q, next_value = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    batch = {
        "rewards": torch.tensor([0.5, 1.0]),
        "discounts": torch.tensor([0.9, 0.0]),
        "weights": torch.tensor([1.0, 0.5]),
    }
    metrics = naf_loss(q, next_value, batch)
    assert set(metrics) == {"loss", "target_q_mean", "q_mean"}
    assert float(metrics["loss"]) == pytest.approx((2.2**2 + 0.5 * 1.0) / 2)
    assert float(metrics["target_q_mean"]) == pytest.approx((3.2 + 0.5) / 2)
    assert float(metrics["q_mean"]) == pytest.approx(1.0)

    algorithm = make_algorithm("naf", tau=0.1, learning_rate=1e-2)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    net = algorithm.nets["q"]
    model = algorithm.modules["q"]
    net.write_to(model, state.params["q"])
    model.requires_grad_()
    error = model.q_values(batch["obs"], batch["actions"]) - (
        batch["rewards"] + batch["discounts"] * model.state_values(batch["next_obs"]).detach()
    )
    loss = (batch["weights"] * error**2).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.sqrt(sum((g**2).sum() for g in grads))
    new, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(aux.priority, error.detach().abs())
    assert aux.priority.shape == (BATCH,)
    scale = min(1.0, 10.0 / float(norm))
    for (name, moment), grad in zip(net.named(new.opt["q"]["m"]).items(), grads):
        torch.testing.assert_close(moment, 0.1 * scale * grad, rtol=1e-3, atol=1e-6, msg=name)
    torch.testing.assert_close(new.target["q"], torch.lerp(state.target["q"], new.params["q"], 0.1))


def test_saturation_penalty_pulls_mu_back_when_the_tanh_is_flat() -> None:
    """At a bound, tanh has no slope left and the TD error cannot move mu: the penalty alone does."""
    for penalty in (0.1, 0.0):
        algorithm = make_algorithm("naf", saturation_penalty=penalty, learning_rate=1e-2)
        state, batch = algorithm.init_state(0), batch_for(algorithm)
        bias = algorithm.nets["q"].named(state.params["q"])["head.bias"]
        bias[: algorithm.spec.action.dim] = 12.0  # a view: mu = 1 in every state
        size = []
        for i in range(40):
            pre_tanh = algorithm.nets["q"](state.params["q"], batch["obs"])[0]
            size.append(float(pre_tanh.mean()))
            state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
        assert (size[-1] < size[0] - 1.0) == (penalty > 0.0)
    free, held = (make_algorithm("naf", saturation_penalty=p) for p in (0.0, 5.0))
    fresh, batch = free.init_state(0), batch_for(free)  # inside the limit the penalty changes nothing
    assert torch.equal(
        free.train_step(fresh, batch, KEY)[0].params["q"], held.train_step(fresh, batch, KEY)[0].params["q"]
    )


def test_reward_scale_scales_the_target_and_not_the_reported_value() -> None:
    plain, scaled = make_algorithm("naf"), make_algorithm("naf", reward_scale=0.1)
    state, batch = plain.init_state(0), batch_for(plain)
    tenth = {**batch, "rewards": 0.1 * batch["rewards"]}
    assert torch.equal(
        scaled.train_step(state, batch, KEY)[0].params["q"], plain.train_step(state, tenth, KEY)[0].params["q"]
    )
    torch.testing.assert_close(scaled.value(state, batch["obs"]), 10.0 * plain.value(state, batch["obs"]))
