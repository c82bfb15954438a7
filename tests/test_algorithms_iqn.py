"""IQN: the cosine embedding and the network against the paper's formulas, the loss against loops; and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import BATCH, batch_for, make_algorithm, spec_for
from torch import nn

from rl_training.algorithms import IQN
from rl_training.errors import UserError
from rl_training.models import MLPIQNNetwork, MLPQRQNetwork
from rl_training.models.layers import NoisyLinear
from rl_training.ops import rng

KEY = rng.key_from_seed(0)
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def formula(net: MLPIQNNetwork, obs: torch.Tensor, taus: list[float], key: torch.Tensor | None = None) -> torch.Tensor:
    """Z(x, tau) = f(psi(x) * phi(tau)) for each fraction, phi by Eq. 4, f a hidden layer and the output: [B, A, N].

    Every linear layer is written out. The noise of a noisy one comes from its own fold of the key.
    """

    def linear(layer: Any, x: torch.Tensor, *folds: int) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        if isinstance(layer, NoisyLinear) and key is not None:
            own = key
            for fold in folds:
                own = rng.fold(own, fold)
            z = rng.normal(own, (sum(weight.shape),))
            f = z.sign() * z.abs().sqrt()
            noise_in, noise_out = f[: weight.shape[1]], f[weight.shape[1] :]
            weight = weight + layer.weight_sigma * torch.outer(noise_out, noise_in)
            bias = bias + layer.bias_sigma * noise_out
        return x @ weight.T + bias

    psi = obs
    for number in range(0, len(net.torso), 2):
        psi = linear(net.torso[number], psi, 3, number).relu()
    columns = []
    for tau in taus:
        cosines = torch.tensor([math.cos(math.pi * i * tau) for i in range(net.num_cosines)])
        phi = torch.relu(net.embedding.weight @ cosines + net.embedding.bias)
        out = linear(net.advantage[2], linear(net.advantage[0], psi * phi, 0, 0).relu(), 0, 2)
        if net.dueling:
            value = linear(net.value[2], linear(net.value[0], psi * phi, 1, 0).relu(), 1, 2)
            out = value + out - out.mean(-1, keepdim=True)
        columns.append(out)
    return torch.stack(columns, -1)


def test_embedding_by_hand() -> None:
    """One feature, two cosines: phi = relu(w0 + w1 cos(pi tau) + b)."""
    net = MLPIQNNetwork(1, 1, (), num_cosines=2)
    with torch.no_grad():
        net.embedding.weight.copy_(torch.tensor([[0.5, -2.0]]))
        net.embedding.bias.fill_(0.25)
        net.advantage.weight.fill_(3.0)
        net.advantage.bias.fill_(1.0)
    z = net(torch.tensor([[2.0]]), torch.tensor([0.0, 1 / 3, 0.5, 1.0]))
    # relu(0.75 - 2 cos(pi tau)) at cos = 1, 1/2, 0, -1
    expected = [1 + 6 * phi for phi in (0.0, 0.0, 0.75, 2.75)]
    assert z[0, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_hidden_layer_after_the_product_by_hand() -> None:
    """One feature, phi = relu(cos(pi tau)): Z = 3 relu(2 x phi - 1) + 0.5, which no linear head on x phi can give."""
    net = MLPIQNNetwork(1, 1, (1,), num_cosines=2)
    with torch.no_grad():
        net.embedding.weight.copy_(torch.tensor([[0.0, 1.0]]))
        net.embedding.bias.zero_()
        for layer, weight, bias in ((net.advantage[0], 2.0, -1.0), (net.advantage[2], 3.0, 0.5)):
            layer.weight.fill_(weight)
            layer.bias.fill_(bias)
    z = net(torch.tensor([[1.0], [0.4]]), torch.tensor([0.0, 1 / 3, 1.0]))
    assert z[0, 0].tolist() == pytest.approx([3.5, 0.5, 0.5], abs=1e-5)  # 2 x phi - 1 = 1, 0, -1
    assert z[1, 0].tolist() == pytest.approx([0.5, 0.5, 0.5], abs=1e-5)  # -0.2, -0.6, -1


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_network_equals_the_formula(dueling: bool, noisy: bool) -> None:
    torch.manual_seed(0)
    net = MLPIQNNetwork(4, 3, (6, 5), num_cosines=7, dueling=dueling, noisy=noisy)
    obs, taus, key = torch.randn(9, 4), [0.1, 0.5, 0.93], KEY if noisy else None
    expected = formula(net, obs, taus, key)
    torch.testing.assert_close(net(obs, torch.tensor(taus), key), expected, **NEAR)
    rows = torch.rand(9, 3)  # each row has its own fractions
    each = torch.cat([formula(net, obs[b : b + 1], rows[b].tolist(), key) for b in range(9)])
    torch.testing.assert_close(net(obs, rows, key), each, **NEAR)
    torch.testing.assert_close(net(obs, torch.tensor(taus).expand(9, 3), key), expected, **NEAR)
    actions = torch.arange(9) % 3
    chosen = net(obs, torch.tensor(taus), key, actions)
    torch.testing.assert_close(chosen, expected[torch.arange(9), actions], **NEAR)


def test_fractions_are_stratified() -> None:
    algorithm = make_algorithm("iqn")
    taus = torch.stack([algorithm.fractions(rng.fold(KEY, i), 8) for i in range(500)])  # [500, 8]
    low = torch.arange(8) / 8
    assert (taus >= low).all()
    assert (taus < low + 1 / 8).all()
    torch.testing.assert_close(taus.mean(0), low + 1 / 16, atol=0.01, rtol=0)


def test_prediction_and_target_have_their_own_fractions() -> None:
    algorithm = make_algorithm("iqn", num_tau_samples=8, num_target_tau_samples=8)
    a, b = (algorithm.fractions(rng.fold(KEY, i), 8) for i in (0, 1))
    assert not torch.allclose(a, b)


@pytest.mark.parametrize("double", [False, True])
def test_update_equals_plain_autograd(double: bool) -> None:
    """Target and loss in loops over fractions (Eq. 3), with modules and backward."""
    algorithm = make_algorithm(
        "iqn", hidden_sizes=[6], num_tau_samples=4, num_target_tau_samples=3, num_quantiles=5, num_cosines=6,
        optimizer="sgd", learning_rate=1.0, double=double,
    )  # fmt: skip
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state = state._replace(target={"q": algorithm.init_state(1).params["q"]})
    nets: list[Any] = []
    for flat in (state.params["q"], state.target["q"]):
        module = MLPIQNNetwork(5, 3, (6,), num_quantiles=5, num_cosines=6)
        algorithm.nets["q"].write_to(module, flat)
        nets.append(module)
    online, target = nets
    taus = algorithm.fractions(rng.fold(KEY, 1), 4).tolist()
    key = rng.fold(rng.fold(KEY, 0), 0)
    target_taus = algorithm.fractions(key, 3).tolist()
    with torch.no_grad():
        midpoints = [0.1, 0.3, 0.5, 0.7, 0.9]
        greedy = formula(online if double else target, batch["next_obs"], midpoints).mean(-1).argmax(-1)
        z_next = formula(target, batch["next_obs"], target_taus)[torch.arange(BATCH), greedy]  # [B, N']
        goal = batch["rewards"][:, None] + batch["discounts"][:, None] * z_next
    z = formula(online, batch["obs"], taus)[torch.arange(BATCH), batch["actions"]]
    loss = torch.zeros(BATCH)
    for i, tau in enumerate(taus):
        for j in range(3):
            u = goal[:, j] - z[:, i]
            huber = nn.functional.huber_loss(z[:, i], goal[:, j], reduction="none")
            loss = loss + (tau - (u < 0).float()).abs() * huber / 3
    total = (batch["weights"] * loss).mean()
    total.backward()
    new, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["loss"]) == pytest.approx(float(total.detach()), rel=1e-4)
    gradient = state.params["q"] - new.params["q"]
    for name, value in algorithm.nets["q"].named(gradient).items():
        torch.testing.assert_close(value, dict(online.named_parameters())[name].grad, **NEAR)


def test_policy_is_deterministic_and_risk_neutral() -> None:
    algorithm = make_algorithm("iqn", num_quantiles=4)
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    taus = torch.tensor([0.125, 0.375, 0.625, 0.875])
    q = algorithm.nets["q"](state.params["q"], obs, taus).mean(-1)
    torch.testing.assert_close(algorithm.q_values(state.params, obs), q)
    torch.testing.assert_close(algorithm.value(state, obs), q.amax(-1))


@pytest.mark.slow
def test_learns_the_quantile_function_of_the_reward() -> None:
    """Rewards spread evenly over [0, 1): Z(tau) = tau, also at fractions between those it was asked for."""
    algorithm = make_algorithm("iqn", learning_rate=2e-3, kappa=0.0)
    n = 200
    batch = {
        "obs": torch.ones(n, 5), "next_obs": torch.ones(n, 5), "actions": torch.full((n,), 1),
        "rewards": (torch.arange(n) + 0.5) / n, "discounts": torch.zeros(n), "weights": torch.ones(n),
    }  # fmt: skip
    state = algorithm.init_state(0)
    for i in range(800):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    taus = torch.linspace(0.1, 0.9, 9)
    z = algorithm.nets["q"](state.params["q"], batch["obs"][:1], taus)[0, 1]
    torch.testing.assert_close(z, taus, atol=0.05, rtol=0)


def test_bad_input() -> None:
    for name in ("num_quantiles", "num_tau_samples", "num_target_tau_samples", "num_cosines"):
        with pytest.raises(UserError, match=f"{name} = 0: should be greater than or equal to 1"):
            make_algorithm("iqn", **{name: 0})
    with pytest.raises(UserError, match="num_cosines = 0: must be at least 1"):
        MLPIQNNetwork(4, 2, num_cosines=0)
    with pytest.raises(UserError, match="iqn needs a discrete action space"):
        IQN(spec_for("sac", "box"))
    with pytest.raises(UserError, match="needs a network that returns quantiles at given fractions"):
        IQN(q_network=MLPQRQNetwork(4, 2))
