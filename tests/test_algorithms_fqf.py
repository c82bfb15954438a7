"""FQF: the fraction gradient against a numerical derivative of the 1-Wasserstein error, the two optimisers kept apart,
the loss against plain autograd; and bad input."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BATCH, batch_for, make_algorithm, spec_for

from rl_training.algorithms import FQF
from rl_training.errors import UserError
from rl_training.models import MLPFQFNetwork, MLPIQNNetwork
from rl_training.ops import rng
from rl_training.ops.quantiles import quantile_huber

KEY = rng.key_from_seed(0)
TERMINAL = {
    "obs": np.ones((8, 1)), "next_obs": np.ones((8, 1)), "rewards": np.zeros(8), "actions": np.zeros(8, np.int64),
    "dones": np.ones(8),
}  # fmt: skip
SMALL = {"hidden_sizes": [6], "num_quantiles": 4, "num_cosines": 5}


def test_network_gives_fractions_and_quantiles_at_their_midpoints() -> None:
    torch.manual_seed(0)
    net = MLPFQFNetwork(4, 3, (8,), num_quantiles=6)
    with torch.no_grad():
        net.fraction.linear.weight.normal_()  # uneven fractions that depend on the state
    obs = torch.randn(7, 4)
    quantiles, taus, tau_hats = net(obs)
    assert quantiles.shape == (7, 3, 6)
    assert taus.shape == (7, 7)
    assert not taus[:, 0].any()
    torch.testing.assert_close(taus[:, -1], torch.ones(7))
    assert (taus[:, 1:] > taus[:, :-1]).all()
    torch.testing.assert_close(tau_hats, (taus[:, 1:] + taus[:, :-1]) / 2)
    assert (taus.std(0)[1:-1] > 0.01).all()
    torch.testing.assert_close(quantiles, net.q(obs, tau_hats))


@pytest.mark.parametrize("dueling", [False, True])
def test_every_state_has_its_own_fractions(dueling: bool) -> None:
    """The quantiles of a batch are those of its states one at a time, whose fractions are then shared by the batch."""
    torch.manual_seed(0)
    net = MLPFQFNetwork(4, 3, (8, 6), num_quantiles=5, num_cosines=6, dueling=dueling)
    with torch.no_grad():
        net.fraction.linear.weight.normal_()
    obs = torch.randn(5, 4)
    quantiles, _, tau_hats = net(obs)
    actions = torch.tensor([0, 1, 2, 0, 1])
    chosen = net.q(obs, tau_hats, None, actions)
    for b in range(5):
        alone = net.q(obs[b : b + 1], tau_hats[b])[0]  # [3, 5]
        torch.testing.assert_close(quantiles[b], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(chosen[b], alone[actions[b]], rtol=1e-4, atol=1e-5)


def monotone_network(logits: list[float]) -> MLPFQFNetwork:
    """Z(x; tau) = x (1 - cos(pi tau)), increasing in tau for x > 0; fractions from fixed logits."""
    net = MLPFQFNetwork(1, 1, (), num_quantiles=len(logits), num_cosines=2)
    with torch.no_grad():
        net.q.embedding.weight.copy_(torch.tensor([[0.0, -1.0]]))
        net.q.embedding.bias.fill_(1.0)
        net.q.advantage.weight.fill_(1.0)
        net.q.advantage.bias.zero_()
        net.fraction.linear.weight.zero_()
        net.fraction.linear.bias.copy_(torch.tensor(logits))
    return net


def wasserstein(logits: np.ndarray, x: float) -> float:
    """W1 between Z(x; .) and its step approximation (Eq. 5), by a fine sum in float64."""
    width = np.exp(logits) / np.exp(logits).sum()
    taus = np.concatenate([[0.0], np.cumsum(width)])
    total = 0.0
    for low, high in itertools.pairwise(taus):
        grid = low + (high - low) * (np.arange(4000) + 0.5) / 4000
        middle = x * (1 - np.cos(np.pi * (low + high) / 2))
        total += float(np.abs(x * (1 - np.cos(np.pi * grid)) - middle).mean()) * (high - low)
    return total


def test_fraction_gradient_is_the_derivative_of_the_wasserstein_error() -> None:
    logits, xs, weights = [0.3, -0.4, 0.9, 0.1], [1.0, 2.5], [1.0, 0.6]
    algorithm = FQF(q_network=monotone_network(logits), fraction_learning_rate=1e-2, fraction_ent_coef=0.0)
    state = algorithm.init_state(0)
    batch = {
        "obs": torch.tensor([[x] for x in xs]), "next_obs": torch.ones(2, 1), "rewards": torch.zeros(2),
        "actions": torch.zeros(2, dtype=torch.int64), "discounts": torch.zeros(2), "weights": torch.tensor(weights),
    }  # fmt: skip
    new, _ = algorithm.train_step(state, batch, KEY)
    # RMSprop's first second moment is (1 - 0.95) g^2: its root is the gradient, the step has the opposite sign.
    net = algorithm.nets["fraction"]
    size = net.named(new.opt["fraction"]["v"])["linear.bias"].div(0.05).sqrt()
    step = net.named(new.params["fraction"] - state.params["fraction"])["linear.bias"]
    numerical, h = [], 1e-4
    for i in range(4):
        up, down = np.array(logits), np.array(logits)
        up[i] += h
        down[i] -= h
        slopes = [(wasserstein(up, x) - wasserstein(down, x)) / (2 * h) for x in xs]
        numerical.append(sum(w * s for w, s in zip(weights, slopes)) / 2)
    assert (-step.sign() * size).tolist() == pytest.approx(numerical, rel=5e-3, abs=1e-4)


@pytest.mark.slow
def test_learning_fractions_lowers_the_wasserstein_error() -> None:
    algorithm = FQF(
        q_network=monotone_network([1.5, 0.0, 0.0, -1.5]), learning_rate=0.0, fraction_learning_rate=1e-2,
        fraction_ent_coef=0.0,
    )  # fmt: skip
    net, errors = algorithm.nets["fraction"], []
    for _ in range(200):
        flat = algorithm.state.params["fraction"]
        named = net.named(flat)
        logits = (named["linear.weight"].sum(-1) + named["linear.bias"]).double().numpy()
        errors.append(wasserstein(logits, 1.0))
        algorithm.update(TERMINAL)
    assert errors[-1] < 0.75 * errors[0]
    best = min(wasserstein(np.random.default_rng(i).normal(0, 0.3, 4), 1.0) for i in range(300))
    assert errors[-1] < best + 0.005


@pytest.mark.slow
def test_entropy_bonus_evens_the_fractions_out() -> None:
    algorithm = FQF(
        q_network=monotone_network([2.0, 0.0, 0.0, -1.0]), learning_rate=0.0, fraction_learning_rate=1e-2,
        fraction_ent_coef=100.0,
    )  # fmt: skip
    entropies = [algorithm.update(TERMINAL).metrics["fraction_entropy"] for _ in range(250)]
    assert entropies[0] < 1.1
    assert entropies[-1] == pytest.approx(np.log(4), abs=0.01)


@pytest.mark.parametrize("double", [False, True])
def test_value_update_equals_plain_autograd(double: bool) -> None:
    """Fractions are constants of the quantile loss: no gradient reaches the features through them."""
    algorithm = make_algorithm("fqf", optimizer="sgd", learning_rate=1.0, double=double, **SMALL)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    fraction = state.params["fraction"] * 50.0  # uneven
    state = state._replace(
        params={**state.params, "fraction": fraction}, target={"q": algorithm.init_state(1).params["q"]}
    )
    nets = [MLPFQFNetwork(5, 3, (6,), num_quantiles=4, num_cosines=5) for _ in range(2)]
    for net, flat in zip(nets, (state.params["q"], state.target["q"])):
        algorithm.nets["q"].write_to(net.q, flat)
        algorithm.nets["fraction"].write_to(net.fraction, fraction)
    online, target = nets
    rows = torch.arange(BATCH)
    with torch.no_grad():
        z_next, taus, _ = target(batch["next_obs"])
        chooser, chooser_taus, _ = online(batch["next_obs"]) if double else (z_next, taus, None)
        greedy = (chooser * (chooser_taus[:, 1:] - chooser_taus[:, :-1])[:, None]).sum(-1).argmax(-1)
        goal = batch["rewards"][:, None] + batch["discounts"][:, None] * z_next[rows, greedy]
        widths = taus[:, 1:] - taus[:, :-1]
        assert float(widths.max() / widths.min()) > 1.5
    z, _, tau_hats = online(batch["obs"])
    # Each target quantile counts by its width: the sum of the losses against each of them alone.
    each = [quantile_huber(z[rows, batch["actions"]], goal[:, j : j + 1], tau_hats.detach()) for j in range(4)]
    loss = (torch.stack(each, -1) * widths).sum(-1)
    total = (batch["weights"] * loss).mean()
    total.backward()
    new, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["loss"]) == pytest.approx(float(total.detach()), rel=1e-5)
    gradient = algorithm.nets["q"].named(state.params["q"] - new.params["q"])
    for name, parameter in online.q.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_uneven_fractions_do_not_bias_the_values() -> None:
    """One state, rewards of -0.5 or 1.5, discount 0.8: the value is 0.5 / 0.2. Most fractions lie in the lower half;
    with targets that count alike it came out as -0.45."""
    torch.manual_seed(0)
    network = MLPFQFNetwork(1, 1, (16,), num_quantiles=8, num_cosines=8)
    with torch.no_grad():
        network.fraction.linear.weight.zero_()
        network.fraction.linear.bias.copy_(torch.linspace(-1.5, 1.5, 8))
    options: dict[str, Any] = {"tau": 0.1, "target_update_interval": 1, "fraction_learning_rate": 0.0}
    algorithm = FQF(q_network=network, learning_rate=1e-2, **options)
    batch = {
        "obs": torch.ones(32, 1), "next_obs": torch.ones(32, 1), "actions": torch.zeros(32, dtype=torch.int64),
        "rewards": torch.tensor([-0.5, 1.5]).repeat(16), "discounts": torch.full((32,), 0.8), "weights": torch.ones(32),
    }  # fmt: skip
    values = [algorithm.update(batch).metrics["q_value_mean"] for _ in range(300)]
    assert float(values[-1]) == pytest.approx(2.5, abs=0.25)


def test_the_two_optimisers_do_not_touch_each_other() -> None:
    results = {}
    for rate in (0.0, 1e-3):
        algorithm = make_algorithm("fqf", fraction_learning_rate=rate, **SMALL)
        results[rate] = (
            algorithm.init_state(0),
            *algorithm.train_step(algorithm.init_state(0), batch_for(algorithm), KEY),
        )
    (start, still, _), (_, moving, aux) = results[0.0], results[1e-3]
    assert torch.equal(still.params["q"], moving.params["q"])
    assert torch.equal(still.params["fraction"], start.params["fraction"])
    assert not torch.equal(moving.params["fraction"], start.params["fraction"])
    assert {"fraction_loss", "fraction_entropy"} <= set(aux.metrics)
    assert set(still.opt) == {"q", "fraction"}
    algorithm = make_algorithm("fqf", learning_rate=0.0, fraction_learning_rate=1e-3, **SMALL)
    new, _ = algorithm.train_step(algorithm.init_state(0), batch_for(algorithm), KEY)
    assert torch.equal(new.params["q"], start.params["q"])
    assert torch.equal(new.params["fraction"], moving.params["fraction"])


def test_q_weighs_quantiles_by_their_widths() -> None:
    algorithm = FQF(q_network=monotone_network([0.5, 0.0, -0.5]))
    width = np.exp([0.5, 0.0, -0.5]) / np.exp([0.5, 0.0, -0.5]).sum()
    taus = np.concatenate([[0.0], np.cumsum(width)])
    z = 2.0 * (1 - np.cos(np.pi * (taus[1:] + taus[:-1]) / 2))
    q = algorithm.q_values(algorithm.state.params, torch.tensor([[2.0]]))
    assert float(q[0, 0]) == pytest.approx(float((width * z).sum()), rel=1e-5)


def test_used_alone_keeps_both_networks() -> None:
    network = MLPFQFNetwork(4, 2, (8,), num_quantiles=5)
    before = copy.deepcopy(network.state_dict())
    algorithm = FQF(q_network=network, learning_rate=1e-3, fraction_learning_rate=1e-3)
    g = np.random.default_rng(0)
    batch = {"obs": g.normal(size=(16, 4)), "next_obs": g.normal(size=(16, 4)), "actions": g.integers(0, 2, 16),
             "rewards": g.normal(size=16), "dones": np.zeros(16)}  # fmt: skip
    algorithm.update(batch)
    moved = [name for name, value in network.state_dict().items() if not torch.equal(value, before[name])]
    assert {"q.advantage.2.weight", "fraction.linear.weight"} <= set(moved)


def test_bad_input() -> None:
    with pytest.raises(UserError, match="num_quantiles = 0: should be greater than or equal to 1"):
        make_algorithm("fqf", num_quantiles=0)
    with pytest.raises(UserError, match="num_quantiles = 0: must be at least 1"):
        MLPFQFNetwork(4, 2, num_quantiles=0)
    with pytest.raises(UserError, match="fqf needs a discrete action space"):
        FQF(spec_for("sac", "box"))
    with pytest.raises(UserError, match="needs a network that returns quantiles at proposed fractions"):
        FQF(q_network=MLPIQNNetwork(4, 2))
