"""SAC against the same update written plainly with torch.distributions, autograd and torch.optim."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers import ACTION_DIM, batch_for, make_algorithm, spec_for

from rl_training.errors import UserError
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def squashed(out: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Action and log-probability of tanh(mean + std * noise) by torch.distributions."""
    mean, log_std = out.chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5.0, 2.0).exp())
    pre = mean + normal.scale * noise
    correction = 2.0 * (math.log(2.0) - pre - torch.nn.functional.softplus(-2.0 * pre))
    return pre.tanh(), (normal.log_prob(pre) - correction).sum(-1)


@pytest.mark.parametrize("ent_coef", ["auto", 0.2, 0.0])
def test_update_equals_plain_autograd(ent_coef: Any) -> None:
    rate, tau = 1e-2, 0.1
    algorithm = make_algorithm("sac", ent_coef=ent_coef, ent_coef_init=0.5, learning_rate=rate, tau=tau)
    state = algorithm.init_state(0)
    actor, critic = (copy.deepcopy(algorithm.modules[n]).requires_grad_() for n in ("actor", "critic"))
    slow = copy.deepcopy(critic).requires_grad_(False)
    nets = algorithm.nets
    nets["actor"].write_to(actor, state.params["actor"])
    nets["critic"].write_to(critic, state.params["critic"])
    nets["critic"].write_to(slow, state.target["critic"])
    start = 0.5 if ent_coef == "auto" else max(ent_coef, 1e-12)
    log_alpha = torch.tensor(math.log(start), requires_grad=ent_coef == "auto")
    adams = [torch.optim.Adam(m.parameters(), lr=rate) for m in (critic, actor)]
    alpha_adam = torch.optim.Adam([log_alpha], lr=rate) if ent_coef == "auto" else None

    for i in range(4):
        batch, key = batch_for(algorithm, seed=i), rng.fold(KEY, i)
        shape, weights = (len(batch["rewards"]), ACTION_DIM), batch["weights"]
        noise = [rng.normal(rng.fold(key, n), shape) for n in (0, 1)]
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = squashed(actor(batch["next_obs"]), noise[0])
            next_q = slow(batch["next_obs"], action).min(0).values
            goal = batch["rewards"] + batch["discounts"] * (next_q - alpha * log_prob)
        errors = critic(batch["obs"], batch["actions"]) - goal
        critic_loss = (weights * 0.5 * (errors[0] ** 2 + errors[1] ** 2)).mean()
        adams[0].zero_grad()
        critic_loss.backward()
        adams[0].step()

        action, log_prob = squashed(actor(batch["obs"]), noise[1])
        actor_loss = (weights * (alpha * log_prob - critic(batch["obs"], action).min(0).values)).mean()
        adams[1].zero_grad()
        actor_loss.backward()
        adams[1].step()

        if alpha_adam is not None:  # Eq. 18: minimise E[-alpha (log pi + target entropy)]
            weighted = (weights * log_prob.detach()).mean()
            alpha_loss = -log_alpha.exp() * (weighted - ACTION_DIM)
            alpha_adam.zero_grad()
            alpha_loss.backward()
            alpha_adam.step()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), critic.parameters()):
                old.lerp_(new, tau)

        state, aux = algorithm.train_step(state, batch, key)
        assert float(aux.metrics["critic_loss"]) == pytest.approx(float(critic_loss), rel=1e-4)
        assert float(aux.metrics["actor_loss"]) == pytest.approx(float(actor_loss), rel=1e-3, abs=1e-5)
        torch.testing.assert_close(nets["critic"].flatten(critic), state.params["critic"], rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(nets["actor"].flatten(actor), state.params["actor"], rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(nets["critic"].flatten(slow), state.target["critic"], rtol=1e-3, atol=2e-5)
        assert float(state.extra["log_alpha"]) == pytest.approx(float(log_alpha), rel=1e-4)
        torch.testing.assert_close(aux.priority, errors.detach().abs().mean(0), rtol=1e-3, atol=1e-4)


def test_temperature_moves_towards_the_target_entropy() -> None:
    for target, sign in ((-100.0, -1), (100.0, 1)):
        algorithm = make_algorithm("sac", target_entropy=target, ent_coef_init=0.3)
        state, before = algorithm.init_state(0), math.log(0.3)
        for i in range(5):
            state, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), rng.fold(KEY, i))
            assert sign * (float(state.extra["log_alpha"]) - before) > 0
            before = float(state.extra["log_alpha"])
    assert make_algorithm("sac").target_entropy == -ACTION_DIM


def test_value_is_the_smaller_critic_at_the_deterministic_action() -> None:
    algorithm = make_algorithm("sac")
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    out = algorithm.nets["actor"](state.params["actor"], obs)
    q = algorithm.nets["critic"](state.params["critic"], obs, out[:, :ACTION_DIM].tanh())
    torch.testing.assert_close(algorithm.value(state, obs), torch.minimum(q[0], q[1]))


def test_target_update_interval() -> None:
    algorithm = make_algorithm("sac", target_update_interval=3, tau=1.0)
    state = algorithm.init_state(0)
    for i in range(1, 7):
        state, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), KEY)
        assert torch.equal(state.target["critic"], state.params["critic"]) == (i % 3 == 0)


def test_refuses_what_it_cannot_do() -> None:
    from rl_training.algorithms import SAC
    from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

    with pytest.raises(
        UserError, match=r"sac needs a bounded continuous \(Box\) action space; Test-v0 has Discrete\(3\)"
    ):
        SAC(spec_for("dqn"))
    endless = EnvSpec("Free-v0", ArraySpec((3,)), ActionSpec("box", (), (1,), (-math.inf,), (math.inf,)))
    with pytest.raises(UserError, match="bounded action space"):
        SAC(endless)
    with pytest.raises(UserError, match="at least 0"):
        make_algorithm("sac", ent_coef=-0.1)
