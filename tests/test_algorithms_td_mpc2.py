"""TD-MPC2 against slow computations with plain autograd and NumPy, and against numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ACTION_DIM, BATCH, OBS_DIM, batch_for, make_algorithm, modules_of
from torch import Tensor

from rl_training.algorithms.acting import reset_carry, start_carry
from rl_training.algorithms.world_model.td_mpc2 import TDMPC2, TDMPC2Hyper
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.latent_model import SimNorm, TDMPC2Model
from rl_training.ops import rng
from rl_training.ops.planning import MPPI
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(4)
WALKER = EnvSpec("Walker", ArraySpec((24,)), ActionSpec("box", (), (6,), (-1.0,) * 6, (1.0,) * 6))
Modules = dict[str, Any]


def moved(algorithm: Any, seed: int = 0) -> Any:
    """A state whose rewards and values are not zero."""
    state, g = algorithm.init_state(seed), torch.Generator().manual_seed(5)

    def shifted(flats: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: x + 0.1 * torch.randn(x.shape, generator=g) for k, x in flats.items()}

    return state._replace(params=shifted(state.params), target=shifted(state.target))


# --- networks --------------------------------------------------------------------------------------------------------


def test_simnorm_by_hand() -> None:
    x = torch.tensor([0.0, math.log(3.0), 5.0, 5.0])
    torch.testing.assert_close(SimNorm(2)(x), torch.tensor([0.25, 0.75, 0.5, 0.5]))
    groups = SimNorm()(torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0))).view(3, 5, 3, 8).sum(-1)
    torch.testing.assert_close(groups, torch.ones(3, 5, 3))


def test_number_of_parameters_of_the_5m_model_by_hand() -> None:
    """Linear layers have weights and biases, and all but heads have a LayerNorm of two numbers for each output."""

    def hidden(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs + 2 * outputs

    encoder = hidden(24, 256) + hidden(256, 512)
    dynamics = hidden(512 + 6, 512) + 2 * hidden(512, 512)
    reward = hidden(512 + 6, 512) + hidden(512, 512) + 512 * 101 + 101
    policy = 2 * hidden(512, 512) + 512 * 12 + 12
    counts = {"encoder": encoder, "model": dynamics + reward, "critic": 5 * reward, "actor": policy}
    model = TDMPC2Model(WALKER, "5m")
    found = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert found == counts
    assert sum(found.values()) == 4_960_618


def test_rewards_and_values_begin_at_zero() -> None:
    algorithm: Any = make_algorithm("td_mpc2")
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    torch.testing.assert_close(algorithm.value(state, batch["obs"][:, 0]), torch.zeros(BATCH), rtol=0.0, atol=1e-6)
    weights = TDMPC2Model(WALKER, "5m").model.dynamics[0].get_parameter("weight")
    assert float(weights.detach().std()) == pytest.approx(0.02, rel=0.02)


# --- the discount ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"),
    [(500, 0.99), (200, 0.975), (50, 0.95), (100, 0.95), (1000, 0.995), (27_000, 0.995), (None, 0.9)],
)
def test_discount_by_the_length_of_episodes(length: int | None, expected: float) -> None:
    assert TDMPC2Hyper(gamma=0.9).discount(length) == pytest.approx(expected, abs=1e-12)


def test_discount_rule_can_be_switched_off_and_reaches_the_replay() -> None:
    assert TDMPC2Hyper(gamma=0.9, discount_denom=0.0).discount(500) == 0.9
    spec = EnvSpec("Test-v0", WALKER.observation, WALKER.action, max_episode_steps=200)
    assert TDMPC2(spec, size="tiny").sources(1)["replay"].gamma == pytest.approx(0.975)


# --- learning --------------------------------------------------------------------------------------------------------


def two_hot(x: Tensor) -> Tensor:
    """101 bins from -10 to 10, one number at a time."""
    out = torch.zeros(*x.shape, 101)
    for index in np.ndindex(*x.shape):
        value = float(x[index])
        place = (math.copysign(math.log(1.0 + abs(value)), value) + 10.0) / 0.2
        low = math.floor(place)
        out[(*index, low)] += 1.0 - (place - low)
        out[(*index, low + 1)] += place - low
    return out


def scalar(logits: Tensor) -> Tensor:
    x = (logits.softmax(-1) * torch.linspace(-10.0, 10.0, 101)).sum(-1)
    return x.sign() * (x.abs().exp() - 1.0)


def gaussian(out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(action, log-density) of the squashed policy."""
    mean, raw = out.chunk(2, -1)
    log_std = -10.0 + 6.0 * (raw.tanh() + 1.0)
    normal = torch.distributions.Normal(mean, log_std.exp())
    before = mean + log_std.exp() * noise
    action = before.tanh()
    slope = 2.0 * (math.log(2.0) - before - F.softplus(-2.0 * before))
    return action, (normal.log_prob(before) - slope).sum(-1)


def valid_rows(batch: Batch) -> Tensor:
    """[B, T]: collected, and no episode has begun since the first step of the sequence."""
    valid = batch["mask"].clone()
    for b in range(valid.shape[0]):
        for t in range(1, valid.shape[1]):
            if batch["is_first"][b, 1 : t + 1].any():
                valid[b, t] = False
    return valid


def slow_joint_loss(algorithm: Any, modules: Modules, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, predicted latents [T + 1, B, L]), by a loop over rows, steps and critics."""
    hp, valid = algorithm.hp, valid_rows(batch)
    z, latents, total = modules["encoder"](batch["obs"][:, 0]), [], torch.zeros(())
    latents.append(z)
    for t in range(hp.horizon):
        with torch.no_grad():
            next_z = modules["encoder"](batch["next_obs"][:, t])
        action = batch["actions"][:, t]
        after, reward, end = modules["model"](z, action)
        values = modules["critic"](z, action)
        for b in range(BATCH):
            share = float(valid[b, t] * batch["weights"][b]) / BATCH / hp.horizon
            step = 20.0 * F.mse_loss(after[b], next_z[b])
            step = step + 0.1 * F.cross_entropy(reward[b], two_hot(batch["rewards"][b, t]))
            for critic in values:
                step = step + 0.1 * F.cross_entropy(critic[b], two_hot(targets[t, b])) / len(values)
            total = total + share * 0.5**t * step
            if hp.episodic:
                ended = (batch["discounts"][b, t] == 0.0).to(torch.float32)
                total = total + share * F.binary_cross_entropy_with_logits(end[b], ended)
        z = after
        latents.append(z)
    return total, torch.stack(latents)


def slow_targets(algorithm: Any, modules: Modules, batch: Batch, key: Tensor) -> Tensor:
    """r + gamma x the smaller of two critics at the policy's action, with the noise and the two that the key draws."""
    with torch.no_grad():
        z = modules["encoder"](batch["next_obs"].transpose(0, 1))
        noise = rng.normal(rng.fold(key, 0), (algorithm.hp.horizon, BATCH, ACTION_DIM))
        action, _ = gaussian(modules["actor"](z), noise)
        chosen = rng.permutation(rng.fold(key, 1), algorithm.modules["critic"].members)[:2]
        rows = []
        for t in range(algorithm.hp.horizon):
            values = torch.stack([scalar(modules["slow_critic"](z[t], action[t])[i]) for i in chosen])
            rows.append(batch["rewards"][:, t] + batch["discounts"][:, t] * values.min(0).values)
        return torch.stack(rows)


@pytest.mark.parametrize("episodic", [False, True])
def test_joint_loss_and_its_gradient_equal_a_slow_computation(episodic: bool) -> None:
    algorithm: Any = make_algorithm("td_mpc2", episodic=episodic, max_grad_norm=0.0)
    state, batch = moved(algorithm), batch_for(algorithm)
    assert not valid_rows(batch).all(), "the batch must contain sequences that are cut"
    modules = modules_of(algorithm, state)
    targets = slow_targets(algorithm, modules, batch, rng.fold(KEY, 0))
    loss, latents = slow_joint_loss(algorithm, modules, batch, targets)
    names = ("encoder", "model", "critic")
    grads = torch.autograd.grad(loss, [p for name in names for p in modules[name].parameters()])

    rows = algorithm.sequence(batch)
    next_latents = algorithm.nets["encoder"](state.params["encoder"], rows.next_obs)
    found = algorithm.td_targets(state, rows, next_latents, rng.fold(KEY, 0))
    torch.testing.assert_close(found, targets, rtol=1e-4, atol=1e-5)
    params = {name: state.params[name].clone().requires_grad_() for name in names}
    with torch.enable_grad():
        value, (predicted, _) = algorithm.joint_loss(params, rows, next_latents, found, KEY)
    torch.testing.assert_close(value, loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predicted, latents, rtol=1e-4, atol=1e-6)
    by_name = zip(names, torch.autograd.grad(value, list(params.values())))
    parts = [part for name, flat in by_name for part in algorithm.nets[name].named(flat).values()]
    for ours, theirs in zip(parts, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_gradients_are_clipped_together_and_the_encoder_moves_by_a_share() -> None:
    """The first step of Adam moves each parameter with a large gradient by the step size."""
    algorithm: Any = make_algorithm("td_mpc2", learning_rate=1e-2, adam_eps=1e-20)
    state, batch = moved(algorithm), batch_for(algorithm)
    after, aux = algorithm.train_step(state, batch, KEY)
    for name, rate in (("encoder", 3e-3), ("model", 1e-2), ("critic", 1e-2), ("actor", 1e-2)):
        steps = (after.params[name] - state.params[name]).abs()
        assert float(steps.max()) == pytest.approx(rate, rel=1e-2), name
    for clip in (0.5, 0.0):
        algorithm = make_algorithm("td_mpc2", max_grad_norm=clip)
        after, aux = algorithm.train_step(state, batch, KEY)
        squares = [(after.opt[name]["m"] / 0.1).square().sum() for name in ("encoder", "model", "critic")]
        norm = torch.stack(squares).sum().sqrt()
        assert float(norm) == pytest.approx(clip or float(aux.metrics["grad_norm"]), rel=1e-3)


def test_policy_loss_equals_a_slow_computation() -> None:
    algorithm: Any = make_algorithm("td_mpc2", ent_coef=0.2, tau=1.0, max_grad_norm=0.0)
    state, batch = moved(algorithm), batch_for(algorithm)
    modules, rows, key = modules_of(algorithm, state), algorithm.sequence(batch), rng.fold(KEY, 9)
    latents = torch.randn(algorithm.hp.horizon + 1, BATCH, 16, generator=torch.Generator().manual_seed(1)).softmax(-1)
    valid = torch.cat([valid_rows(batch)[:, :1], valid_rows(batch)], 1)

    noise = rng.normal(rng.fold(key, 0), (algorithm.hp.horizon + 1, BATCH, ACTION_DIM))
    action, log_prob = gaussian(modules["actor"](latents), noise)
    values = torch.stack([torch.stack([scalar(q) for q in modules["critic"](z, a)]) for z, a in zip(latents, action)])
    values = values.mean(1)  # of both critics: [T + 1, B]
    first = values[0][valid[:, 0]].detach().numpy()
    scale = max(1.0, float(np.quantile(first, 0.95) - np.quantile(first, 0.05)))
    loss = torch.zeros(())
    for t in range(algorithm.hp.horizon + 1):
        for b in range(BATCH):
            share = float(valid[b, t] * batch["weights"][b]) / BATCH / (algorithm.hp.horizon + 1) * 0.5**t
            loss = loss - share * (values[t, b] / scale - 0.2 * ACTION_DIM * log_prob[t, b])
    grads = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(modules["actor"].parameters()))])

    after, metrics = algorithm.policy_step(state, rows, latents, key)
    assert float(metrics["actor_loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert float(metrics["q_scale"]) == pytest.approx(scale, rel=1e-4)
    first_moment = algorithm.nets["actor"].named(after.opt["actor"]["m"] / 0.1)
    torch.testing.assert_close(torch.cat([x.flatten() for x in first_moment.values()]), grads, rtol=1e-3, atol=1e-6)


def test_critics_follow_slowly() -> None:
    algorithm: Any = make_algorithm("td_mpc2")
    state = moved(algorithm)
    after, _ = algorithm.train_step(state, batch_for(algorithm), KEY)
    expected = 0.99 * state.target["critic"] + 0.01 * after.params["critic"]
    torch.testing.assert_close(after.target["critic"], expected)


def test_first_turn_makes_an_update_for_each_random_step() -> None:
    algorithm: Any = make_algorithm("td_mpc2", pretrain=True, learning_starts=41, gradient_steps=2)  # 2 environments
    (phase,) = algorithm.phases()
    assert [phase.calls(steps, steps // 2) for steps in (42, 44, 46)] == [43, 2, 2]
    assert algorithm.hp.planned_updates(3, 2) == 47
    without: Any = make_algorithm("td_mpc2", learning_starts=41)
    assert without.phases()[0].calls(42, 21) == 1


# --- planning --------------------------------------------------------------------------------------------------------


def test_mppi_fits_its_elites_as_a_loop_does() -> None:
    g = np.random.default_rng(0)
    plans, scores = g.uniform(-1, 1, (2, 7, 3, 2)), g.normal(size=(2, 7)) * 3.0
    mppi = MPPI(3, 2, population=7, elites=3, iterations=1, min_std=0.3, max_std=0.6, temperature=0.5)
    found = mppi.fit(torch.as_tensor(plans), torch.as_tensor(scores))
    for b in range(2):
        best = np.argsort(-scores[b])[:3]
        weights = np.exp(0.5 * (scores[b][best] - scores[b].max()))
        weights /= weights.sum()
        np.testing.assert_allclose(found.weights[b], weights, rtol=1e-6)
        for t in range(3):
            for a in range(2):
                mean = sum(w * plans[b, n, t, a] for w, n in zip(weights, best))
                variance = sum(w * (plans[b, n, t, a] - mean) ** 2 for w, n in zip(weights, best))
                assert float(found.mean[b, t, a]) == pytest.approx(mean)
                assert float(found.std[b, t, a]) == pytest.approx(np.clip(math.sqrt(variance), 0.3, 0.6))
    assert float(found.std.min()) == pytest.approx(0.3)  # the limits matter here
    assert float(found.std.max()) == pytest.approx(0.6)


def test_mppi_finds_the_best_plan_and_keeps_a_given_one() -> None:
    goal = torch.tensor([[[0.5, -0.3], [-0.8, 0.1], [0.9, 3.0]]])  # [B, H, A]

    def score(plans: Tensor, key: Tensor) -> Tensor:
        return -20.0 * (plans - goal.unsqueeze(1)).square().sum((-1, -2))

    mppi = MPPI(3, 2, population=1_000, elites=100, iterations=12)
    found = mppi.plan(score, torch.zeros(1, 3, 2), torch.zeros(1, 0, 3, 2), KEY)
    torch.testing.assert_close(found.mean, goal.clamp(-1.0, 1.0), atol=0.05, rtol=0.0)
    few = MPPI(3, 2, population=4, elites=1, iterations=2)
    given = goal.clamp(-1.0, 1.0).unsqueeze(1)
    assert torch.equal(few.plan(score, torch.zeros(1, 3, 2), given, KEY).mean, given[:, 0])


def test_mppi_draws_elites_by_their_weights() -> None:
    plans = torch.tensor([-0.5, 0.0, 0.5]).view(1, 3, 1, 1).expand(4_000, 3, 1, 1)
    mppi = MPPI(1, 1, population=3, elites=3, iterations=1, min_std=1e-3, max_std=1e-3, temperature=1.0)
    drawn = mppi.sample(mppi.fit(plans, torch.tensor([0.7, 0.2, 0.1]).log().expand(4_000, 3)), KEY).flatten()
    shares = [float(((drawn - x).abs() < 0.01).float().mean()) for x in (-0.5, 0.0, 0.5)]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.03)


@torch.no_grad()
@pytest.mark.parametrize("episodic", [False, True])
def test_returns_of_plans_equal_a_loop(episodic: bool) -> None:
    algorithm: Any = make_algorithm("td_mpc2", episodic=episodic, gamma=0.8)
    state = moved(algorithm)
    modules = modules_of(algorithm, state)
    obs, plans = batch_for(algorithm)["obs"][:2, 0], torch.rand(2, 5, 3, ACTION_DIM) * 2.0 - 1.0
    latent = modules["encoder"](obs)
    found = algorithm.returns(state, latent, plans, KEY)
    noise = rng.normal(rng.fold(KEY, 0), (10, ACTION_DIM)).view(2, 5, ACTION_DIM)
    ended = 0
    for b in range(2):
        for n in range(5):
            z, total, discount = latent[b : b + 1], 0.0, 1.0
            for action in plans[b, n]:
                z, reward, end = modules["model"](z, action[None])
                total += discount * float(scalar(reward))
                discount *= 0.8
                if episodic and float(end) > 0.0:
                    discount, ended = 0.0, ended + 1
            last, _ = gaussian(modules["actor"](z), noise[b, n][None])
            total += discount * float(scalar(modules["critic"](z, last)).mean())
            assert float(found[b, n]) == pytest.approx(total, rel=1e-3, abs=1e-4)
    assert bool(ended) == episodic


def test_search_begins_at_the_last_plan_shifted_by_one_step() -> None:
    algorithm: Any = make_algorithm("td_mpc2")
    state, obs = moved(algorithm), batch_for(algorithm)["obs"][:, 0]
    start = start_carry(algorithm, BATCH)
    carry, action, _ = algorithm.select_action(state, start, obs, KEY, explore=False)
    found = algorithm.search(state, algorithm.nets["encoder"](state.params["encoder"], obs), start["plan"],
                             KEY)  # fmt: skip
    assert torch.equal(action, found.mean[:, 0])
    assert torch.equal(carry["plan"][:, :-1], found.mean[:, 1:])
    assert not carry["plan"][:, -1].any()
    _, warm, _ = algorithm.select_action(state, carry, obs, KEY, explore=False)
    assert not torch.equal(warm, action)


def test_an_episode_that_begins_forgets_the_plan() -> None:
    algorithm: Any = make_algorithm("td_mpc2")
    state, obs = moved(algorithm), batch_for(algorithm)["obs"][:2, 0]
    carry, fresh, _ = algorithm.select_action(state, start_carry(algorithm, 2), obs, KEY, explore=False)
    carry = reset_carry(algorithm, carry, torch.tensor([True, False]))
    _, again, _ = algorithm.select_action(state, carry, obs, KEY, explore=False)
    assert torch.equal(again[0], fresh[0])
    assert not torch.equal(again[1], fresh[1])


def test_without_planning_the_policy_acts() -> None:
    algorithm: Any = make_algorithm("td_mpc2", plan=False)
    state, obs = moved(algorithm), batch_for(algorithm)["obs"][:, 0]
    assert algorithm.init_carry(3) == ()
    _, action, _ = algorithm.select_action(state, (), obs, KEY, explore=False)
    modules = modules_of(algorithm, state)
    expected = modules["actor"](modules["encoder"](obs)).chunk(2, -1)[0].tanh()
    torch.testing.assert_close(action, expected)
    _, explored, _ = algorithm.select_action(state, (), obs, KEY, explore=True)
    assert not torch.allclose(explored, expected)


def test_more_iterations_for_many_actions() -> None:
    wide = ActionSpec("box", (), (20,), (-1.0,) * 20, (1.0,) * 20)
    assert TDMPC2(WALKER, size="tiny").mppi.iterations == 6
    assert TDMPC2(EnvSpec("Wide", WALKER.observation, wide), size="tiny").mppi.iterations == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"plan_elites": 9}, "plan_elites = 9 is more than plan_population = 8"),
        ({"plan_policy_samples": 9}, "plan_policy_samples = 9 is more than plan_population = 8"),
        ({"plan_population": 0}, "plan_population"),
        ({"plan_iterations": 0}, "plan_iterations"),
        ({"horizon": 0}, "horizon"),
        ({"plan_min_std": 3.0}, "plan_min_std = 3.0 is more than plan_max_std = 2.0"),
        ({"discount_min": 0.999}, "discount_min = 0.999 is more than discount_max = 0.995"),
        ({"v_min": 10.0}, "v_min = 10.0 must be below v_max = 10.0"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_algorithm("td_mpc2", **fields)


def test_a_horizon_longer_than_any_episode_is_refused() -> None:
    spec = EnvSpec("Short-v0", ArraySpec((OBS_DIM,)), WALKER.action, max_episode_steps=2)
    with pytest.raises(UserError, match="longer than any episode of Short-v0"):
        TDMPC2(spec, size="tiny")
