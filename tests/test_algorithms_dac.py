"""DAC and the gradient penalty of discriminators: losses against plain autograd and closed forms, the rows of a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ACTION_DIM, BATCH, OBS_DIM, batch_for, config_for, make_algorithm, modules_of
from torch import Tensor

from rl_training.algorithms.imitation.discriminator import gradient_penalty
from rl_training.data import TransitionDataset
from rl_training.data.dataset_files import write_dataset
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

KEY = rng.key_from_seed(8)
RATE = 0.1


def labelled(size: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(labels, weights), half of the rows the expert's, in any order."""
    g = torch.Generator().manual_seed(seed)
    labels = (torch.randperm(size, generator=g) < size // 2).float()
    return labels, 0.2 + 0.8 * torch.rand(size, generator=g)


# --- the gradient penalty --------------------------------------------------------------------------------------------


def test_penalty_of_a_linear_discriminator_is_its_distance_from_length_one() -> None:
    slope, (labels, weights) = torch.tensor([3.0, 0.0, -4.0]), labelled(24)  # length 5
    inputs = (torch.randn(25, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(25))

    def network(x: Tensor, flag: Tensor) -> Tensor:
        return x @ slope + 12.0 * flag  # length 13

    ones = torch.ones_like(weights)
    found = gradient_penalty(network, inputs, labels, ones, 0.5 * ones, KEY)
    assert float(found) == pytest.approx((13.0 - 1.0) ** 2, rel=1e-5)
    twice = gradient_penalty(network, inputs, labels, 2.0 * ones, 0.5 * ones, KEY)
    assert float(twice) == pytest.approx(4.0 * 12.0**2, rel=1e-5)  # the product of the weights of a pair


def test_penalty_is_taken_between_the_policys_rows_and_the_experts() -> None:
    """The gradient of x^2 / 2 is x itself, so the penalty tells where it was taken."""
    labels, _ = labelled(2000)
    ones = torch.ones(2000)
    inputs = (torch.cat([labels, torch.full((1,), -5.0)]).unsqueeze(-1),)  # 0: the policy's; 1: the expert's; -5: ended

    def penalty(mass: float) -> float:
        return float(gradient_penalty(lambda x: 0.5 * x.square().sum(-1), inputs, labels, ones, mass * ones, KEY))

    def mean(a: float, b: float) -> float:
        return float(np.mean((np.abs(np.linspace(a, b, 10_001)) - 1.0) ** 2))

    assert penalty(0.0) == pytest.approx(mean(0.0, 1.0), abs=0.03)  # 1/3; it would be 1/2 within one side
    assert penalty(1e9) == pytest.approx(16.0)  # all are the absorbing state
    half = 0.25 * (16.0 + mean(-5.0, 1.0) + mean(0.0, -5.0) + mean(0.0, 1.0))
    assert penalty(1.0) == pytest.approx(half, rel=0.1)  # half of the rows on each side


def test_penalty_does_not_depend_on_the_order_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, weights = labelled()
    x = torch.randn(BATCH + 1, 3, generator=torch.Generator().manual_seed(1))
    order, bits = torch.randperm(BATCH, generator=torch.Generator().manual_seed(2)), rng.bits

    def network(x: Tensor) -> Tensor:
        return x.square().sum(-1)

    found = gradient_penalty(network, (x,), labels, weights, labels, KEY)
    monkeypatch.setattr(rng, "bits", lambda key, shape: bits(key, shape)[order])  # draws belong to their rows
    rows = torch.cat([x[:-1][order], x[-1:]])
    torch.testing.assert_close(
        gradient_penalty(network, (rows,), labels[order], weights[order], labels[order], KEY), found
    )


def penalty_by_autograd(network: Any, inputs: list[Tensor], labels: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """The same pairs and points by a loop, and the gradient by a second pass of autograd."""
    order, ended, between = (rng.uniform(rng.fold(KEY, stream), (len(labels),)) for stream in (71, 72, 73))
    own = sorted((i for i in range(len(labels)) if labels[i] < 0.5), key=lambda i: float(order[i]))
    expert = sorted((i for i in range(len(labels)) if labels[i] > 0.5), key=lambda i: float(order[i]))
    total: Any = 0.0
    for i, j in zip(own, expert, strict=True):
        ends = [[x[-1] if ended[k] < share[k] else x[k] for x in inputs] for k in (i, j)]
        points = [(1 - between[i]) * a + between[i] * b for a, b in zip(*ends)]
        points = [point.detach().unsqueeze(0).requires_grad_() for point in points]
        out = network(*points).sum()
        gradients = torch.autograd.grad(out, points, create_graph=True, allow_unused=True, materialize_grads=True)
        length = torch.cat([g.flatten() for g in gradients]).norm()
        total = total + weights[i] * weights[j] * (length - 1) ** 2
    return total / len(own)


@pytest.mark.parametrize("name", ["gail", "airl"])
def test_gail_and_airl_descend_the_penalised_loss(name: str) -> None:
    fields = {"optimizer": "sgd", "discriminator_learning_rate": RATE, "gamma": 0.9}
    algorithm: Any = make_algorithm(name, "box", gradient_penalty=4.0, **fields)
    plain: Any = make_algorithm(name, "box", **fields)
    size, g = 12, np.random.default_rng(0)
    labels, weights = labelled(size)
    batch = {
        "states": torch.as_tensor(g.standard_normal((size, OBS_DIM)), dtype=torch.float32),
        "next_states": torch.as_tensor(g.standard_normal((size, OBS_DIM)), dtype=torch.float32),
        "actions": torch.as_tensor(g.uniform(-1, 1, (size, ACTION_DIM)), dtype=torch.float32),
        "terminated": torch.as_tensor(g.random(size) < 0.3), "labels": labels, "weights": weights,
        "endings": torch.where(labels > 0.5, 0.02, 0.2),
    }  # fmt: skip
    state = algorithm.init_state(0)
    module = modules_of(algorithm, state)["discriminator"]
    inputs = [x.detach() for x in algorithm.inputs(state, batch)]
    mass = 9.0 * batch["endings"]

    def network(*points: Tensor) -> Tensor:
        return module(*points, torch.ones(())) if name == "airl" else module(*points)

    penalty = penalty_by_autograd(network, inputs, labels, weights, mass / (1 + mass))
    gradients = torch.autograd.grad(2.0 * penalty, list(module.parameters()), allow_unused=True, materialize_grads=True)
    expected = copy.deepcopy(module)
    new, aux = algorithm.discriminator_step(state, batch, KEY)
    without, _ = plain.discriminator_step(state, batch, KEY)
    plain.nets["discriminator"].write_to(expected, without.params["discriminator"])
    with torch.no_grad():
        for parameter, gradient in zip(expected.parameters(), gradients):
            parameter -= RATE * gradient
    torch.testing.assert_close(
        new.params["discriminator"], algorithm.nets["discriminator"].flatten(expected), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(aux.metrics["gradient_penalty"], penalty.detach(), rtol=1e-4, atol=1e-5)


# --- dac -------------------------------------------------------------------------------------------------------------


def test_dac_discriminator_descends_the_penalised_cross_entropy() -> None:
    gamma = 0.9
    algorithm: Any = make_algorithm("dac", optimizer="sgd", discriminator_learning_rate=RATE, gamma=gamma)
    state, batch = algorithm.init_state(0), batch_for(algorithm, size=12)
    batch["labels"], batch["weights"] = labelled(12)
    labels, weights = batch["labels"], batch["weights"]
    ended = (batch["discounts"] == 0).float()
    endings = [(ended * weights * side).sum() / side.sum() for side in (1 - labels, labels)]
    mass = gamma / (1 - gamma) * torch.where(labels > 0.5, endings[1], endings[0])
    module = modules_of(algorithm, state)["discriminator"]
    nowhere = torch.zeros(1, OBS_DIM), torch.zeros(1, ACTION_DIM)
    inputs = [torch.cat([batch["obs"], nowhere[0]]), torch.cat([batch["actions"], nowhere[1]]),
              torch.tensor([0.0] * 12 + [1.0])]  # fmt: skip
    logits = module(*inputs)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    at_rows = cross_entropy(logits[:-1], labels, reduction="none")
    at_end = cross_entropy(logits[-1].expand(12), labels, reduction="none")
    loss = (weights * (at_rows + mass * at_end) / (1 + mass)).mean()
    penalty = penalty_by_autograd(module, inputs, labels, weights, mass / (1 + mass))
    gradients = torch.autograd.grad(loss + 5.0 * penalty, list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients):
            parameter -= RATE * gradient
    new, metrics = algorithm.fit(state, batch, KEY)
    assert float(metrics["discriminator_loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    expected = algorithm.nets["discriminator"].flatten(module)
    torch.testing.assert_close(new.params["discriminator"], expected, rtol=1e-4, atol=1e-5)


def test_shares_of_terminations_are_moving_averages() -> None:
    algorithm: Any = make_algorithm("dac")
    state = algorithm.init_state(0)
    rows = {"labels": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0]), "weights": torch.ones(6)}
    batch = {**batch_for(algorithm, size=6), **rows}
    ends = torch.tensor([[0.0, 0.9, 0.9, 0.9, 0.9, 0.9], [0.0, 0.0, 0.9, 0.9, 0.0, 0.9], [0.9] * 6])
    means = []
    for i, discounts in enumerate(ends):
        state, _ = algorithm.fit(state, {**batch, "discounts": discounts}, rng.fold(KEY, i))
        means.append(state.extra["endings"].tolist())
    assert means[0] == pytest.approx([0.25, 0.0])
    assert means[1] == pytest.approx([0.375, 0.25])  # the plain mean at first
    assert means[2] == pytest.approx([0.25, 1 / 6])
    late = state._replace(extra={**state.extra, "fits": torch.tensor(10_000)})
    late, _ = algorithm.fit(late, {**batch, "discounts": ends[2]}, KEY)
    assert late.extra["endings"].tolist() == pytest.approx([0.99 * 0.25, 0.99 / 6])


@pytest.mark.parametrize("absorbing", [True, False])
def test_td3_learns_from_log_d_minus_log_one_minus_d(absorbing: bool) -> None:
    algorithm: Any = make_algorithm("dac", target_policy_noise=0.0, absorbing_states=absorbing)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    modules = modules_of(algorithm, state)
    d = torch.sigmoid(modules["discriminator"](batch["obs"], batch["actions"]))
    at_end = modules["discriminator"](torch.zeros(1, OBS_DIM), torch.zeros(1, ACTION_DIM), torch.ones(1))
    rewards = d.log() - (1 - d).log() - (at_end if absorbing else 0.0)
    next_action = modules["slow_actor"](batch["next_obs"]).tanh()
    target = rewards + batch["discounts"] * modules["slow_critic"](batch["next_obs"], next_action).amin(0)
    own = batch["weights"] * (1 - batch["labels"])
    new, aux = algorithm.train_step(state, batch, KEY)
    expected = (own * target).sum() / (own > 0).sum()
    torch.testing.assert_close(aux.metrics["target_mean"], expected.detach(), rtol=1e-4, atol=1e-5)
    # In a run, the policy's update sees its own rows only and leaves the discriminator alone.
    rows = {name: x[batch["labels"] < 0.5] for name, x in batch.items() if name != "labels"}
    alone, _ = algorithm.train_step(state, rows, KEY)
    torch.testing.assert_close(alone.params["critic"], new.params["critic"], rtol=1e-4, atol=1e-5)
    assert torch.equal(alone.params["discriminator"], state.params["discriminator"])


def test_values_relative_to_the_absorbing_state_are_those_of_an_endless_stay() -> None:
    """A chain 0 -> 1 -> end: with r - r_end and value 0 at the end, or with r and value r_end / (1 - gamma) there."""
    gamma, rewards, end = 0.9, (0.3, -0.5), 0.7
    worth = end / (1 - gamma)
    full = [rewards[0] + gamma * (rewards[1] + gamma * worth), rewards[1] + gamma * worth]
    relative = [rewards[0] - end + gamma * (rewards[1] - end), rewards[1] - end]
    assert [value + worth for value in relative] == pytest.approx(full)


def test_a_run_fits_the_discriminator_on_both_sides_and_td3_on_its_own(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    obs = g.standard_normal((101, 3)).astype(np.float32)
    dataset = TransitionDataset(
        obs=obs[:-1], next_obs=obs[1:], actions=g.uniform(-2, 2, (100, 1)).astype(np.float32),
        rewards=np.zeros(100, np.float32), terminated=np.zeros(100, bool), truncated=np.arange(100) == 99,
    )  # fmt: skip
    write_dataset(dataset, tmp_path / "expert.npz")
    kwargs = {"expert_dataset_kind": "npz", "expert_dataset_path": str(tmp_path / "expert.npz"), "learning_starts": 20}
    config = config_for("dac", tmp_path, total_timesteps=60, algo_kwargs=kwargs)
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    learner: Any = trainer.loop.learner
    policy, discriminator = learner.phases
    assert result.summary["gradient_steps"] == int(learner.train.step[0]) == int(learner.train.extra["fits"][0])
    train, key = tree_map(lambda x: x[0], learner.train), learner.tree["keys"][0]

    def rows(phase: Any, train: Any) -> list[tuple[float, ...]]:
        data = tree_map(lambda x: x[0], learner.source_data(learner.tree, phase.sources))
        return [tuple(row) for row in learner.sample_one(phase, train, key, data)["obs"].tolist()]

    known = {tuple(row) for row in dataset.obs.tolist()}
    drawn = rows(discriminator, train)
    assert [row in known for row in drawn] == [False] * 16 + [True] * 16
    assert not any(row in known for row in rows(policy, train))
    later = train._replace(extra={**train.extra, "fits": train.extra["fits"] + 1})
    assert rows(discriminator, later) != drawn  # several updates in a block see different rows
    assert (policy.period, discriminator.period, discriminator.between) == (2, 1, None)


def test_dac_settings_are_checked_at_construction() -> None:
    for fields, words in (
        ({"n_step": 3}, "leave n_step, prioritized and her"),
        ({"prioritized": True}, "leave n_step, prioritized and her"),
        ({"gamma": 1.0}, "gamma must be below 1"),
        ({"gradient_penalty": -1.0}, "gradient_penalty"),
    ):
        with pytest.raises(UserError, match=words):
            make_algorithm("dac", **fields)
    with pytest.raises(UserError, match="dac needs a bounded continuous"):
        make_algorithm("dac", "discrete")
    with pytest.raises(UserError, match="dac imitates an expert; no dataset"):
        make_algorithm("dac").sources(1)
