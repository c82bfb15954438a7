"""Every value head with every option: what combines on paper must train, and feed prioritised replay."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import BATCH, assert_near, batch_for, make_algorithm, slow_unless

from rl_training import registry
from rl_training.algorithms.value.target_rules import TargetRule
from rl_training.data import PrioritizedReplayBuffer
from rl_training.envs.vectorize import make_vector_env
from rl_training.ops import rng
from rl_training.ops.tree import tree_map, tree_stack
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.loops import OffPolicyLoop

HEADS = ("dqn", "c51_dqn", "qr_dqn", "iqn", "fqf")
SMALL: dict[str, dict[str, Any]] = {
    "dqn": {}, "c51_dqn": {"num_atoms": 7}, "qr_dqn": {"num_quantiles": 5},
    "fqf": {"num_quantiles": 4, "num_cosines": 6},
    "iqn": {"num_quantiles": 4, "num_tau_samples": 5, "num_target_tau_samples": 3, "num_cosines": 6},
}  # fmt: skip
RULES: tuple[str, ...] = TargetRule.__args__  # type: ignore[attr-defined]
METRICS = {"loss", "q_value_mean", "target_mean", "td_error_mean"}
KEY = rng.key_from_seed(1)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("double", "dueling", "noisy"), itertools.product((False, True), repeat=3))
@pytest.mark.parametrize(
    ("prioritized", "n_step"),
    slow_unless(lambda prioritized, n_step: prioritized and n_step == 3, itertools.product((False, True), (1, 3))),
)
def test_every_combination_trains(
    head: str, double: bool, dueling: bool, noisy: bool, prioritized: bool, n_step: int
) -> None:
    envs = make_vector_env("CartPole-v1", seeds=(0,), num_envs=2, vectorization="sync")
    algorithm = registry.entry(head).load()(
        envs.spec, num_envs=2, hidden_sizes=[8], batch_size=8, buffer_size=64, learning_starts=24, double=double,
        dueling=dueling, noisy=noisy, prioritized=prioritized, n_step=n_step, **SMALL[head],
    )  # fmt: skip
    loop = OffPolicyLoop(algorithm, envs, (0,), 40, Executor("eager", torch.device("cpu")))
    before = loop.learner.train.params["q"].clone()
    loop.advance(40)
    envs.close()
    assert loop.gradient_steps >= 6
    assert set(loop.metrics) >= METRICS
    assert all(torch.isfinite(value).all() for value in loop.metrics.values())
    assert not torch.equal(loop.learner.train.params["q"], before)
    if prioritized:  # rows that were sampled carry their error, new ones the largest so far
        stored = loop.learner.tree["data"]["priority"]
        assert len(stored[stored > 0].unique()) > 4


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("double", [False, True])
def test_every_target_rule_works_with_every_head(head: str, rule: str, double: bool) -> None:
    """The expected target is the rule applied to expected values, whatever the head."""
    fields = {**SMALL[head], "v_min": -50.0, "v_max": 50.0, "num_atoms": 401} if head == "c51_dqn" else SMALL[head]
    algorithm = make_algorithm(head, target_rule=rule, double=double, rule_temperature=0.5, **fields)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state = state._replace(target={"q": algorithm.init_state(1).params["q"]})
    if head == "c51_dqn":  # mass away from the ends of the support, where the projection clips
        for flat in (state.params["q"], state.target["q"]):
            bias = algorithm.nets["q"].named(flat)["advantage.2.bias"].view(3, -1)
            bias -= algorithm.atoms() ** 2
    slow = {**state.params, **state.target}
    q_next, q_obs = algorithm.q_values(slow, batch["next_obs"]), algorithm.q_values(slow, batch["obs"])
    online = algorithm.q_values(state.params, batch["next_obs"])
    chooser = online if double or rule == "clipped_double" else q_next
    rewards, rows = batch["rewards"], torch.arange(BATCH)
    t, a = 0.5, batch["actions"]
    policy, epsilon = (chooser / t).softmax(-1), float(algorithm.epsilon(state.progress))
    soft = (policy * (q_next - t * policy.log())).sum(-1)
    best = chooser.argmax(-1)
    if rule == "expected_sarsa":
        value = (1 - epsilon) * q_next[rows, best] + epsilon * q_next.mean(-1)
    elif rule == "boltzmann":
        value = (policy * q_next).sum(-1)
    elif rule in ("soft", "munchausen"):
        value = soft
    elif rule == "mellowmax":
        value = soft - t * torch.tensor(3.0).log()
    elif rule == "clipped_double":
        value = torch.minimum(q_next[rows, best], online[rows, best])
    else:
        value = q_next[rows, best]
    if rule == "munchausen":
        rewards = rewards + 0.9 * (t * (q_obs / t).log_softmax(-1)[rows, a]).clamp(-1.0, 0.0)
    if rule == "advantage_learning":
        rewards = rewards - 0.9 * (q_obs.amax(-1) - q_obs[rows, a])
    expected = rewards + batch["discounts"] * value
    target, mean = algorithm.bootstrap(state, batch, KEY)
    if head == "c51_dqn":
        mean = (target * algorithm.atoms()).sum(-1)
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=2e-4)
    if head == "qr_dqn":
        torch.testing.assert_close(target.mean(-1), expected, rtol=1e-4, atol=1e-5)
    new, aux = algorithm.train_step(state, batch, KEY)
    assert aux.priority.shape == (BATCH,)
    assert (aux.priority >= 0).all()
    assert torch.isfinite(new.params["q"]).all()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rule", ["max", "munchausen", "expected_sarsa", "clipped_double"])
def test_seeds_as_an_axis_with_every_option(head: str, rule: str) -> None:
    fields = {"double": True, "dueling": True, "noisy": True, "hysteretic": 0.5, "target_rule": rule}
    algorithm = make_algorithm(head, **SMALL[head], **fields)
    states = [algorithm.init_state(seed) for seed in (0, 1)]
    batches = [batch_for(algorithm, seed) for seed in (0, 1)]
    keys = [rng.fold(KEY, seed) for seed in (0, 1)]

    def step(*arguments: Any) -> Any:  # vmap takes tensors only
        state, aux = algorithm.train_step(*arguments)
        return state, aux.priority

    together, priority = torch.vmap(step)(tree_stack(states), tree_stack(batches), torch.stack(keys))
    for i in (0, 1):
        alone, single = algorithm.train_step(states[i], batches[i], keys[i])
        assert_near(tree_map(lambda x, i=i: x[i], together.params), alone.params, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(priority[i], single.priority, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("head", HEADS)
def test_hysteretic_weighs_down_lowering_updates(head: str) -> None:
    """With hysteretic 0 only rows whose value should rise count; with 1 all of them."""
    batch = batch_for(make_algorithm(head, **SMALL[head]))
    results = {}
    for name, hysteretic in (("plain", 1.0), ("half", 0.5), ("none", 0.0)):
        algorithm = make_algorithm(head, hysteretic=hysteretic, **SMALL[head])
        results[name] = float(algorithm.train_step(algorithm.init_state(0), batch, KEY)[1].metrics["loss"])
    assert results["half"] == pytest.approx((results["plain"] + results["none"]) / 2, rel=1e-5)
    assert results["none"] < 0.95 * results["plain"]


@pytest.mark.parametrize("head", slow_unless(lambda head: head == "dqn", HEADS))
def test_last_td_errors_of_an_algorithm_used_alone(head: str) -> None:
    """With every option they are one number a row, and what a prioritised buffer takes: p = (|error| + eps)^alpha."""
    for double, dueling, noisy, n_step in itertools.product((False, True), (False, True), (False, True), (1, 3)):
        algorithm = make_algorithm(head, double=double, dueling=dueling, noisy=noisy, n_step=n_step, **SMALL[head])
        assert algorithm.last_td_errors is None
        buffer, rows = PrioritizedReplayBuffer(algorithm.spec, 64, n_step=n_step), batch_for(algorithm, size=64)
        for i in range(64):
            buffer.add(
                rows["obs"][i], rows["actions"][i], rows["rewards"][i], rows["next_obs"][i], rows["discounts"][i] == 0
            )
        batch = buffer.sample(BATCH)
        result = algorithm.update(batch)
        errors = algorithm.last_td_errors
        assert errors.shape == (BATCH,)
        assert (errors >= 0.0).all()
        assert len(errors.unique()) == len(batch["indices"].unique())
        assert set(result.metrics) >= METRICS
        buffer.update_priorities(batch["indices"], errors)
        torch.testing.assert_close(buffer.data["priority"][0, batch["indices"]], (errors + 1e-6) ** 0.6)
