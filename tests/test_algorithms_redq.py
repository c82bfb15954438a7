"""REDQ's random subset and averaged policy value; DroQ's dropout."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from helpers import ACTION_DIM, OBS_DIM, batch_for, make_algorithm, spec_for

from rl_training.algorithms import REDQ
from rl_training.errors import UserError
from rl_training.models import EnsembleCritic, MLPREDQModel
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def test_target_is_the_minimum_over_the_drawn_critics() -> None:
    algorithm = make_algorithm("redq", num_critics=5, num_target_critics=2)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    action = batch["actions"]
    every = algorithm.nets["critic"](state.target["critic"], batch["next_obs"], action)  # [5, B]
    seen = set()
    for i in range(20):
        key = rng.fold(KEY, i)
        drawn = algorithm.critic.subset(rng.fold(key, 0)).tolist()
        got = algorithm.critic.next_q(state.target["critic"], batch["next_obs"], action, key)
        expected = torch.stack([every[e] for e in drawn]).amin(0)
        torch.testing.assert_close(got, expected)
        assert not torch.allclose(got, every.amin(0), atol=1e-4) or set(every.argmin(0).tolist()) <= set(drawn)
        seen.add(tuple(sorted(drawn)))
    assert len(seen) > 5


def test_subsets_are_pairs_without_repetition_and_uniform() -> None:
    algorithm = make_algorithm("redq", num_critics=4, num_target_critics=2)
    draws = torch.vmap(lambda i: algorithm.critic.subset(rng.fold(KEY, i)))(torch.arange(6000)).sort(-1).values.tolist()
    counts = Counter(map(tuple, draws))
    assert set(counts) == set(itertools.combinations(range(4), 2))
    assert min(counts.values()) > 880  # 1000 expected, standard deviation 29
    assert max(counts.values()) < 1120


def test_members_equal_the_rows_of_the_whole_ensemble() -> None:
    torch.manual_seed(0)
    critic = EnsembleCritic(spec_for("redq"), 4, (8, 8), layer_norm=True)
    torch.nn.init.normal_(critic.hidden[1].weight)
    obs, actions = torch.randn(7, OBS_DIM), torch.randn(7, ACTION_DIM)
    members = torch.tensor([3, 1])
    torch.testing.assert_close(critic(obs, actions, None, members), critic(obs, actions)[members])


def test_policy_climbs_the_mean_and_learns_at_its_own_rhythm() -> None:
    algorithm = make_algorithm("redq", num_critics=3, policy_delay=4)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    q = algorithm.nets["critic"](state.params["critic"], batch["obs"], batch["actions"])
    value = algorithm.critic.policy_value(state.params["critic"], {}, batch["obs"], batch["actions"], None)
    torch.testing.assert_close(value, (q[0] + q[1] + q[2]) / 3.0)
    for i in range(9):
        new, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), rng.fold(KEY, i))
        assert torch.equal(new.params["actor"], state.params["actor"]) == (i % 4 != 0)
        assert torch.equal(new.extra["log_alpha"], state.extra["log_alpha"]) == (i % 4 != 0)
        assert not torch.equal(new.target["critic"], state.target["critic"])
        state = new
    assert make_algorithm("redq").hp.gradient_steps == make_algorithm("redq").hp.policy_delay == 20


def test_dropout_keeps_the_mean_drops_the_share_and_is_off_without_a_key() -> None:
    torch.manual_seed(0)
    critic = EnsembleCritic(spec_for("droq"), 2, (4000,), activation="elu", dropout=0.25)
    plain = EnsembleCritic(spec_for("droq"), 2, (4000,), activation="elu")
    plain.load_state_dict(critic.state_dict())
    obs, actions = torch.randn(3, OBS_DIM), torch.randn(3, ACTION_DIM)
    assert torch.equal(critic(obs, actions), plain(obs, actions))
    keep = rng.uniform(rng.fold(KEY, 0), (2, 3, 4000)) >= 0.25
    assert float(keep.float().mean()) == pytest.approx(0.75, abs=0.01)
    before = critic.hidden[0](torch.cat([obs, actions], -1))
    expected = critic.head(torch.nn.functional.elu(before * keep / 0.75))
    torch.testing.assert_close(critic(obs, actions, KEY), expected)
    assert not torch.equal(critic(obs, actions, KEY), critic(obs, actions, rng.fold(KEY, 1)))


def test_droq_is_two_regularised_critics() -> None:
    algorithm = make_algorithm("droq")
    critic = algorithm.nets["critic"].module
    assert (critic.members, critic.dropout) == (2, 0.01)
    assert [type(layer).__name__ for layer in critic.hidden] == ["EnsembleLinear", "EnsembleNorm", "ReLU"]
    strong = make_algorithm("droq", dropout=0.5)
    state, batch = strong.init_state(0), batch_for(strong)
    first, _ = strong.train_step(state, batch, KEY)
    second, _ = strong.train_step(state, batch, rng.fold(KEY, 1))
    assert not torch.equal(first.params["critic"], second.params["critic"])
    assert torch.equal(strong.value(state, batch["obs"]), strong.value(state, batch["obs"]))  # no dropout in evaluation


def test_ensemble_smaller_than_the_subset() -> None:
    with pytest.raises(UserError, match=r"redq: num_target_critics = 3 cannot be drawn from an ensemble of 2"):
        make_algorithm("redq", num_critics=2, num_target_critics=3)
    with pytest.raises(UserError, match="cannot be drawn from an ensemble of 2"):
        REDQ(model=MLPREDQModel(3, 1, (8,), num_critics=2), num_target_critics=4)
    assert REDQ(model=MLPREDQModel(3, 1, (8,))).critic.members == 10
