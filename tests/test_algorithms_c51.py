"""C51 by hand: projection, loss, gradient and priority with weights set by hand; and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import make_algorithm, spec_for
from torch import Tensor

from rl_training.algorithms import C51DQN
from rl_training.errors import UserError
from rl_training.models import MLPC51QNetwork, MLPQNetwork
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def fixed(logits: list[list[float]], **support: float) -> MLPC51QNetwork:
    """Two actions whose logits do not depend on the observation."""
    net = MLPC51QNetwork(1, 2, (), num_atoms=len(logits[0]), **support)  # type: ignore[arg-type]
    with torch.no_grad():
        net.advantage.weight.zero_()
        net.advantage.bias.copy_(torch.tensor(logits).flatten())
    return net


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


SUPPORT = {"v_min": -1.0, "v_max": 1.0}
ONLINE = [log(0.2, 0.3, 0.5), log(0.6, 0.3, 0.1)]  # values 0.3 and -0.5
TARGET = [log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5)]  # values -0.25 and 0.25


def set_up(**fields: Any) -> tuple[C51DQN, Any]:
    algorithm = C51DQN(
        q_network=fixed(ONLINE, **SUPPORT), optimizer="sgd", learning_rate=1.0, max_grad_norm=0.0, **fields
    )
    flat = algorithm.nets["q"].flatten(fixed(TARGET, **SUPPORT))
    return algorithm, algorithm.init_state(0)._replace(target={"q": flat})


def batch_of(rewards: list[float], discounts: list[float]) -> dict[str, Tensor]:
    n = len(rewards)
    return {
        "obs": torch.zeros(n, 1), "next_obs": torch.zeros(n, 1), "actions": torch.zeros(n, dtype=torch.int64),
        "rewards": torch.tensor(rewards), "discounts": torch.tensor(discounts), "weights": torch.ones(n),
    }  # fmt: skip


def test_values_are_means() -> None:
    algorithm, state = set_up()
    assert algorithm.q_values(state.params, torch.zeros(1, 1))[0].tolist() == pytest.approx([0.3, -0.5], abs=1e-6)
    assert float(algorithm.value(state, torch.zeros(1, 1))) == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize(
    ("double", "reward", "discount", "expected"),
    [
        # The target network's greedy action is 1, with masses (.25, .25, .5) at (-1, 0, 1).
        (False, 0.0, 1.0, [0.25, 0.25, 0.5]),
        (False, 0.25, 0.0, [0.0, 0.75, 0.25]),  # terminal: all mass at the reward
        (False, 5.0, 1.0, [0.0, 0.0, 1.0]),  # clipped to v_max
        (False, -0.5, 1.0, [0.25 + 0.125, 0.125 + 0.25, 0.25]),  # atoms at -1.5 (clipped), -0.5, 0.5
        (False, 0.0, 0.5**3, [0.03125, 0.90625, 0.0625]),  # three steps: atoms at -1/8, 0, 1/8
        # The online network's greedy action is 0, with the target's masses (.5, .25, .25).
        (True, 0.0, 1.0, [0.5, 0.25, 0.25]),
    ],
)
def test_projection(double: bool, reward: float, discount: float, expected: list[float]) -> None:
    algorithm, state = set_up(double=double)
    target, _ = algorithm.bootstrap(state, batch_of([reward], [discount]), None)
    assert target[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_loss_gradient_and_priority() -> None:
    algorithm, state = set_up()
    new, aux = algorithm.train_step(state, batch_of([0.25, 0.0], [0.0, 1.0]), KEY)
    probs, targets = [0.2, 0.3, 0.5], [[0.0, 0.75, 0.25], [0.25, 0.25, 0.5]]
    losses = [-sum(m * math.log(p) for m, p in zip(row, probs)) for row in targets]
    entropies = [-sum(m * math.log(m) for m in row if m > 0) for row in targets]
    assert float(aux.metrics["loss"]) == pytest.approx(sum(losses) / 2, abs=1e-6)
    # Rainbow prioritises by the Kullback-Leibler divergence.
    assert aux.priority.tolist() == pytest.approx([a - b for a, b in zip(losses, entropies)], abs=1e-6)
    assert float(aux.metrics["q_value_mean"]) == pytest.approx(0.3, abs=1e-6)
    assert float(aux.metrics["target_mean"]) == pytest.approx((0.25 + 0.25) / 2, abs=1e-6)
    assert float(aux.metrics["td_error_mean"]) == pytest.approx(0.05, abs=1e-6)
    # d cross entropy / d logits = p - m; the step size is 1 and action 1 was not taken.
    moved = algorithm.nets["q"].named(new.params["q"])["advantage.bias"].view(2, 3)
    for i in range(3):
        gradient = probs[i] - (targets[0][i] + targets[1][i]) / 2
        assert float(moved[0, i]) == pytest.approx(ONLINE[0][i] - gradient, abs=1e-6)
    assert moved[1].tolist() == pytest.approx(ONLINE[1])


def test_expected_sarsa_mixes_distributions() -> None:
    algorithm, state = set_up(target_rule="expected_sarsa", exploration_initial_eps=0.4)
    target, _ = algorithm.bootstrap(state, batch_of([0.0], [1.0]), None)
    mixed = [0.8 * a + 0.2 * b for a, b in zip([0.25, 0.25, 0.5], [0.5, 0.25, 0.25])]
    assert target[0].tolist() == pytest.approx(mixed, abs=1e-6)


def test_learns_a_bernoulli_reward() -> None:
    algorithm = make_algorithm("c51_dqn", learning_rate=3e-3, num_atoms=11, v_min=0.0, v_max=1.0)
    batch = {
        "obs": torch.ones(400, 5), "next_obs": torch.ones(400, 5), "actions": torch.zeros(400, dtype=torch.int64),
        "rewards": (torch.arange(400) < 100).float(), "discounts": torch.zeros(400), "weights": torch.ones(400),
    }  # fmt: skip
    state = algorithm.init_state(0)
    for i in range(300):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    probs, q = algorithm.predict(state.params, batch["obs"][:1], None)
    assert float(probs[0, 0, 0]) == pytest.approx(0.75, abs=0.02)
    assert float(probs[0, 0, -1]) == pytest.approx(0.25, abs=0.02)
    assert float(q[0, 0]) == pytest.approx(0.25, abs=0.02)


def test_rainbow_is_c51_with_every_option() -> None:
    rainbow = make_algorithm("rainbow_dqn")
    assert isinstance(rainbow, C51DQN)
    hp = rainbow.hp
    assert (hp.double, hp.dueling, hp.noisy, hp.prioritized, hp.n_step) == (True, True, True, True, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"v_min": 1.0, "v_max": 1.0}, "v_min = 1 must be below v_max = 1"),
        ({"v_min": 2.0, "v_max": -2.0}, "v_min = 2 must be below v_max = -2"),
        ({"num_atoms": 1}, "num_atoms = 1: should be greater than or equal to 2"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_algorithm("c51_dqn", **fields)
    with pytest.raises(UserError, match=message.split(":")[0]):
        MLPC51QNetwork(4, 2, **fields)


def test_bad_networks_and_spaces() -> None:
    with pytest.raises(UserError, match="c51_dqn needs a discrete action space"):
        C51DQN(spec_for("sac", "box"))
    with pytest.raises(UserError, match="returns logits of atoms per action, not one value"):
        C51DQN(q_network=MLPQNetwork(4, 2))
    with pytest.raises(UserError, match=r"v_max = 10\.0, but the network that was passed in has 200\.0"):
        C51DQN(q_network=MLPC51QNetwork(4, 2, v_max=200.0), v_min=-10.0, v_max=10.0)
