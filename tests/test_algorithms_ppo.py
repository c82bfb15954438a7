"""PPO by hand: the clipped objective and where its gradient stops, the loss against plain autograd, normalisers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import batch_for, make_algorithm, random_actions
from torch import nn

from rl_training.algorithms.policy_gradient.ppo import PPO
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_items
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.rollout import RolloutLearner
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(0)


def with_ratio(algorithm: Any, state: Any, ratios: list[float], advantages: list[float]) -> dict[str, torch.Tensor]:
    """A batch in which the new policy's probability is `ratios` times that of the behaviour policy."""
    batch = batch_for(algorithm, size=len(ratios))
    out, values = algorithm.nets["policy"](state.params["policy"], batch["obs"])
    batch["log_probs"] = algorithm.dist.log_prob(out, batch["actions"]) - torch.log(torch.tensor(ratios))
    batch["advantages"] = torch.tensor(advantages)
    batch["returns"] = values.clone()  # no value gradient
    batch["weights"] = torch.ones(len(ratios))
    return batch


@pytest.mark.parametrize("kind", ["discrete", "box", "multi_discrete", "multi_binary"])
def test_clipped_objective_and_its_gradient(kind: str) -> None:
    algorithm = make_algorithm(
        "ppo", kind, normalize_advantage=False, clip_range=0.2, optimizer="sgd", learning_rate=1.0, max_grad_norm=0.0
    )
    state = algorithm.init_state(0)

    def step(ratio: float, advantage: float) -> tuple[float, bool]:
        batch = with_ratio(algorithm, state, [ratio], [advantage])
        new, aux = algorithm.train_step(state, batch, KEY)
        moved = not torch.allclose(new.params["policy"], state.params["policy"], rtol=0.0, atol=1e-7)
        return float(aux.metrics["policy_loss"]), moved

    # min(r A, clip(r) A), Eq. 7; outside the clip on the side that would gain, nothing moves.
    for ratio, advantage, value, moves in [
        (1.1, 2.0, 2.2, True), (1.5, 2.0, 2.4, False), (0.5, 2.0, 1.0, True),
        (0.9, -2.0, -1.8, True), (0.5, -2.0, -1.6, False), (1.5, -2.0, -3.0, True),
    ]:  # fmt: skip
        loss, moved = step(ratio, advantage)
        assert loss == pytest.approx(-value, rel=1e-4)
        assert moved is moves, (ratio, advantage)


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_update_equals_plain_autograd(kind: str) -> None:
    algorithm = make_algorithm(
        "ppo", kind, ent_coef=0.02, vf_coef=0.7, clip_range=0.15, learning_rate=1e-2, max_grad_norm=0.4
    )
    state = algorithm.init_state(0)
    net, module = algorithm.nets["policy"], copy.deepcopy(algorithm.modules["policy"])
    net.write_to(module, state.params["policy"])
    module.requires_grad_()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, eps=1e-5)
    for i in range(4):
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
        advantages = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
        ratio = (log_prob - batch["log_probs"]).exp()
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.85, 1.15) * advantages).mean()
        value = nn.functional.mse_loss(values, batch["returns"])
        loss = policy + 0.7 * value - 0.02 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.4)
        optimizer.step()
        state, aux = algorithm.train_step(state, batch, KEY)
        metrics = {k: float(v) for k, v in aux.metrics.items()}
        expected = {"loss": loss, "policy_loss": policy, "value_loss": value, "entropy": entropy.mean()}
        assert {k: metrics[k] for k in expected} == pytest.approx(
            {k: float(v) for k, v in expected.items()}, rel=1e-4, abs=1e-6
        )
        torch.testing.assert_close(net.flatten(module), state.params["policy"], rtol=1e-4, atol=1e-5)
        assert metrics["approx_kl"] >= 0.0


def rollout(algorithm: Any, steps: int = 12, envs: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    import numpy as np

    g, n = np.random.default_rng(seed), algorithm.spec.obs_dim
    ends = g.random((steps, envs)) < 0.3
    terminated = ends & (g.random((steps, envs)) < 0.5)

    def as_float(x: Any) -> torch.Tensor:
        return torch.as_tensor(x, dtype=torch.float32)

    return {
        "obs": as_float(3.0 + 2.0 * g.standard_normal((steps, envs, n))),
        "rewards": as_float(g.normal(size=(steps, envs))),
        "next_obs": as_float(3.0 + 2.0 * g.standard_normal((steps, envs, n))),
        "actions": random_actions(algorithm.spec, (steps, envs), g), "terminated": torch.as_tensor(terminated),
        "truncated": torch.as_tensor(ends & ~terminated), "valid": torch.as_tensor(g.random((steps, envs)) < 0.9),
    }  # fmt: skip


def test_prepare_computes_advantages_by_the_definition() -> None:
    """GAE as a double loop over the rollout: bootstrap at truncation, none at termination; nothing of a row that is no
    transition (a worker broke) comes into those before it."""
    algorithm = make_algorithm("ppo", "discrete", gamma=0.9, gae_lambda=0.8)
    state, data = algorithm.init_state(0), rollout(make_algorithm("ppo", "discrete"))
    new, batch = algorithm.prepare(state, data, KEY)
    assert torch.equal(new.params["policy"], state.params["policy"])
    values, next_values = algorithm.value(state, data["obs"]), algorithm.value(state, data["next_obs"])
    steps, envs = data["rewards"].shape
    advantages = torch.zeros(steps, envs)
    for e in range(envs):
        for t in range(steps):
            total, scale = 0.0, 1.0
            for k in range(t, steps):
                bootstrap = 0.0 if data["terminated"][k, e] else 0.9 * float(next_values[k, e])
                total += scale * (float(data["rewards"][k, e]) + bootstrap - float(values[k, e]))
                scale *= 0.9 * 0.8
                if data["terminated"][k, e] or data["truncated"][k, e] or not data["valid"][min(k + 1, steps - 1), e]:
                    break
            advantages[t, e] = total
    kept = data["valid"].flatten()
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(batch["advantages"][kept], advantages.flatten()[kept], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch["returns"][kept], (advantages + values).flatten()[kept], rtol=1e-4, atol=1e-5)
    assert torch.equal(batch["weights"], data["valid"].flatten().float())


def test_observation_statistics_follow_the_valid_data() -> None:
    algorithm = make_algorithm("ppo", "discrete", normalize_observations=True)
    state, seen = algorithm.init_state(0), []
    for i in range(3):
        data = rollout(algorithm, seed=i)
        seen.append(data["obs"][data["valid"]])
        state, _ = algorithm.prepare(state, data, KEY)
    everything = torch.cat(seen)
    moments = state.extra["observations"]
    torch.testing.assert_close(moments["mean"], everything.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(moments["var"], everything.var(0, unbiased=False), rtol=2e-2, atol=1e-2)
    # They are part of the policy: acting and values see normalised observations.
    shifted = state._replace(extra={"observations": {**moments, "mean": moments["mean"] + 1.0}})
    obs = everything[:5]
    assert not torch.equal(algorithm.value(state, obs), algorithm.value(shifted, obs))


def test_reward_scaling_follows_the_discounted_return() -> None:
    algorithm = make_algorithm("ppo", "discrete", normalize_rewards=True, gamma=0.9)
    state, running, returns = algorithm.init_state(0), [0.0, 0.0], []
    for i in range(4):
        data = rollout(algorithm, steps=50, seed=i)
        data["valid"][:] = True
        for t in range(50):
            for e in range(2):
                running[e] = 0.9 * running[e] + float(data["rewards"][t, e])
                returns.append(running[e])
                if data["terminated"][t, e] or data["truncated"][t, e]:
                    running[e] = 0.0
        state, _ = algorithm.prepare(state, data, KEY)
    spread = float(torch.tensor(returns).var(unbiased=False))
    assert float(state.extra["returns"]["var"]) == pytest.approx(spread, rel=1e-3)
    assert state.extra["returns"]["running"].tolist() == pytest.approx(running, rel=1e-4, abs=1e-5)


def test_schedules_reach_the_loss() -> None:
    algorithm = make_algorithm(
        "ppo", "discrete", clip_range={"kind": "linear", "start": 0.4, "end": 0.0}, normalize_advantage=False,
        learning_rate={"kind": "linear", "start": 1e-3, "end": 0.0},
    )  # fmt: skip
    state = algorithm.init_state(0)
    batch = with_ratio(algorithm, state, [1.3], [1.0])
    half = state._replace(progress=torch.tensor(0.5))
    assert float(algorithm.train_step(state, batch, KEY)[1].metrics["policy_loss"]) == pytest.approx(-1.3, rel=1e-4)
    assert float(algorithm.train_step(half, batch, KEY)[1].metrics["policy_loss"]) == pytest.approx(-1.2, rel=1e-4)
    end, _ = algorithm.train_step(state._replace(progress=torch.tensor(1.0)), batch_for(algorithm), KEY)
    assert torch.equal(end.params["policy"], state.params["policy"]), "a learning rate of 0 moves nothing"


def test_image_observations_cannot_be_normalised() -> None:
    from rl_training.algorithms import PPO
    from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

    spec = EnvSpec("Image-v0", ArraySpec((1, 16, 16), "uint8"), ActionSpec("discrete", (2,)))
    with pytest.raises(UserError, match="vector observation"):
        PPO(spec, normalize_observations=True)


@pytest.mark.slow
def test_prepare_compiled_equals_eager_with_normalisers_and_several_seeds() -> None:
    """The batch must be normalised with the statistics it was collected under, not with those it leads to: torch 2.11
    reordered the two when the graph wrote the statistics itself."""
    spec = EnvSpec("x", ArraySpec((3,)), ActionSpec("box", (), (1,), (-1.0,), (1.0,)))
    results = []
    for mode in ("eager", "compile"):
        algorithm = PPO(spec, num_envs=2, n_steps=8, batch_size=16, normalize_observations=True, normalize_rewards=True)
        learner = RolloutLearner(algorithm, (0, 1), 2, 1000, Executor(mode, torch.device("cpu")))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        data = learner.tree["data"]
        for name in ("obs", "next_obs", "rewards", "actions"):
            data[name].copy_(torch.randn(data[name].shape, generator=generator))
        data["valid"].fill_(True)
        extra, batch = learner._prepare(learner.tree)
        results.append({**dict(tree_items(extra, "extra")), **dict(tree_items(batch, "batch"))})
    eager, compiled = results
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, atol=1e-5, rtol=1e-5, msg=name)
