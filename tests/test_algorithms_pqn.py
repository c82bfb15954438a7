"""PQN by hand: lambda-returns of greedy values, one update against plain autograd, LayerNorm, no target network."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import batch_for, make_algorithm
from torch import nn

from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def test_returns_are_the_recursion_of_the_paper() -> None:
    """R_t = r_t + gamma (lambda R_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a)), cut at the ends of episodes."""
    algorithm = make_algorithm("pqn", gamma=0.9, td_lambda=0.6)
    state = algorithm.init_state(0)
    g = torch.Generator().manual_seed(0)
    steps = 7
    rollout = {
        "obs": torch.randn(steps, 1, 5, generator=g), "next_obs": torch.randn(steps, 1, 5, generator=g),
        "rewards": torch.randn(steps, 1, generator=g), "actions": torch.zeros(steps, 1, dtype=torch.int64),
        "terminated": torch.zeros(steps, 1, dtype=torch.bool), "truncated": torch.zeros(steps, 1, dtype=torch.bool),
        "valid": torch.ones(steps, 1, dtype=torch.bool),
    }  # fmt: skip
    rollout["terminated"][2], rollout["truncated"][4] = True, True
    values = algorithm.q_values(state.params, rollout["next_obs"][:, 0]).amax(-1)
    expected, after = [0.0] * steps, 0.0
    for t in reversed(range(steps)):
        reward, value = float(rollout["rewards"][t]), float(values[t])
        if t == 2:  # terminated: nothing follows
            after = reward
        elif t in (4, steps - 1):  # truncated, or the end of the rollout: bootstrap from the value alone
            after = reward + 0.9 * value
        else:
            after = reward + 0.9 * (0.6 * after + 0.4 * value)
        expected[t] = after
    _, batch = algorithm.prepare(state, rollout, KEY)
    torch.testing.assert_close(batch["returns"], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_update_equals_plain_autograd() -> None:
    algorithm = make_algorithm("pqn", learning_rate=1e-2, max_grad_norm=0.4)
    state = algorithm.init_state(0)
    net, module = algorithm.nets["q"], copy.deepcopy(algorithm.modules["q"])
    net.write_to(module, state.params["q"])
    module.requires_grad_()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for i in range(3):
        batch = batch_for(algorithm, seed=i)
        batch["weights"] = torch.ones_like(batch["weights"])
        q = module(batch["obs"])[torch.arange(len(batch["actions"])), batch["actions"]]
        loss = 0.5 * nn.functional.mse_loss(q, batch["returns"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.4)
        optimizer.step()
        state, aux = algorithm.train_step(state, batch, KEY)
        assert float(aux.metrics["loss"]) == pytest.approx(loss.item(), rel=1e-4)
        torch.testing.assert_close(net.flatten(module), state.params["q"], rtol=1e-4, atol=1e-5)
    assert state.target == {}


def test_every_hidden_layer_has_a_layer_norm() -> None:
    def norms(**fields: object) -> int:
        modules = make_algorithm("pqn", hidden_sizes=[16, 16], **fields).modules["q"].modules()
        return sum(isinstance(module, nn.LayerNorm) for module in modules)

    assert norms() == 2
    assert norms(layer_norm=False) == 0


def test_exploration_falls_over_its_share_of_training() -> None:
    algorithm = make_algorithm("pqn", exploration_fraction=0.5, exploration_final_eps=0.2)
    state, obs = algorithm.init_state(0), torch.randn(1, 5).expand(20_000, 5)
    greedy = int(algorithm.q_values(state.params, obs[:1]).argmax())
    for progress, epsilon in ((0.0, 1.0), (0.25, 0.6), (0.5, 0.2), (1.0, 0.2)):
        now = state._replace(progress=torch.tensor(progress))
        actions = algorithm.select_action(now, (), obs, KEY, explore=True)[1]
        share = float((actions != greedy).float().mean())
        assert share == pytest.approx(epsilon * 2 / 3, abs=0.02)  # a third of the random actions is the greedy one
