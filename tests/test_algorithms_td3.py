"""TD3 and DDPG against the same update written plainly with autograd and torch.optim."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import ACTION_DIM, BATCH, OBS_DIM, batch_for, make_algorithm

from rl_training.algorithms import TD3
from rl_training.models import MLPTD3Model
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def modules_of(algorithm: Any, state: Any) -> dict[str, torch.nn.Module]:
    """Ordinary modules with the state's weights: actor, critic, and their targets under `slow_`."""
    out = {}
    for name, net in algorithm.nets.items():
        for prefix, source in (("", state.params), ("slow_", state.target)):
            module = copy.deepcopy(algorithm.modules[name]).requires_grad_(not prefix)
            net.write_to(module, source[name])
            out[prefix + name] = module
    return out


@pytest.mark.parametrize(("name", "critics", "delay", "noise"), [("td3", 2, 2, 0.2), ("ddpg", 1, 1, 0.0)])
def test_update_equals_plain_autograd(name: str, critics: int, delay: int, noise: float) -> None:
    rate, tau = 1e-2, 0.1
    algorithm = make_algorithm(name, learning_rate=rate, tau=tau)
    state = algorithm.init_state(0)
    m = modules_of(algorithm, state)
    assert algorithm.nets["critic"].module.members == critics
    adams = {n: torch.optim.Adam(m[n].parameters(), lr=rate) for n in ("actor", "critic")}
    for i in range(5):
        batch, key = batch_for(algorithm, seed=i), rng.fold(KEY, i)
        weights = batch["weights"]
        with torch.no_grad():
            smoothing = (noise * rng.normal(key, (BATCH, ACTION_DIM))).clamp(-0.5, 0.5)
            action = (m["slow_actor"](batch["next_obs"]).tanh() + smoothing).clamp(-1.0, 1.0)
            next_q = m["slow_critic"](batch["next_obs"], action).min(0).values
            goal = batch["rewards"] + batch["discounts"] * next_q
        errors = m["critic"](batch["obs"], batch["actions"]) - goal
        critic_loss = (weights * (errors**2).sum(0)).mean()
        adams["critic"].zero_grad()
        critic_loss.backward()
        adams["critic"].step()
        if i % delay == 0:
            action = m["actor"](batch["obs"]).tanh()
            adams["actor"].zero_grad()
            (-(weights * m["critic"](batch["obs"], action)[0]).mean()).backward()
            adams["actor"].step()
            with torch.no_grad():
                for n in ("actor", "critic"):
                    for old, new in zip(m["slow_" + n].parameters(), m[n].parameters()):
                        old.lerp_(new, tau)
        state, aux = algorithm.train_step(state, batch, key)
        assert float(aux.metrics["critic_loss"]) == pytest.approx(float(critic_loss.detach()), rel=1e-4)
        torch.testing.assert_close(aux.priority, errors.detach().abs().mean(0), rtol=1e-3, atol=1e-4)
        for n, net in algorithm.nets.items():
            torch.testing.assert_close(net.flatten(m[n]), state.params[n], rtol=1e-3, atol=2e-5)
            torch.testing.assert_close(net.flatten(m["slow_" + n]), state.target[n], rtol=1e-3, atol=2e-5)


def test_target_smoothing_is_clipped_noise_inside_the_action_bounds() -> None:
    algorithm = make_algorithm("td3", target_policy_noise=0.4, target_noise_clip=0.3)
    state = algorithm.init_state(0)
    obs = torch.zeros(5000, OBS_DIM)
    clean = algorithm.nets["actor"](state.target["actor"], obs).tanh()
    shift = algorithm.target_action(state.target["actor"], {}, obs, KEY) - clean
    expected = (0.4 * rng.normal(KEY, (5000, ACTION_DIM))).clamp(-0.3, 0.3)
    torch.testing.assert_close(shift, expected)  # the initial policy is far from the bounds
    assert float(shift.abs().max()) == pytest.approx(0.3)
    assert 0.35 < float((shift.abs() > 0.299).float().mean()) < 0.55  # P(|n| > 0.75) = 0.453
    far = algorithm.target_action(100.0 * state.target["actor"], {}, torch.randn(500, OBS_DIM), KEY)
    assert float(far.abs().max()) == 1.0
    assert make_algorithm("ddpg").hp.target_policy_noise == 0.0


def test_actor_and_targets_move_at_every_third_update_only() -> None:
    algorithm = make_algorithm("td3", policy_delay=3)
    state = algorithm.init_state(0)
    for i in range(7):
        new, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), rng.fold(KEY, i))
        moved = not torch.equal(new.params["actor"], state.params["actor"])
        assert moved == (i % 3 == 0)
        assert torch.equal(new.opt["actor"]["m"], state.opt["actor"]["m"]) != moved
        for name in ("actor", "critic"):
            assert torch.equal(new.target[name], state.target[name]) != moved
        assert not torch.equal(new.params["critic"], state.params["critic"])
        state = new
    assert float(state.opt["actor"]["count"]) == 3.0
    assert float(state.opt["critic"]["count"]) == 7.0


def test_value_is_the_smaller_critic_at_the_deterministic_action() -> None:
    algorithm = make_algorithm("td3")
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    m = modules_of(algorithm, state)
    q = m["critic"](obs, m["actor"](obs).tanh())
    torch.testing.assert_close(algorithm.value(state, obs), torch.minimum(q[0], q[1]).detach())


def test_bare_algorithm_with_a_model_of_ones_own() -> None:
    algorithm = TD3(model=MLPTD3Model(OBS_DIM, ACTION_DIM, (8,), num_critics=3))
    batch = {k: v for k, v in batch_for(make_algorithm("td3")).items() if k not in ("weights", "discounts")}
    result = algorithm.update({**batch, "dones": torch.zeros(BATCH)})
    assert result.metrics["critic_loss"] > 0.0
    assert algorithm.act(batch["obs"], deterministic=True).shape == (BATCH, ACTION_DIM)
    assert algorithm.last_td_errors is not None
    assert algorithm.nets["critic"].module.members == 3
