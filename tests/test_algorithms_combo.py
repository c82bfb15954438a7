"""COMBO: the conservative term row by row, what it owns, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_bits, batch_for, make_algorithm

from rl_training.algorithms.continuous.critics.penalised import ConservativeCritic
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

KEY = rng.key_from_seed(9)


def test_values_go_down_where_the_model_goes_and_up_on_the_data() -> None:
    """Eq. 2: beta (mean over the rollouts of the soft maximum - mean over the data of Q), for each critic."""
    combo: Any = make_algorithm("combo", batch_size=8, real_ratio=0.25, cql_alpha=3.0)
    critic, state, batch = combo.sac.critic, combo.init_state(0), batch_for(combo, size=8)
    assert type(combo.sac).name == "cql"
    assert critic.options.cql_alpha == 3.0
    inner = combo.policy_state(state)
    next_action, bonus = batch["actions"], torch.zeros(8)

    def loss_of(alpha: float, **columns: Any) -> torch.Tensor:
        weighted = ConservativeCritic(critic.base, critic.options.model_copy(update={"cql_alpha": alpha}))
        return weighted.loss(inner.params["critic"], inner, {**batch, **columns}, next_action, bonus, KEY)[0]

    real = torch.arange(8) < 2
    term = loss_of(3.0, real=real) - loss_of(0.0, real=real)
    soft = critic.soft_maximum(inner.params["critic"], inner, batch, rng.fold(KEY, 2))  # [2, 8]
    data = critic.values(inner.params["critic"], batch["obs"], batch["actions"])
    by_hand = 3.0 * sum(soft[e, 2:].mean() - data[e, :2].mean() for e in range(2))
    torch.testing.assert_close(term.mean(), by_hand, rtol=1e-4, atol=1e-4)
    assert torch.allclose(term[:2], -3.0 * 4.0 * data[:, :2].sum(0), atol=1e-4)  # a real row: pushed up only
    everywhere = loss_of(3.0) - loss_of(0.0)  # rows of one kind: CQL itself
    torch.testing.assert_close(everywhere, 3.0 * (soft - data).sum(0), rtol=1e-4, atol=1e-4)


def test_the_phase_marks_its_real_rows() -> None:
    combo: Any = make_algorithm("combo", batch_size=16, real_ratio=0.25)
    phase = combo.policy_phase()
    assert (phase.batch_size, phase.also) == (4, ("synthetic", 12))
    state, batch = combo.init_state(0), batch_for(combo, size=16)
    found, _ = phase.step(state, batch, KEY)
    wanted, _ = combo.policy_step(state, {**batch, "real": torch.arange(16) < 4}, KEY)
    assert_same_bits(found.params, wanted.params)
    other, _ = combo.policy_step(state, {**batch, "real": torch.arange(16) < 5}, KEY)
    assert not torch.equal(found.params["critic"], other.params["critic"])


def test_rewards_carry_no_penalty_by_default() -> None:
    combo: Any = make_algorithm("combo", termination="none")
    mbpo: Any = make_algorithm("mbpo", termination="none")
    obs = batch_for(combo, size=20)["obs"]
    start = {"frontier": {"obs": obs, "alive": torch.ones(20, dtype=torch.bool)}}
    state = combo.init_state(0)
    found = combo.imagine(state, start, KEY)[1].rows
    wanted = mbpo.imagine(tree_map(torch.clone, state), start, KEY)[1].rows
    assert torch.equal(found["rewards"], wanted["rewards"])


def test_refuses_batches_of_one_kind() -> None:
    for ratio in (0.0, 1.0, 0.01):
        with pytest.raises(UserError, match="real_ratio"):
            make_algorithm("combo", real_ratio=ratio)
