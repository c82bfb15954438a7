"""Munchausen-DQN and the other target rules, on numbers small enough for a pocket calculator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import make_algorithm, spec_for

from rl_training.algorithms import DQN, MunchausenDQN
from rl_training.errors import UserError
from rl_training.models import MLPQNetwork


def linear(weight: list[list[float]]) -> MLPQNetwork:
    """Q = W x, no hidden layer, no bias."""
    net = MLPQNetwork(2, 2, ())
    with torch.no_grad():
        net.advantage.weight.copy_(torch.tensor(weight))
        net.advantage.bias.zero_()
    return net


# At next_obs (1, 0) the target network gives (1, 2) and the online network (3, 0.5); at obs (0, 1) the target: (4, 3).
ONLINE, TARGET = [[3.0, 0.0], [0.5, 0.0]], [[1.0, 4.0], [2.0, 3.0]]
BATCH = {
    "obs": torch.tensor([[0.0, 1.0]] * 2), "next_obs": torch.tensor([[1.0, 0.0]] * 2), "actions": torch.tensor([1, 1]),
    "rewards": torch.tensor([0.5, 0.5]), "discounts": torch.tensor([0.9, 0.0]), "weights": torch.ones(2),
}  # fmt: skip
P = 1.0 / (1.0 + math.e)  # softmax of (1, 2) at temperature 1: (P, 1 - P)
LOGSUMEXP = math.log(math.e + math.e**2)


def targets(rule: str, **fields: Any) -> list[float]:
    algorithm = DQN(q_network=linear(ONLINE), target_rule=rule, rule_temperature=1.0, **fields)
    state = algorithm.init_state(0)._replace(target={"q": algorithm.nets["q"].flatten(linear(TARGET))})
    return algorithm.bootstrap(state, BATCH, None)[0].tolist()


@pytest.mark.parametrize(
    ("rule", "fields", "reward", "value"),
    [
        ("max", {}, 0.5, 2.0),
        ("max", {"double": True}, 0.5, 1.0),  # the online network prefers action 0
        ("expected_sarsa", {"exploration_initial_eps": 0.2}, 0.5, 0.9 * 2.0 + 0.1 * 1.0),
        ("boltzmann", {}, 0.5, P * 1.0 + (1 - P) * 2.0),
        ("soft", {}, 0.5, LOGSUMEXP),
        ("mellowmax", {}, 0.5, LOGSUMEXP - math.log(2.0)),
        ("advantage_learning", {"rule_alpha": 0.5}, 0.5 - 0.5 * (4.0 - 3.0), 2.0),
        ("clipped_double", {}, 0.5, 1.0),  # online greedy action 0: min(3, 1)
        ("munchausen", {}, 0.5 + 0.9 * max(-1.0, math.log(P)), LOGSUMEXP),  # log pi(1 | obs) = log P = -1.31: clipped
        ("munchausen", {"munchausen_clip": -2.0, "rule_alpha": 0.5}, 0.5 + 0.5 * math.log(P), LOGSUMEXP),
    ],
)
def test_rule(rule: str, fields: dict[str, Any], reward: float, value: float) -> None:
    # The second row terminated: nothing of the next state counts, the bonus on the reward does.
    assert targets(rule, **fields) == pytest.approx([reward + 0.9 * value, reward], rel=1e-5)


def test_clipped_double_takes_the_online_value_where_it_is_smaller() -> None:
    algorithm = DQN(q_network=linear([[0.2, 0.0], [0.7, 0.0]]), target_rule="clipped_double")
    state = algorithm.init_state(0)._replace(target={"q": algorithm.nets["q"].flatten(linear(TARGET))})
    assert float(algorithm.bootstrap(state, BATCH, None)[0][0]) == pytest.approx(0.5 + 0.9 * 0.7)


def test_cold_soft_rules_become_max() -> None:
    for rule in ("boltzmann", "soft", "mellowmax"):
        algorithm = DQN(q_network=linear(ONLINE), target_rule=rule, rule_temperature=1e-3)
        state = algorithm.init_state(0)._replace(target={"q": algorithm.nets["q"].flatten(linear(TARGET))})
        assert float(algorithm.bootstrap(state, BATCH, None)[0][0]) == pytest.approx(0.5 + 0.9 * 2.0, abs=2e-3)


def test_hysteretic_by_hand() -> None:
    """Q(obs, 1) = 0 and 0: the first target is above, the second below; only the second is weighed down."""
    batch = {**BATCH, "rewards": torch.tensor([3.0, -3.0]), "discounts": torch.zeros(2)}
    algorithm = DQN(q_network=linear(ONLINE), hysteretic=0.25)
    _, aux = algorithm.train_step(algorithm.init_state(0), batch, torch.tensor(0))
    assert float(aux.metrics["loss"]) == pytest.approx((2.5 + 0.25 * 2.5) / 2)
    assert aux.priority.tolist() == pytest.approx([3.0, 3.0])


def test_munchausen_is_dqn_with_a_rule() -> None:
    algorithm = make_algorithm("munchausen_dqn")
    assert isinstance(algorithm, DQN)
    hp = algorithm.hp
    assert (hp.target_rule, hp.rule_temperature, hp.rule_alpha, hp.munchausen_clip) == ("munchausen", 0.03, 0.9, -1.0)


def test_bad_input() -> None:
    with pytest.raises(UserError, match="target_rule = 'maximum'"):
        make_algorithm("dqn", target_rule="maximum")
    with pytest.raises(UserError, match=r"rule_temperature = 0\.0: should be greater than 0"):
        make_algorithm("munchausen_dqn", rule_temperature=0.0)
    with pytest.raises(UserError, match="munchausen_dqn needs a discrete action space"):
        MunchausenDQN(spec_for("sac", "box"))
