"""A2C by hand: one update against plain autograd and torch's RMSprop, and that a rollout is one update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import batch_for, config_for, make_algorithm
from torch import nn

from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_update_equals_plain_autograd(kind: str) -> None:
    algorithm = make_algorithm("a2c", kind, ent_coef=0.02, vf_coef=0.7, learning_rate=1e-2, max_grad_norm=0.4)
    state = algorithm.init_state(0)
    net, module = algorithm.nets["policy"], copy.deepcopy(algorithm.modules["policy"])
    net.write_to(module, state.params["policy"])
    module.requires_grad_()
    optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-2, alpha=0.99, eps=1e-5)
    for i in range(3):
        batch = batch_for(algorithm, seed=i)
        batch["weights"] = torch.ones_like(batch["weights"])
        out, values = module(batch["obs"])
        if kind == "discrete":
            dist: Any = torch.distributions.Categorical(logits=out)
            log_prob, entropy = dist.log_prob(batch["actions"]), dist.entropy()
        else:
            mean, log_std = out.chunk(2, -1)
            dist = torch.distributions.Normal(mean, log_std.exp())
            log_prob, entropy = dist.log_prob(batch["actions"]).sum(-1), dist.entropy().sum(-1)
        policy = -(batch["advantages"] * log_prob).mean()
        loss = policy + 0.7 * nn.functional.mse_loss(values, batch["returns"]) - 0.02 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.4)
        optimizer.step()
        state, aux = algorithm.train_step(state, batch, KEY)
        assert float(aux.metrics["loss"]) == pytest.approx(loss.item(), rel=1e-4)
        torch.testing.assert_close(net.flatten(module), state.params["policy"], rtol=1e-4, atol=1e-5)


def test_a_rollout_is_one_update(tmp_path: Any) -> None:
    config = config_for("a2c", tmp_path, num_envs=4, total_timesteps=160, algo_kwargs={"n_steps": 5})
    result = Trainer(config, progress=False).run()
    assert result.summary["gradient_steps"] == 160 // (4 * 5)


def test_n_step_returns_are_the_default() -> None:
    """With gae_lambda 1 the critic's targets are rewards to the end of the rollout or episode, then a bootstrap."""
    algorithm = make_algorithm("a2c", "discrete", gamma=0.9)
    state = algorithm.init_state(0)
    g = torch.Generator().manual_seed(0)
    steps, obs = 4, torch.randn(5, 1, 5, generator=g)
    rollout = {
        "obs": obs[:steps], "next_obs": obs[1:], "actions": torch.zeros(steps, 1, dtype=torch.int64),
        "rewards": torch.arange(1.0, 5.0).view(steps, 1), "terminated": torch.arange(steps).view(steps, 1) == 1,
        "truncated": torch.zeros(steps, 1, dtype=torch.bool), "valid": torch.ones(steps, 1, dtype=torch.bool),
    }  # fmt: skip
    _, batch = algorithm.prepare(state, rollout, KEY)
    last = float(algorithm.value(state, obs[4])[0])
    expected = [1.0 + 0.9 * 2.0, 2.0, 3.0 + 0.9 * 4.0 + 0.81 * last, 4.0 + 0.9 * last]
    assert batch["returns"].tolist() == pytest.approx(expected, rel=1e-5)
