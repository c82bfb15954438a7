"""CrossQ: batch renormalisation against torch's batch norm, the joint pass, statistics as state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BATCH, batch_for, make_algorithm

from rl_training.models.renorm import BatchRenorm
from rl_training.ops import rng
from rl_training.ops.tree import tree_items, tree_stack

KEY = rng.key_from_seed(0)
EVERY = torch.ones(16, dtype=torch.bool)


def test_before_its_warm_up_it_is_batch_normalisation() -> None:
    torch.manual_seed(0)
    ours, plain = BatchRenorm(1, 4), torch.nn.BatchNorm1d(4, eps=1e-3, momentum=0.01)
    statistics = ours.initial()
    for _ in range(5):
        x = 3.0 * torch.randn(16, 4) + 2.0
        out, statistics = ours(x.unsqueeze(0), statistics, EVERY)
        torch.testing.assert_close(out[0], plain(x))
    torch.testing.assert_close(statistics["mean"][0, 0], plain.running_mean)
    # torch's running variance is the unbiased one, ours the biased one of the paper: n / (n - 1) apart.
    fresh = 0.99**5
    torch.testing.assert_close(
        statistics["var"][0, 0] - fresh, (plain.running_var - fresh) * 15.0 / 16.0, rtol=1e-4, atol=1e-5
    )
    out, same = ours(x.unsqueeze(0), statistics, None)
    expected = (x - statistics["mean"][0]) / torch.sqrt(statistics["var"][0] + 1e-3)
    torch.testing.assert_close(out[0], expected)
    assert same is statistics


def test_after_the_warm_up_it_is_corrected_towards_the_running_statistics() -> None:
    torch.manual_seed(0)
    layer = BatchRenorm(1, 2, warmup=3)
    running = {"mean": torch.tensor([[[1.0, -400.0]]]), "var": torch.tensor([[[4.0, 1.0]]]), "count": torch.tensor(3.0)}
    x = torch.randn(1, 16, 2)
    out, _ = layer(x, running, EVERY)
    # Within the bounds the result is the running normalisation; beyond them r and d are cut (3 and 5).
    torch.testing.assert_close(out[..., 0], ((x - 1.0) / (4.0 + 1e-3) ** 0.5)[..., 0])
    mean, deviation = x[..., 1].mean(), torch.sqrt(x[..., 1].var(correction=0) + 1e-3)
    r = deviation / (1.0 + 1e-3) ** 0.5
    torch.testing.assert_close(out[..., 1], (x[..., 1] - mean) / deviation * r + 5.0)
    early, _ = layer(x, {**running, "count": torch.tensor(2.0)}, EVERY)
    torch.testing.assert_close(early.mean(1), torch.zeros(1, 2), atol=1e-5, rtol=0)


def test_masked_rows_do_not_enter_the_statistics() -> None:
    torch.manual_seed(0)
    layer, x = BatchRenorm(2, 3), torch.randn(2, 16, 3)
    mask = torch.arange(16) < 10
    _, some = layer(x, layer.initial(), mask)
    _, cut = layer(x[:, :10], layer.initial(), mask[:10])
    torch.testing.assert_close(some["mean"], cut["mean"])
    torch.testing.assert_close(some["var"], cut["var"])


def joint_loss(algorithm: Any, state: Any, batch: Any, next_action: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
    """Eq. 3 with torch's own batch norm, one critic at a time."""
    named = algorithm.nets["critic"].named(state.params["critic"])
    x = torch.cat([torch.cat([batch["obs"], batch["actions"]], -1), torch.cat([batch["next_obs"], next_action], -1)])
    losses, values = [], []
    for e in range(2):
        h = torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-3)
        h = torch.relu(h @ named["torso.linears.0.weight"][e] + named["torso.linears.0.bias"][e])
        h = torch.nn.functional.batch_norm(h, None, None, training=True, eps=1e-3)
        values.append((h * named["head.weight"][e]).sum(-1) + named["head.bias"][e])
    q = torch.stack(values)
    target = batch["rewards"] + batch["discounts"] * (q[:, BATCH:].amin(0) + bonus)
    losses = 0.5 * (q[:, :BATCH] - target) ** 2
    return losses.sum(0)


def test_joint_pass_by_hand() -> None:
    algorithm = make_algorithm("crossq")
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    next_action, bonus = batch["actions"].roll(1, 0), torch.linspace(-1.0, 1.0, BATCH)
    loss, report = algorithm.critic.loss(state.params["critic"], state, batch, next_action, bonus, KEY)
    torch.testing.assert_close(loss, joint_loss(algorithm, state, batch, next_action, bonus), rtol=1e-4, atol=1e-5)
    inputs = torch.cat(
        [torch.cat([batch["obs"], batch["actions"]], -1), torch.cat([batch["next_obs"], next_action], -1)]
    )
    expected = (0.01 * inputs.mean(0)).expand(2, 1, -1)
    torch.testing.assert_close(report.extra["critic_norm"]["0"]["mean"], expected)


def test_no_gradient_flows_through_the_target() -> None:
    algorithm = make_algorithm("crossq")
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    batch["discounts"] = torch.ones(BATCH)
    params = state.params["critic"].clone().requires_grad_()
    loss, report = algorithm.critic.loss(params, state, batch, batch["actions"], torch.zeros(BATCH), KEY)
    assert not report.target.requires_grad
    assert loss.requires_grad
    assert state.target == {}


def test_statistics_under_vmap_equal_separate_runs_and_obey_the_delay() -> None:
    algorithm = make_algorithm("crossq", policy_delay=2)
    seeds = (3, 5)
    singles = []
    for seed in seeds:
        state, counts = algorithm.init_state(seed), []
        for i in range(4):
            state, _ = algorithm.train_step(
                state, batch_for(algorithm, seed=10 * seed + i), rng.fold(KEY, 10 * seed + i)
            )
            counts.append(
                (float(state.extra["critic_norm"]["0"]["count"]), float(state.extra["actor_norm"]["0"]["count"]))
            )
        assert counts == [(1.0, 1.0), (2.0, 1.0), (3.0, 2.0), (4.0, 2.0)]
        singles.append(state.extra)
    study = tree_stack([algorithm.init_state(seed) for seed in seeds])
    for i in range(4):
        batch = tree_stack([batch_for(algorithm, seed=10 * seed + i) for seed in seeds])
        keys = torch.stack([rng.fold(KEY, 10 * seed + i) for seed in seeds])
        study, _ = torch.vmap(lambda *a: (algorithm.train_step(*a)[0], 0.0), out_dims=(0, None))(study, batch, keys)
    together = dict(tree_items(study.extra))
    assert any(name.startswith("critic_norm.1") for name in together)
    for k, single in enumerate(singles):
        for name, x in tree_items(single):
            torch.testing.assert_close(together[name][k], x, rtol=1e-4, atol=2e-5, msg=name)
    assert not torch.allclose(together["critic_norm.0.mean"][0], together["critic_norm.0.mean"][1])


def test_acting_uses_the_running_statistics_and_changes_none() -> None:
    algorithm = make_algorithm("crossq")
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    for i in range(3):
        state, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), rng.fold(KEY, i))
    whole = algorithm.greedy(state, batch["obs"])
    single = torch.cat([algorithm.greedy(state, batch["obs"][i : i + 1]) for i in range(BATCH)])
    torch.testing.assert_close(whole, single)  # an action does not depend on who else is in the batch


def test_paper_settings() -> None:
    algorithm = make_algorithm("crossq", critic_hidden_sizes=[32])
    assert (algorithm.optim.beta1, algorithm.hp.policy_delay, algorithm.targets) == (0.5, 3, ())
    assert algorithm.nets["critic"].module.torso.features == 32
    assert algorithm.nets["actor"].module.features == 16
    assert pytest.approx(1e-3) == algorithm.hp.learning_rate.start
