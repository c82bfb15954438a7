"""QR-DQN by hand: targets, quantile Huber loss, greedy choice by the mean; and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_algorithm, spec_for

from rl_training.algorithms import QRDQN
from rl_training.errors import UserError
from rl_training.models import MLPIQNNetwork, MLPQRQNetwork
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def fixed(quantiles: list[list[float]]) -> MLPQRQNetwork:
    """Two actions whose quantiles do not depend on the observation."""
    net = MLPQRQNetwork(1, 2, (), num_quantiles=len(quantiles[0]))
    with torch.no_grad():
        net.advantage.weight.zero_()
        net.advantage.bias.copy_(torch.tensor(quantiles).flatten())
    return net


ONLINE = [[0.0, 1.0, 5.0], [1.5, 1.8, 2.1]]  # means 2 and 1.8, although action 1 is better in two of three quantiles
TARGET = [[1.0, 2.0, 6.0], [2.0, 4.0, 9.0]]  # means 3 and 5
BATCH = {
    "obs": torch.zeros(2, 1), "next_obs": torch.zeros(2, 1), "actions": torch.tensor([0, 1]),
    "rewards": torch.tensor([0.5, -1.0]), "discounts": torch.tensor([0.9, 0.0]), "weights": torch.tensor([1.0, 0.5]),
}  # fmt: skip


def set_up(**fields: Any) -> tuple[QRDQN, Any]:
    algorithm = QRDQN(q_network=fixed(ONLINE), optimizer="sgd", learning_rate=1.0, **fields)
    return algorithm, algorithm.init_state(0)._replace(target={"q": algorithm.nets["q"].flatten(fixed(TARGET))})


def brute_force(quantiles: list[float], targets: list[float], kappa: float) -> tuple[float, list[float]]:
    """Eq. 9 and 10 in loops: the loss of a sample, and its gradient."""
    n, loss, gradient = len(quantiles), 0.0, [0.0] * len(quantiles)
    for i, theta in enumerate(quantiles):
        tau = (2 * i + 1) / (2 * n)
        for target in targets:
            u = target - theta
            weight = abs(tau - (1.0 if u < 0 else 0.0))
            small = abs(u) <= kappa
            loss += weight * (0.5 * u * u if small else kappa * (abs(u) - 0.5 * kappa)) / kappa / len(targets)
            gradient[i] -= weight * (u if small else kappa * np.sign(u)) / kappa / len(targets)
    return loss, gradient


def test_greedy_by_the_mean() -> None:
    algorithm, state = set_up()
    assert algorithm.nets["q"](state.params["q"], torch.zeros(4, 1)).shape == (4, 2, 3)
    assert algorithm.q_values(state.params, torch.zeros(1, 1))[0].tolist() == pytest.approx([2.0, 1.8])
    assert algorithm.act(np.zeros((3, 1), np.float32), deterministic=True).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("double", "action"), [(False, 1), (True, 0)])
def test_target(double: bool, action: int) -> None:
    algorithm, state = set_up(double=double)
    target, mean = algorithm.bootstrap(state, BATCH, None)
    assert target[0].tolist() == pytest.approx([0.5 + 0.9 * z for z in TARGET[action]])
    assert target[1].tolist() == [-1.0, -1.0, -1.0]  # terminal
    assert mean.tolist() == pytest.approx([0.5 + 0.9 * sum(TARGET[action]) / 3, -1.0])


@pytest.mark.parametrize("kappa", [1.0, 0.5])
def test_update_equals_brute_force(kappa: float) -> None:
    algorithm, state = set_up(kappa=kappa)
    targets, _ = algorithm.bootstrap(state, BATCH, None)
    new, aux = algorithm.train_step(state, BATCH, KEY)
    rows = [brute_force(ONLINE[a], targets[a].tolist(), kappa) for a in (0, 1)]  # row b takes action b
    assert float(aux.metrics["loss"]) == pytest.approx((rows[0][0] + 0.5 * rows[1][0]) / 2, rel=1e-5)
    moved = algorithm.nets["q"].named(new.params["q"])["advantage.bias"].view(2, 3)
    for action, weight in ((0, 1.0), (1, 0.5)):
        expected = [z - weight * g / 2 for z, g in zip(ONLINE[action], rows[action][1])]
        assert moved[action].tolist() == pytest.approx(expected, abs=1e-5)
    errors = [abs(2.0 - float(targets[0].mean())), 1.8 + 1.0]
    assert aux.priority.tolist() == pytest.approx(errors, rel=1e-5)
    assert float(aux.metrics["td_error_mean"]) == pytest.approx((errors[0] + 0.5 * errors[1]) / 2, rel=1e-5)


def test_one_quantile_is_the_median() -> None:
    algorithm = make_algorithm("qr_dqn", num_quantiles=1)
    state = algorithm.init_state(0)
    returns, q = algorithm.predict(state.params, torch.zeros(6, 5), None)
    assert returns.shape == (6, 3, 1)
    assert q.shape == (6, 3)


@pytest.mark.slow
def test_learns_the_quantiles_of_the_reward() -> None:
    """Rewards spread evenly over [0, 1): the quantile at tau is tau."""
    algorithm = make_algorithm("qr_dqn", learning_rate=3e-3, num_quantiles=4, kappa=0.0)
    n = 400
    batch = {
        "obs": torch.ones(n, 5), "next_obs": torch.ones(n, 5), "actions": torch.full((n,), 2),
        "rewards": (torch.arange(n) + 0.5) / n, "discounts": torch.zeros(n), "weights": torch.ones(n),
    }  # fmt: skip
    state = algorithm.init_state(0)
    for i in range(600):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    quantiles, _ = algorithm.predict(state.params, batch["obs"][:1], None)
    assert quantiles[0, 2].tolist() == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.02)


def test_used_alone() -> None:
    algorithm = QRDQN(q_network=MLPQRQNetwork(4, 2, num_quantiles=8), learning_rate=1e-3)
    generator = np.random.default_rng(0)
    batch = {
        "obs": generator.standard_normal((16, 4)), "next_obs": generator.standard_normal((16, 4)),
        "actions": generator.integers(0, 2, 16), "rewards": np.ones(16), "dones": np.arange(16) % 2,
    }  # fmt: skip
    first = algorithm.update(batch, global_step=0)
    for step in range(1, 100):
        last = algorithm.update(batch, global_step=step)
    assert last.metrics["loss"] < 0.5 * first.metrics["loss"]
    assert algorithm.last_td_errors.shape == (16,)
    other = QRDQN(q_network=MLPQRQNetwork(4, 2, num_quantiles=8))
    other.load_state_dict(algorithm.state_dict())
    obs = generator.standard_normal((5, 4)).astype(np.float32)
    assert (other.act(obs, deterministic=True) == algorithm.act(obs, deterministic=True)).all()


def test_bad_input() -> None:
    with pytest.raises(UserError, match="num_quantiles = 0: should be greater than or equal to 1"):
        make_algorithm("qr_dqn", num_quantiles=0)
    with pytest.raises(UserError, match="num_quantiles = 0: must be at least 1"):
        MLPQRQNetwork(4, 2, num_quantiles=0)
    with pytest.raises(UserError, match="qr_dqn needs a discrete action space"):
        QRDQN(spec_for("sac", "box"))
    with pytest.raises(UserError, match="needs a network that returns quantiles per action"):
        QRDQN(q_network=MLPIQNNetwork(4, 2))
    with pytest.raises(UserError, match="num_quantiles = 9, but the network that was passed in has 8"):
        QRDQN(q_network=MLPQRQNetwork(4, 2, num_quantiles=8), num_quantiles=9)
    with pytest.raises(UserError, match="Did you mean 'num_quantiles'"):
        make_algorithm("qr_dqn", num_quantile=5)
