"""IMPALA and APPO by hand: who collects, V-trace targets by their O(T^2) definition with ends inside, the update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch_for, make_algorithm, random_actions

from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def moved(algorithm: Any, updates: int) -> Any:
    state = algorithm.init_state(0)
    for i in range(updates):
        state, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), KEY)
    return state


def test_collecting_policy_lags_by_policy_lag_updates() -> None:
    algorithm = make_algorithm("impala", "discrete", policy_lag=2, learning_rate=0.05)
    states = [moved(algorithm, n) for n in range(5)]
    for n, state in enumerate(states):
        expected = states[max(0, n - 2)].params["policy"]
        assert torch.equal(algorithm.behaviour(state)["policy"], expected)
    obs = batch_for(algorithm)["obs"]
    acted = algorithm.select_action(states[4], (), obs, KEY, explore=True)[1]
    out = algorithm.policy_out(states[2].params, obs)
    assert torch.equal(acted, algorithm.dist.sample(out, KEY))
    best = algorithm.select_action(states[4], (), obs, KEY, explore=False)[1]
    assert torch.equal(best, algorithm.dist.mode(algorithm.policy_out(states[4].params, obs)))


@pytest.mark.parametrize("kind", ["discrete", "box"])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", ["impala", "appo"])
def test_targets_follow_the_definition(name: str, kind: str, lag: int) -> None:
    """v_s = V(x_s) + sum_t gamma^(t-s) (prod c) delta_t (Eq. 1), summed to the end of the episode or rollout."""
    settings = {"gamma": 0.9, "gae_lambda": 1.0, "rho_bar": 1.2, "c_bar": 0.8, "learning_rate": 0.02}
    algorithm = make_algorithm(name, kind, policy_lag=lag, **settings)
    state, g, steps, envs = moved(algorithm, 3), np.random.default_rng(1), 9, 2
    ends = g.random((steps, envs)) < 0.3
    terminated = ends & (g.random((steps, envs)) < 0.5)
    seen, final = (torch.as_tensor(g.normal(size=(steps + 1, envs, 5)), dtype=torch.float32) for _ in range(2))
    rollout = {
        "obs": seen[:-1],
        "next_obs": torch.where(torch.as_tensor(ends)[..., None], final[1:], seen[1:]),
        "actions": random_actions(algorithm.spec, (steps, envs), g),
        "rewards": torch.as_tensor(g.normal(size=(steps, envs)), dtype=torch.float32),
        "terminated": torch.as_tensor(terminated), "truncated": torch.as_tensor(ends & ~terminated),
        "valid": torch.ones(steps, envs, dtype=torch.bool),
    }  # fmt: skip
    _, batch = algorithm.prepare(state, rollout, KEY)

    def log_prob(params: Any) -> Any:
        return algorithm.dist.log_prob(algorithm.policy_out(params, rollout["obs"]), rollout["actions"]).numpy()

    ratio = np.exp(log_prob(state.params) - log_prob(algorithm.behaviour(state)))
    assert (np.abs(ratio - 1.0).max() > 1e-3) == (lag > 0)
    rho, c = np.minimum(ratio, 1.2), np.minimum(ratio, 0.8)
    values, nexts = (algorithm.value(state, rollout[k]).numpy() for k in ("obs", "next_obs"))
    rewards = rollout["rewards"].numpy()
    delta = rho * (rewards + 0.9 * (1.0 - terminated) * nexts - values)
    targets = values.copy()
    for e in range(envs):
        for s in range(steps):
            scale = 1.0
            for t in range(s, steps):
                targets[s, e] += scale * delta[t, e]
                if ends[t, e]:
                    break
                scale *= 0.9 * c[t, e]
    following = np.concatenate([targets[1:], nexts[-1:]])
    following = np.where(ends, nexts, following)
    advantages = rho * (rewards + 0.9 * (1.0 - terminated) * following - values)
    np.testing.assert_allclose(batch["returns"].numpy(), targets.reshape(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch["advantages"].numpy(), advantages.reshape(-1), rtol=1e-4, atol=1e-5)


def test_gradient_of_the_loss() -> None:
    algorithm = make_algorithm(
        "impala", "discrete", optimizer="sgd", learning_rate=1.0, max_grad_norm=0.0, ent_coef=0.1, vf_coef=0.3
    )
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    batch["weights"] = torch.ones_like(batch["weights"])

    def loss(flat: torch.Tensor) -> torch.Tensor:
        out, values = algorithm.outputs({"policy": flat}, batch["obs"])
        dist = torch.distributions.Categorical(logits=out)
        policy = -(batch["advantages"] * dist.log_prob(batch["actions"])).mean()
        return policy + 0.3 * (values - batch["returns"]).square().mean() - 0.1 * dist.entropy().mean()

    flat = state.params["policy"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(flat), flat)
    new, _ = algorithm.train_step(state, batch, KEY)
    torch.testing.assert_close(state.params["policy"] - new.params["policy"], gradient, rtol=1e-4, atol=1e-6)
