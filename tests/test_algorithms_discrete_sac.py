"""Discrete SAC against the same step written the ordinary way, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BATCH, batch_for, make_algorithm, spec_for

from rl_training.algorithms import DiscreteSAC
from rl_training.errors import UserError
from rl_training.models import MLPDiscreteSACModel
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def test_target_by_hand() -> None:
    """Policy (3/4, 1/4), critics (1, 2) and (3, 0): the smaller values are (1, 0)."""
    model = MLPDiscreteSACModel(1, 2, ())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.actor.head.bias.copy_(torch.tensor([math.log(3.0), 0.0]))
        model.critic.layers[0].bias.copy_(torch.tensor([[[1.0, 2.0]], [[3.0, 0.0]]]))
    algorithm = DiscreteSAC(model=model, ent_coef=0.5)
    batch = {
        "obs": torch.zeros(2, 1), "next_obs": torch.zeros(2, 1), "actions": torch.tensor([1, 0]),
        "rewards": torch.tensor([1.0, 2.0]), "discounts": torch.tensor([0.9, 0.0]), "weights": torch.ones(2),
    }  # fmt: skip
    _, aux = algorithm.train_step(algorithm.init_state(0), batch, KEY)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    targets = [1.0 + 0.9 * (0.75 * 1.0 + 0.25 * 0.0 + 0.5 * entropy), 2.0]
    assert float(aux.metrics["target_mean"]) == pytest.approx(sum(targets) / 2, rel=1e-5)
    errors = [[2.0 - targets[0], 0.0 - targets[0]], [1.0 - 2.0, 3.0 - 2.0]]  # [row][critic]
    assert float(aux.metrics["critic_loss"]) == pytest.approx(sum(0.5 * e * e for r in errors for e in r) / 2, rel=1e-5)
    assert aux.priority.tolist() == pytest.approx([(abs(a) + abs(b)) / 2 for a, b in errors], rel=1e-5)
    assert float(aux.metrics["entropy"]) == pytest.approx(entropy, rel=1e-5)
    assert float(aux.metrics["ent_coef"]) == pytest.approx(0.5)


def test_update_equals_plain_autograd() -> None:
    algorithm = make_algorithm("discrete_sac", hidden_sizes=[7], learning_rate=1e-2, ent_coef_init=0.7)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    nets: dict[str, Any] = {}
    for name, flat in (("actor", state.params["actor"]), ("critic", state.params["critic"])):
        nets[name] = getattr(MLPDiscreteSACModel(5, 3, (7,)), name)
        algorithm.nets[name].write_to(nets[name], flat)
    slow = getattr(MLPDiscreteSACModel(5, 3, (7,)), "critic")  # noqa: B009
    algorithm.nets["critic"].write_to(slow, state.target["critic"])
    log_alpha = torch.tensor(math.log(0.7), requires_grad=True)
    optimizers = {n: torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4) for n, net in nets.items()}
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-2, eps=1e-4)
    weights, rows = batch["weights"], torch.arange(BATCH)

    with torch.no_grad():
        log_p = nets["actor"](batch["next_obs"]).log_softmax(-1)
        value = (log_p.exp() * (slow(batch["next_obs"]).amin(0) - 0.7 * log_p)).sum(-1)
        goal = batch["rewards"] + batch["discounts"] * value
    q = nets["critic"](batch["obs"])[:, rows, batch["actions"]]
    loss = (weights * 0.5 * ((q - goal) ** 2).sum(0)).mean()
    loss.backward()
    optimizers["critic"].step()
    log_p = nets["actor"](batch["obs"]).log_softmax(-1)
    smaller = nets["critic"](batch["obs"]).amin(0).detach()
    (weights * (log_p.exp() * (0.7 * log_p - smaller)).sum(-1)).mean().backward()
    optimizers["actor"].step()
    entropy = -(log_p.exp() * log_p).sum(-1).detach()
    (log_alpha.exp() * (weights * (entropy - 0.89 * math.log(3.0))).mean()).backward()
    alpha_optimizer.step()

    new, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["critic_loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, net in nets.items():
        torch.testing.assert_close(algorithm.nets[name].flatten(net), new.params[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(new.extra["log_alpha"], log_alpha.detach(), rtol=1e-5, atol=1e-6)
    expected = torch.lerp(state.target["critic"], new.params["critic"], 0.005)
    torch.testing.assert_close(new.target["critic"], expected)


def test_temperature_finds_the_target_entropy() -> None:
    """On a fixed batch with rewards that prefer one action, the entropy settles at the target, whatever the start."""
    algorithm = make_algorithm("discrete_sac", learning_rate=1e-2, target_entropy_scale=0.5)
    batch = batch_for(algorithm, size=96)
    batch["discounts"] = torch.zeros_like(batch["discounts"])
    batch["rewards"] = (batch["actions"] == 1).float()
    batch["weights"] = torch.ones(96)
    state = algorithm.init_state(0)
    entropies = []
    for i in range(600):
        state, aux = algorithm.train_step(state, batch, rng.fold(KEY, i))
        entropies.append(float(aux.metrics["entropy"]))
    assert np.mean(entropies[-50:]) == pytest.approx(0.5 * math.log(3.0), abs=0.05)


def test_actions_follow_the_policy() -> None:
    algorithm = make_algorithm("discrete_sac")
    state = algorithm.init_state(0)
    obs = torch.randn(1, 5, generator=torch.Generator().manual_seed(0)).expand(6000, 5)
    probs = algorithm.log_policy(state.params["actor"], obs[:1]).exp()[0]
    _, actions, _ = algorithm.select_action(state, (), obs, KEY, explore=True)
    shares = torch.bincount(actions, minlength=3) / 6000
    torch.testing.assert_close(shares, probs, atol=0.03, rtol=0)
    _, greedy, _ = algorithm.select_action(state, (), obs[:2], KEY, explore=False)
    assert greedy.tolist() == [int(probs.argmax())] * 2


def test_defaults_and_bad_input() -> None:
    algorithm = make_algorithm("discrete_sac")
    assert algorithm.target_entropy == pytest.approx(0.89 * math.log(3.0))
    assert algorithm.hp.adam_eps == 1e-4
    with pytest.raises(UserError, match="discrete_sac needs a discrete action space"):
        DiscreteSAC(spec_for("sac", "box"))
    with pytest.raises(UserError, match="target_entropy_scale = 2"):
        make_algorithm("discrete_sac", target_entropy_scale=2)
    with pytest.raises(UserError, match="must be 'auto' or at least 0"):
        make_algorithm("discrete_sac", ent_coef=-1.0)
