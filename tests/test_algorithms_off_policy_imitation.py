"""SQIL and IQ-Learn: their objectives against plain autograd on small batches, and the expert's half of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ACTION_DIM, BATCH, assert_same_bits, batch_for, config_for, make_algorithm, modules_of
from scipy.optimize import minimize
from torch import Tensor

from rl_training.algorithms.imitation.iq_learn import iq_loss
from rl_training.data import TransitionDataset
from rl_training.data.dataset_files import write_dataset
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

KEY = rng.key_from_seed(4)
RATE = 0.1  # of plain gradient descent, so that a step shows the gradient


def after_descent(algorithm: Any, state: Any, name: str, loss: Tensor, modules: dict[str, Any]) -> Tensor:
    """The flat parameters of a network after a step of gradient descent on `loss`, by plain autograd."""
    module = modules[name]
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients):
            parameter -= RATE * gradient
    return algorithm.nets[name].flatten(module)


def mean_of(values: Tensor, weights: Tensor) -> Tensor:
    return (weights * values).sum() / (weights > 0).sum()


def sampled(algorithm: Any, modules: dict[str, Any], obs: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """An action of a SAC policy from the noise of `key`, and its log-probability by torch's distributions."""
    mean, log_std = modules["actor"](obs).detach().chunk(2, -1)
    deviation = log_std.clamp(algorithm.dist.log_std_min, algorithm.dist.log_std_max).exp()
    before = mean + deviation * rng.normal(key, (len(obs), ACTION_DIM))
    log_prob = torch.distributions.Normal(mean, deviation).log_prob(before) - torch.log(1 - before.tanh() ** 2)
    return before.tanh(), log_prob.sum(-1)


# --- sqil ------------------------------------------------------------------------------------------------------------


def test_sqil_is_sac_with_the_labels_as_rewards() -> None:
    algorithm: Any = make_algorithm("sqil", optimizer="sgd", learning_rate=RATE)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    modules = modules_of(algorithm, state)
    action, log_prob = sampled(algorithm, modules, batch["next_obs"], rng.fold(KEY, 0))
    next_value = modules["slow_critic"](batch["next_obs"], action).amin(0) - 1.0 * log_prob  # the temperature is 1
    target = torch.where(batch["labels"] > 0.5, 1.0, 0.0) + batch["discounts"] * next_value
    error = modules["critic"](batch["obs"], batch["actions"]) - target.detach()
    expected = after_descent(
        algorithm, state, "critic", mean_of(0.5 * (error**2).sum(0), batch["weights"]), modules
    )  # fmt: skip
    new, aux = algorithm.train_step(state, batch, KEY)
    torch.testing.assert_close(new.params["critic"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.metrics["target_mean"], mean_of(target, batch["weights"]), rtol=1e-4, atol=1e-5)


def test_discrete_sqil_is_soft_q_learning_with_the_labels_as_rewards() -> None:
    temperature = 0.2
    algorithm: Any = make_algorithm("discrete_sqil", optimizer="sgd", learning_rate=RATE, max_grad_norm=0.0,
                                    rule_temperature=temperature)  # fmt: skip
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    modules = modules_of(algorithm, state)
    soft = temperature * torch.logsumexp(modules["slow_q"](batch["next_obs"]) / temperature, -1)
    target = batch["labels"] + batch["discounts"] * soft
    q = modules["q"](batch["obs"]).gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    loss = mean_of(torch.nn.functional.huber_loss(q, target.detach(), reduction="none"), batch["weights"])
    new, _ = algorithm.train_step(state, batch, KEY)
    expected = after_descent(algorithm, state, "q", loss, modules)
    torch.testing.assert_close(new.params["q"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sqil", "discrete_sqil", "iq_learn", "discrete_iq_learn"])
def test_rewards_of_the_environment_are_not_read(name: str) -> None:
    algorithm: Any = make_algorithm(name)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    paid = {**batch, "rewards": 100.0 * batch["rewards"] - 7.0}
    assert_same_bits(algorithm.train_step(state, batch, KEY)[0], algorithm.train_step(state, paid, KEY)[0])
    swapped = {**batch, "labels": 1.0 - batch["labels"]}
    moved = algorithm.train_step(state, swapped, KEY)[0]
    assert not all(
        torch.equal(moved.params[n], x) for n, x in algorithm.train_step(state, batch, KEY)[0].params.items()
    )


@pytest.mark.parametrize("name", ["discrete_sqil", "discrete_iq_learn"])
def test_batches_are_half_labelled_as_the_experts(name: str, tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    obs = g.standard_normal((101, 4)).astype(np.float32)
    dataset = TransitionDataset(
        obs=obs[:-1], next_obs=obs[1:], actions=g.integers(0, 2, 100), rewards=np.full(100, 9.0, np.float32),
        terminated=np.zeros(100, bool), truncated=np.arange(100) == 99,
    )  # fmt: skip
    write_dataset(dataset, tmp_path / "expert.npz")
    kwargs = {"expert_dataset_kind": "npz", "expert_dataset_path": str(tmp_path / "expert.npz")}
    trainer = Trainer(config_for(name, tmp_path, total_timesteps=60, algo_kwargs=kwargs), progress=False)
    trainer.run()
    learner: Any = trainer.loop.learner
    (phase,) = learner.phases
    train, key = tree_map(lambda x: x[0], learner.train), learner.tree["keys"][0]
    data = tree_map(lambda x: x[0], learner.source_data(learner.tree, phase.sources))
    batch = learner.sample_one(phase, train, key, data)
    known = {tuple(row) for row in dataset.obs.tolist()}
    assert batch["labels"].tolist() == [0.0] * 8 + [1.0] * 8
    assert [float(tuple(row) in known) for row in batch["obs"].tolist()] == batch["labels"].tolist()


# --- iq-learn --------------------------------------------------------------------------------------------------------

OBJECTIVES = [
    {"value_term": "value"},
    {"value_term": "value", "regularize_policy": False, "chi2_alpha": 2.0},
    {"value_term": "value_expert"},
    {"value_term": "v0", "use_target": False},
    {"value_term": "value", "use_target": False},
]


def objective(
    q: Tensor, value: Tensor, next_value: Tensor, batch: dict[str, Tensor], gamma: float, value_term: str = "value",
    regularize_policy: bool = True, chi2_alpha: float = 0.5, use_target: bool = True,
) -> Tensor:  # fmt: skip
    """Row by row from the paper: E_expert[phi(Q - gamma V')] - E[V - gamma V'], phi(x) = x - x^2 / (4 alpha)."""
    mine = range(BATCH)
    experts = [i for i in mine if batch["labels"][i] > 0.5]
    w, gamma_v = batch["weights"], batch["discounts"] * next_value

    def mean(rows: Any, term: Any) -> Tensor:
        return sum(w[i] * term(i) for i in rows) / len(rows)

    total = mean(experts, lambda i: (q[:, i] - gamma_v[i]).mean())
    regularised = mine if regularize_policy else experts
    total = total - mean(regularised, lambda i: ((q[:, i] - gamma_v[i]) ** 2).mean() / (4 * chi2_alpha))
    if value_term == "v0":
        return total - (1 - gamma) * mean(experts, lambda i: value[i])
    return total - mean(mine if value_term == "value" else experts, lambda i: value[i] - gamma_v[i])


@pytest.mark.parametrize("options", OBJECTIVES)
def test_iq_learn_critics_climb_the_objective(options: dict[str, Any]) -> None:
    algorithm: Any = make_algorithm("iq_learn", optimizer="sgd", learning_rate=RATE, ent_coef=0.05, **options)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    modules = modules_of(algorithm, state)
    action, log_prob = sampled(algorithm, modules, batch["obs"], rng.fold(KEY, 4))
    next_action, next_log_prob = sampled(algorithm, modules, batch["next_obs"], rng.fold(KEY, 0))
    q = modules["critic"](batch["obs"], batch["actions"])
    value = modules["critic"](batch["obs"], action).amin(0) - 0.05 * log_prob
    slow = modules["slow_critic" if options.get("use_target", True) else "critic"]
    next_value = slow(batch["next_obs"], next_action).amin(0) - 0.05 * next_log_prob
    loss = -objective(q, value, next_value, batch, 0.99, **options)
    new, aux = algorithm.train_step(state, batch, KEY)
    torch.testing.assert_close(aux.metrics["critic_loss"], loss.detach(), rtol=1e-4, atol=1e-5)
    expected = after_descent(algorithm, state, "critic", loss, modules)
    torch.testing.assert_close(new.params["critic"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OBJECTIVES)
def test_discrete_iq_learn_climbs_the_objective(options: dict[str, Any]) -> None:
    temperature = 0.3
    algorithm: Any = make_algorithm(
        "discrete_iq_learn", optimizer="sgd", learning_rate=RATE, rule_temperature=temperature,
        **{"use_target": True, **options},
    )  # fmt: skip
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    modules = modules_of(algorithm, state)
    values, slow = modules["q"](batch["obs"]), modules["slow_q" if options.get("use_target", True) else "q"]
    q = values.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1).unsqueeze(0)
    value = temperature * torch.logsumexp(values / temperature, -1)
    next_value = temperature * torch.logsumexp(slow(batch["next_obs"]) / temperature, -1)
    loss = -objective(q, value, next_value, batch, 0.99, **options)
    new, aux = algorithm.train_step(state, batch, KEY)
    torch.testing.assert_close(aux.metrics["critic_loss"], loss.detach(), rtol=1e-4, atol=1e-5)
    expected = after_descent(algorithm, state, "q", loss, modules)
    torch.testing.assert_close(new.params["q"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pair", [("iq_learn", "iq_learn_offline"), ("discrete_iq_learn", "discrete_iq_learn_offline")])
def test_offline_every_row_is_the_experts(pair: tuple[str, str]) -> None:
    online, offline = (make_algorithm(name) for name in pair)
    batch = {**batch_for(online), "labels": torch.ones(BATCH)}
    new = [algorithm.train_step(algorithm.init_state(0), batch, KEY)[0] for algorithm in (online, offline)]
    assert_same_bits(new[0].params, new[1].params)
    del batch["labels"]
    assert_same_bits(offline.train_step(offline.init_state(0), batch, KEY)[0].params, new[0].params)


def test_the_best_q_function_of_a_bandit_has_the_rewards_of_the_chi_square_divergence() -> None:
    """One state, three actions, gamma 0: the policy is softmax(Q / T). The best Q has no gradient, so for each action
    pi_expert (1 - Q / (2 alpha)) = softmax(Q / T)."""
    expert, temperature, alpha = np.array([0.6, 0.3, 0.1]), 0.5, 0.5
    batch = {"weights": torch.tensor(3 * expert), "labels": torch.ones(3), "discounts": torch.zeros(3)}

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        q = torch.tensor(x, requires_grad=True)
        value = temperature * torch.logsumexp(q / temperature, -1).expand(3)
        found, _ = iq_loss(q.unsqueeze(0), value, torch.zeros(3), batch, gamma=0.0, chi2_alpha=alpha)
        (gradient,) = torch.autograd.grad(found, q)
        return float(found.detach()), gradient.numpy()

    best = minimize(loss, np.zeros(3), jac=True, tol=1e-12).x
    policy = np.exp(best / temperature) / np.exp(best / temperature).sum()
    np.testing.assert_allclose(expert * (1 - best / (2 * alpha)), policy, atol=1e-5)
    assert policy.argmax() == 0


def test_iq_learn_settings_are_checked_at_construction() -> None:
    for fields in ({"double": True}, {"target_rule": "max"}, {"hysteretic": 0.5}):
        with pytest.raises(UserError, match="leave target_rule, double and hysteretic"):
            make_algorithm("discrete_iq_learn", **fields)
    with pytest.raises(UserError, match="chi2_alpha"):
        make_algorithm("iq_learn", chi2_alpha=0.0)
    with pytest.raises(UserError, match="value_term"):
        make_algorithm("iq_learn_offline", value_term="v1")
    with pytest.raises(UserError, match="iq_learn needs a bounded continuous"):
        make_algorithm("iq_learn", "discrete")


def test_a_prior_of_several_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sqil mixes its batches from one-step transitions"):
        Trainer(config_for("sqil", tmp_path, algo_kwargs={"n_step": 3}), progress=False)
