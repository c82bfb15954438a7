"""ACER by hand: the truncated gradient with its correction, the trust region, targets and a whole update against plain
autograd, and which rollouts an update reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import batch_for, config_for, make_algorithm, spec_for
from torch import Tensor, nn

from rl_training.algorithms.value.acer import Known, policy_gradient, trust_region
from rl_training.data.sequence import NewestSequences, RecurrentReplay
from rl_training.data.storage import transition_columns
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def random_policies(rows: int, actions: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits of pi, probabilities of mu, Q, Q^ret), float64."""
    g = torch.Generator().manual_seed(seed)
    logits, other, q = (2.0 * torch.randn(rows, actions, generator=g, dtype=torch.float64) for _ in range(3))
    return logits, other.softmax(-1), q, torch.randn(rows, generator=g, dtype=torch.float64)


def test_gradient_equals_autograd_of_the_truncated_objective() -> None:
    """Eq. 9: min(c, rho) log pi(a) (Q^ret - V) + E_pi [(1 - c / rho)_+ log pi (Q - V)], all else constant."""
    logits, mu, q, target = random_policies(50, 4)
    actions, c = torch.arange(50) % 4, 1.5
    logits.requires_grad_()
    log_pi = logits.log_softmax(-1)
    pi = log_pi.detach().exp()
    rho, value = pi / mu, (pi * q).sum(-1)
    assert (rho > c).any(-1).sum() > 10
    chosen = log_pi[torch.arange(50), actions]
    first = rho[torch.arange(50), actions].clamp(max=c) * chosen * (target - value)
    second = (pi * (1.0 - c / rho).clamp(min=0.0) * log_pi * (q - value.unsqueeze(-1))).sum(-1)
    (expected,) = torch.autograd.grad((first + second).sum(), logits, retain_graph=True)
    gradient = policy_gradient(pi, Known(target, value, q, rho), actions, c)
    (found,) = torch.autograd.grad((gradient * log_pi.exp()).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("c", [0.5, 2.0, 10.0])
def test_correction_removes_the_bias_of_truncation(c: float) -> None:
    """Averaged over actions of mu, with Q^ret = Q, the gradient is that of sum pi Q whatever the bound (Eq. 7)."""
    logits, mu, q, _ = random_policies(20, 5, seed=1)
    logits.requires_grad_()
    pi = logits.softmax(-1)
    value = (pi * q).sum(-1)
    (expected,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
    constant, rho = pi.detach(), pi.detach() / mu
    gradient = torch.zeros_like(q)
    for a in range(5):
        known = Known(q[:, a], value.detach(), q, rho)
        gradient += mu[:, a : a + 1] * policy_gradient(constant, known, torch.full((20,), a), c)
    (found,) = torch.autograd.grad((gradient * pi).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_trust_region_is_the_nearest_gradient_that_keeps_the_bound() -> None:
    logits, average, gradient, _ = random_policies(40, 3, seed=2)
    probs = logits.softmax(-1).requires_grad_()
    divergence = (average * (average.log() - probs.log())).sum()
    (k,) = torch.autograd.grad(divergence, probs)
    z = trust_region(gradient, probs.detach(), average, 0.3)
    inside = (k * gradient).sum(-1) <= 0.3
    assert 5 < inside.sum() < 35
    assert torch.equal(z[inside], gradient[inside])
    slope = (k * z).sum(-1)
    torch.testing.assert_close(slope[~inside], torch.full_like(slope[~inside], 0.3))
    moved = (gradient - z)[~inside]  # along k, backwards: the shortest way to the plane
    cosine = nn.functional.cosine_similarity(moved, k[~inside], dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


def loop_update(algorithm: Any, module: nn.Module, average: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of an update, row by row, with the trust region solved for each row."""
    hp = algorithm.hp
    total, count = torch.zeros(()), 0
    for b in range(len(batch["rewards"])):
        logits, q = module(batch["obs"][b])
        next_logits, next_q = module(batch["next_obs"][b])
        pi, steps = logits.softmax(-1), len(logits)
        fixed, qs = pi.detach(), q.detach()
        old = average(batch["obs"][b])[0].softmax(-1).detach()
        next_value = (next_logits.softmax(-1) * next_q).sum(-1).detach()
        mu = batch["behaviour_log_probs"][b].exp()
        rho = fixed / mu
        actions = batch["actions"][b].tolist()
        target = 0.0
        for t in reversed(range(steps)):
            more = 0.0
            if t + 1 < steps and not batch["is_first"][b, t + 1] and batch["mask"][b, t + 1]:
                a = actions[t + 1]
                more = min(1.0, float(rho[t + 1, a])) * (target - float(qs[t + 1, a]))
            target = float(batch["rewards"][b, t]) + float(batch["discounts"][b, t]) * (float(next_value[t]) + more)
            if not batch["mask"][b, t]:
                continue
            count += 1
            value = (fixed[t] * qs[t]).sum()
            g = (1.0 - hp.correction_term / rho[t]).clamp(min=0.0) * (qs[t] - value)
            g[actions[t]] += (
                min(hp.correction_term, float(rho[t, actions[t]])) / fixed[t, actions[t]] * (target - value)
            )
            g = g - float(hp.ent_coef.start) * (fixed[t].log() + 1.0)
            k = -old[t] / fixed[t]
            z = g - max(0.0, float(k.dot(g)) - hp.delta) / float(k.dot(k)) * k
            critic = 0.5 * (target - q[t, actions[t]]) ** 2
            total = total + batch["weights"][b] * (hp.q_coef * critic - (z * pi[t]).sum())
    return total / count


@pytest.mark.parametrize("limit", [0.05, 1e9])
def test_update_equals_plain_autograd(limit: float) -> None:
    settings = {"delta": limit, "correction_term": 1.3, "ent_coef": 0.02, "q_coef": 0.7, "learning_rate": 0.01}
    algorithm = make_algorithm("acer", hidden_sizes=[6], alpha=0.9, **settings)
    net = algorithm.nets["policy"]
    state = algorithm.init_state(0)
    state = state._replace(params={"policy": 3.0 * state.params["policy"]})  # away from the average policy
    module, average = (copy.deepcopy(algorithm.modules["policy"]).requires_grad_() for _ in range(2))
    net.write_to(module, state.params["policy"])
    optimizer = torch.optim.RMSprop(module.parameters(), lr=0.01, alpha=0.99, eps=1e-5)
    limited = []
    for i in range(3):
        batch = batch_for(algorithm, seed=i, size=7)
        net.write_to(average, state.target["policy"])
        loss = loop_update(algorithm, module, average, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 10.0)
        optimizer.step()
        before = state.target["policy"]
        state, aux = algorithm.train_step(state, batch, KEY)
        limited.append(float(aux.metrics["limited"]))
        assert float(aux.metrics["loss"]) == pytest.approx(loss.item(), rel=1e-3)
        torch.testing.assert_close(state.params["policy"], net.flatten(module), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(state.target["policy"], 0.9 * before + 0.1 * state.params["policy"])
    assert (max(limited) > 0.0) == (limit < 1.0)


def test_trust_region_can_be_switched_off() -> None:
    batch = batch_for(make_algorithm("acer"))
    free, bound = make_algorithm("acer", trust_region=False), make_algorithm("acer", delta=1e9)
    after = [a.train_step(a.init_state(0), batch, KEY)[0].params["policy"] for a in (free, bound)]
    torch.testing.assert_close(*after)


# --- replay ----------------------------------------------------------------------------------------------------------


def test_newest_sequences_are_the_last_rollout_of_every_environment() -> None:
    spec, envs, steps = spec_for("acer"), 3, 4
    replay = RecurrentReplay(transition_columns(spec), 60, envs, length=steps, period=steps, gamma=0.9)
    data = replay.init(1, torch.device("cpu"))
    newest, always = NewestSequences(replay), torch.ones(1, envs, dtype=torch.bool)
    for t in range(36):  # the ring has 20 rows: older ones are overwritten
        obs = torch.full((1, envs, spec.obs_dim), float(t)) + 100.0 * torch.arange(envs).view(1, envs, 1)
        flags = torch.zeros(1, envs, dtype=torch.bool)
        row = {"obs": obs, "next_obs": obs + 1.0, "actions": torch.zeros(1, envs, dtype=torch.int64),
               "rewards": obs[..., 0], "terminated": flags, "truncated": flags}  # fmt: skip
        replay.write(data, row, always)
        if (t + 1) % steps == 0:
            one = {name: column[0] for name, column in data.items()}
            batch = newest.sample(one, KEY, envs, torch.zeros(()))
            expected = torch.arange(t - 3.0, t + 1.0) + 100.0 * torch.arange(envs).unsqueeze(-1)
            assert torch.equal(batch["obs"][..., 0], expected)
            assert batch["mask"].all()
            assert batch["discounts"].eq(0.9).all()


def test_each_rollout_is_learned_from_once_and_then_replayed(tmp_path: Any) -> None:
    settings = {"n_steps": 4, "replay_ratio": 2, "learning_starts": 16}
    config = config_for("acer", tmp_path, num_envs=2, total_timesteps=160, algo_kwargs=settings)
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    assert result.summary["gradient_steps"] == 19 * 3  # rollouts 2 to 20
    newest, replayed = trainer.algorithm.phases()
    assert (newest.source, newest.batch_size, newest.every, newest.times) == ("newest", 2, 4, 1)
    assert (replayed.source, replayed.every, replayed.times) == ("replay", 4, 2)
    data = trainer.loop.learner.tree["data"]
    behaviour = data["behaviour_log_probs"][0][: data["count"][0, 0]]
    torch.testing.assert_close(behaviour.exp().sum(-1), torch.ones(len(behaviour)))
    assert len(behaviour.unique(dim=0)) > 40  # of the policies that acted, not of the last one


def test_no_replay_is_one_update_a_rollout() -> None:
    assert [phase.name for phase in make_algorithm("acer", replay_ratio=0).phases()] == ["newest"]


def test_stored_probabilities_are_those_of_the_policy_that_acts() -> None:
    algorithm = make_algorithm("acer")
    state, obs = algorithm.init_state(0), torch.randn(6, 5)
    _, _, stored = algorithm.select_action(state, (), obs, KEY, explore=True)
    logits, _ = algorithm.nets["policy"](state.params["policy"], obs)
    torch.testing.assert_close(stored["behaviour_log_probs"], logits.log_softmax(-1))
    q = algorithm.action_values(state, obs)
    torch.testing.assert_close(algorithm.value(state, obs), (logits.softmax(-1) * q).sum(-1))


# --- bad input -------------------------------------------------------------------------------------------------------


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(UserError, match="acer needs a discrete action space; Test-v0 has Box"):
        make_algorithm("acer", "box")


def test_learning_cannot_start_before_the_first_rollout(tmp_path: Any) -> None:
    settings = {"n_steps": 20, "learning_starts": 30}
    with pytest.raises(UserError, match="learning_starts = 30 must be at least 40: n_steps = 20 steps of each of 2"):
        Trainer(config_for("acer", tmp_path, num_envs=2, algo_kwargs=settings), progress=False)
