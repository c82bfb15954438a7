"""D4PG: the projected target, the two losses and where their gradients go."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import ACTION_DIM, BATCH, OBS_DIM, batch_for, make_algorithm

from rl_training.algorithms import D4PG, d4pg_loss
from rl_training.errors import UserError
from rl_training.models import MLPD4PGModel
from rl_training.ops import rng

KEY = rng.key_from_seed(0)
FIELDS = {"num_atoms": 11, "v_min": -5.0, "v_max": 5.0}


def test_target_is_the_projection_of_the_target_networks_distribution() -> None:
    algorithm = make_algorithm("d4pg", **FIELDS)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state = state._replace(target={n: 3.0 * x for n, x in state.target.items()})  # not the online networks
    got = algorithm.target_probs(state, batch)
    action = algorithm.nets["actor"](state.target["actor"], batch["next_obs"]).tanh()
    probs = algorithm.nets["critic"](state.target["critic"], batch["next_obs"], action)[0].softmax(-1)
    for b in range(BATCH):  # C51, Algorithm 1, in Python floats
        mass = [0.0] * 11
        for j in range(11):
            z = min(max(float(batch["rewards"][b]) + float(batch["discounts"][b]) * (j - 5.0), -5.0), 5.0)
            position = z + 5.0
            low = min(math.floor(position), 9)
            mass[low] += float(probs[b, j]) * (low + 1 - position)
            mass[low + 1] += float(probs[b, j]) * (position - low)
        torch.testing.assert_close(got[b], torch.tensor(mass), atol=1e-5, rtol=0)
    ended = batch["discounts"] == 0
    assert bool(ended.any())
    torch.testing.assert_close((got @ algorithm.atoms)[ended], batch["rewards"][ended])  # all mass at the reward


def test_update_equals_plain_autograd() -> None:
    rate, tau = 1e-2, 0.1
    algorithm = make_algorithm("d4pg", learning_rate=rate, tau=tau, **FIELDS)
    state = algorithm.init_state(0)
    m = {n: copy.deepcopy(x).requires_grad_() for n, x in algorithm.modules.items()}
    adams = {}
    for n, net in algorithm.nets.items():
        net.write_to(m[n], state.params[n])
        adams[n] = torch.optim.Adam(m[n].parameters(), lr=rate)
    for i in range(3):
        batch = batch_for(algorithm, seed=i)
        weights = batch["weights"]
        target = algorithm.target_probs(state, batch)
        logits = m["critic"](batch["obs"], batch["actions"])[0]
        entropy = -(target * logits.log_softmax(-1)).sum(-1)
        critic_loss = (weights * entropy).mean()
        policy_q = m["critic"](batch["obs"], m["actor"](batch["obs"]).tanh())[0].softmax(-1) @ algorithm.atoms
        actor_loss = -(weights * policy_q).mean()  # before the critic's step: both learn from the same weights
        grads = {
            "critic": torch.autograd.grad(critic_loss, list(m["critic"].parameters()), retain_graph=True),
            "actor": torch.autograd.grad(actor_loss, list(m["actor"].parameters())),
        }
        for n, module in m.items():
            for parameter, grad in zip(module.parameters(), grads[n]):
                parameter.grad = grad
            adams[n].step()
        old = state.target
        state, aux = algorithm.train_step(state, batch, KEY)
        assert set(aux.metrics) == {"critic_loss", "actor_loss", "target_q_mean", "q_value_mean", "target_clipped"}
        assert float(aux.metrics["critic_loss"]) == pytest.approx(float(critic_loss.detach()), rel=1e-4)
        assert float(aux.metrics["actor_loss"]) == pytest.approx(float(actor_loss.detach()), rel=1e-3, abs=1e-5)
        assert float(aux.metrics["target_q_mean"]) == pytest.approx(
            float((weights * (target @ algorithm.atoms)).mean()), abs=1e-5
        )
        torch.testing.assert_close(aux.priority, entropy.detach(), rtol=1e-4, atol=1e-5)
        for n, net in algorithm.nets.items():
            torch.testing.assert_close(net.flatten(m[n]), state.params[n], rtol=1e-3, atol=5e-5)
            torch.testing.assert_close(state.target[n], torch.lerp(old[n], state.params[n], tau))


def test_loss_by_hand() -> None:
    atoms = torch.tensor([-1.0, 0.0, 1.0])
    logits, target = torch.log(torch.tensor([[0.2, 0.3, 0.5]])), torch.tensor([[0.0, 0.5, 0.5]])
    metrics = d4pg_loss(logits, torch.zeros(1, 3), target, atoms, torch.ones(1))
    assert float(metrics["critic_loss"]) == pytest.approx(-0.5 * math.log(0.3) - 0.5 * math.log(0.5))
    assert float(metrics["q_value_mean"]) == pytest.approx(0.3)
    assert float(metrics["target_q_mean"]) == pytest.approx(0.5)
    assert float(metrics["actor_loss"]) == pytest.approx(0.0, abs=1e-7)


def test_model_helpers_and_its_own_support() -> None:
    model = MLPD4PGModel(OBS_DIM, ACTION_DIM, (8,), num_atoms=5, v_min=0.0, v_max=8.0)
    assert model.support.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    obs, actions = torch.randn(3, OBS_DIM), torch.rand(3, ACTION_DIM)
    logits = model.logits(obs, actions)
    assert logits.shape == (3, 5)
    torch.testing.assert_close(model.q_values(obs, actions), (logits.softmax(-1) * model.support).sum(-1))
    algorithm = D4PG(model=model)  # the defaults of the algorithm are another support
    assert torch.equal(algorithm.atoms, model.support)
    torch.testing.assert_close(algorithm.value(algorithm.state, obs), model.q_values(obs, model.act(obs)).detach())


def test_bad_support() -> None:
    with pytest.raises(UserError, match=r"v_min = 3 must be below v_max = 3"):
        make_algorithm("d4pg", v_min=3.0, v_max=3.0)
    assert make_algorithm("d4pg").hp.n_step == 5
