"""TQC's truncation and loss against loops."""

from __future__ import annotations

import pytest
import torch
from helpers import BATCH, batch_for, make_algorithm

from rl_training.algorithms.continuous.critics.quantile import truncate
from rl_training.errors import UserError
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


@pytest.mark.parametrize("drop", [0, 1, 3])
def test_truncation_by_brute_force(drop: int) -> None:
    atoms = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    kept = truncate(atoms, drop)
    assert kept.shape == (4, 3 * (5 - drop))
    for b in range(4):
        pooled = sorted(float(atoms[e, b, m]) for e in range(3) for m in range(5))
        assert kept[b].tolist() == pooled[: len(pooled) - 3 * drop]  # the largest of the pool, not of each critic


def test_critic_loss_by_brute_force() -> None:
    algorithm = make_algorithm("tqc", num_critics=2, num_quantiles=4, top_quantiles_to_drop_per_net=1)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    bonus = torch.linspace(-1.0, 1.0, BATCH)
    next_action = batch["actions"].roll(1, 0)
    loss, report = algorithm.critic.loss(state.params["critic"], state, batch, next_action, bonus, KEY)
    net = algorithm.nets["critic"]
    slow = net(state.target["critic"], batch["next_obs"], next_action)
    fast = net(state.params["critic"], batch["obs"], batch["actions"])
    for b in (0, 7, BATCH - 1):
        pooled = sorted(slow[:, b].flatten().tolist())[:6]
        goals = [float(batch["rewards"][b] + batch["discounts"][b] * (z + bonus[b])) for z in pooled]
        total = 0.0
        for e in range(2):
            for m in range(4):
                for goal in goals:
                    error = goal - float(fast[e, b, m])
                    huber = 0.5 * error**2 if abs(error) <= 1.0 else abs(error) - 0.5
                    total += abs((m + 0.5) / 4 - (error < 0)) * huber
        assert float(loss[b]) == pytest.approx(total / (2 * 4 * 6), rel=1e-4)
        assert float(report.target[b]) == pytest.approx(sum(goals) / 6, rel=1e-4, abs=1e-6)


def test_policy_climbs_the_untruncated_mean() -> None:
    algorithm = make_algorithm("tqc")
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    atoms = algorithm.nets["critic"](state.params["critic"], batch["obs"], batch["actions"])
    assert atoms.shape == (2, BATCH, 25)
    value = algorithm.critic.policy_value(state.params["critic"], {}, batch["obs"], batch["actions"], None)
    torch.testing.assert_close(value, atoms.permute(1, 0, 2).reshape(BATCH, 50).mean(-1))


def test_dropping_everything_is_an_error() -> None:
    with pytest.raises(UserError, match="top_quantiles_to_drop_per_net = 25 leaves nothing of num_quantiles = 25"):
        make_algorithm("tqc", top_quantiles_to_drop_per_net=25)
