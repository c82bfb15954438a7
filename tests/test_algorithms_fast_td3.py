"""FastTD3: the target of its critics, its update against plain autograd, its exploration, and the size of its batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ACTION_DIM, BATCH, batch_for, config_for, make_algorithm, modules_of

from rl_training.algorithms.acting import reset_carry, start_carry
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.models import TD3Model
from rl_training.ops import rng

KEY = rng.key_from_seed(0)
SUPPORT = {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0}


def test_target_is_the_projection_of_the_critic_with_the_smaller_projected_mean() -> None:
    """Two critics by hand. The first promises 2 for sure; the second 0 or 2. With reward 1 and discount 1, their means
    are 3 and 2 before the projection and 2 and 1.5 after it, so the second one makes the target. At reward -3 their
    means after it are -1 and -1.5 (-3 is moved to -2): the second one again."""
    algorithm = make_algorithm("fast_td3", **SUPPORT)
    first, second = torch.tensor([0.0, 0, 0, 0, 1]), torch.tensor([0.0, 0, 0.5, 0, 0.5])
    logits = torch.stack([first, second]).clamp(min=1e-9).log()  # [E, Z]
    algorithm.critic.net = lambda params, obs, actions: logits.unsqueeze(1).expand(2, len(obs), 5)
    batch = {"obs": torch.zeros(2, 5), "next_obs": torch.zeros(2, 5), "rewards": torch.tensor([1.0, -3.0]),
             "discounts": torch.ones(2)}  # fmt: skip
    probs, mean = algorithm.critic.target(algorithm.init_state(0), batch, torch.zeros(2, ACTION_DIM))
    torch.testing.assert_close(probs, torch.tensor([[0.0, 0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0, 0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(mean, torch.tensor([2.0, -2.0]))


def test_the_critic_is_chosen_by_its_mean_after_the_projection() -> None:
    """Before it, both means are 1, which would choose the first critic. After it, values above 2 count as 2, so that
    the second one's mean is 0.5."""
    algorithm = make_algorithm("fast_td3", **SUPPORT)
    logits = torch.tensor([[0.0, 0, 1, 0, 0], [0.5, 0, 0, 0, 0.5]]).clamp(min=1e-9).log()
    algorithm.critic.net = lambda params, obs, actions: logits.unsqueeze(1).expand(2, len(obs), 5)
    # The first is 1 for sure, the second -1 or 3.
    batch = {"obs": torch.zeros(1, 5), "next_obs": torch.zeros(1, 5), "rewards": torch.tensor([1.0]),
             "discounts": torch.ones(1)}  # fmt: skip
    probs, mean = algorithm.critic.target(algorithm.init_state(0), batch, torch.zeros(1, ACTION_DIM))
    torch.testing.assert_close(probs, torch.tensor([[0.0, 0.5, 0, 0, 0.5]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(mean, torch.tensor([1.0]))


def projected(probs: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, atoms: torch.Tensor) -> torch.Tensor:
    """C51, Algorithm 1, sample by sample."""
    width, out = float(atoms[1] - atoms[0]), torch.zeros_like(probs)
    for b in range(len(probs)):
        for j, z in enumerate(atoms.tolist()):
            place = (min(max(float(rewards[b]) + float(discounts[b]) * z, float(atoms[0])), float(atoms[-1]))
                     - float(atoms[0])) / width  # fmt: skip
            low = min(int(place), len(atoms) - 2)
            out[b, low] += probs[b, j] * (low + 1 - place)
            out[b, low + 1] += probs[b, j] * (place - low)
    return out


def test_update_equals_plain_autograd() -> None:
    rate, tau, decay = 1e-2, 0.1, 0.1
    algorithm = make_algorithm("fast_td3", learning_rate=rate, tau=tau, target_policy_noise=0.3, **SUPPORT)
    state = algorithm.init_state(0)
    atoms = torch.linspace(-2.0, 2.0, 5)
    m = modules_of(algorithm, state)
    assert set(state.target) == {"critic"}
    adams = {n: torch.optim.AdamW(m[n].parameters(), lr=rate, weight_decay=decay) for n in ("actor", "critic")}
    for i in range(4):
        batch, key = batch_for(algorithm, seed=i), rng.fold(KEY, i)
        weights = batch["weights"]
        with torch.no_grad():
            smoothing = (0.3 * rng.normal(key, (BATCH, ACTION_DIM))).clamp(-0.5, 0.5)
            action = (m["actor"](batch["next_obs"]).tanh() + smoothing).clamp(-1.0, 1.0)  # the online actor's
            each = [projected(p.softmax(-1), batch["rewards"], batch["discounts"], atoms)
                    for p in m["slow_critic"](batch["next_obs"], action)]  # fmt: skip
            smaller = (each[0] @ atoms < each[1] @ atoms).unsqueeze(-1)
            target = torch.where(smaller, each[0], each[1])
        errors = -(target * m["critic"](batch["obs"], batch["actions"]).log_softmax(-1)).sum(-1)  # [E, B]
        critic_loss = (weights * errors.sum(0)).mean()
        adams["critic"].zero_grad()
        critic_loss.backward()
        adams["critic"].step()
        with torch.no_grad():  # after every update
            for old, new in zip(m["slow_critic"].parameters(), m["critic"].parameters()):
                old.lerp_(new, tau)
        if i % 2 == 0:
            values = m["critic"](batch["obs"], m["actor"](batch["obs"]).tanh()).softmax(-1) @ atoms
            adams["actor"].zero_grad()
            (-(weights * values.amin(0)).mean()).backward()
            adams["actor"].step()
        state, aux = algorithm.train_step(state, batch, key)
        torch.testing.assert_close(aux.metrics["critic_loss"], critic_loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(aux.priority, errors.mean(0), rtol=1e-4, atol=1e-5)
        for name, source in (("actor", state.params), ("critic", state.params), ("slow_critic", state.target)):
            net = algorithm.nets[name.removeprefix("slow_")]
            torch.testing.assert_close(source[name.removeprefix("slow_")], net.flatten(m[name]), rtol=1e-3, atol=1e-5)


def test_updates_between_those_of_the_policy_move_the_targets_of_the_critics_alone() -> None:
    algorithm = make_algorithm("fast_td3")
    (phase,) = algorithm.phases()
    assert phase.period == 2
    state = algorithm.init_state(0)
    assert phase.between is not None
    after, _ = phase.between(state, batch_for(algorithm), KEY)
    assert torch.equal(after.params["actor"], state.params["actor"])
    expected = torch.lerp(state.target["critic"], after.params["critic"], algorithm.hp.tau)
    torch.testing.assert_close(after.target["critic"], expected)


def test_each_episode_draws_the_scale_of_its_noise_and_keeps_it() -> None:
    algorithm = make_algorithm("fast_td3", exploration_noise=0.4, exploration_noise_min=0.1)
    state, rows = algorithm.init_state(0), 2_000
    obs = torch.zeros(rows, 5)
    mean = algorithm.greedy(state, obs)
    carry, noises = start_carry(algorithm, rows), []
    for i in range(60):
        carry, actions, _ = algorithm.select_action(state, carry, obs, rng.fold(KEY, i), explore=True)
        noises.append(actions - mean)
    scales = torch.stack(noises).pow(2).mean((0, 2)).sqrt()  # measured, of each row
    drawn = 0.1 + 0.3 * carry["scale"][:, 0]
    assert torch.corrcoef(torch.stack([scales, drawn]))[0, 1] > 0.98
    # Uniform on [0, 1]: the share below a quarter is a quarter, within three standard errors.
    for edge in (0.25, 0.5, 0.75):
        assert float((carry["scale"] < edge).float().mean()) == pytest.approx(edge, abs=3 * 0.5 / rows**0.5)
    starts = torch.zeros(rows, dtype=torch.bool)
    starts[:7] = True
    again, _, _ = algorithm.select_action(state, reset_carry(algorithm, carry, starts), obs, KEY, explore=True)
    assert torch.equal(again["scale"][7:], carry["scale"][7:])
    assert not (again["scale"][:7] == carry["scale"][:7]).any()


def test_evaluation_has_no_noise() -> None:
    algorithm = make_algorithm("fast_td3")
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    actions = algorithm.select_action(state, algorithm.init_carry(BATCH), obs, KEY, explore=False)[1]
    torch.testing.assert_close(actions, algorithm.nets["actor"](state.params["actor"], obs).tanh())


@pytest.mark.parametrize(("envs", "fields", "rows"), [
    (1, {}, 256), (128, {}, 32_768), (1_024, {}, 32_768), (4, {"batch_per_env": 0}, 32_768),
    (4, {"batch_size": 64}, 64),
])  # fmt: skip
def test_the_batch_grows_with_the_environments_up_to_its_size(envs: int, fields: dict[str, Any], rows: int) -> None:
    algorithm = make_algorithm("fast_td3", **{"batch_size": 32_768, **fields})
    algorithm.num_envs = envs
    assert [phase.batch_size for phase in algorithm.phases()] == [rows]


def test_initial_actions_are_close_to_zero() -> None:
    algorithm = make_algorithm("fast_td3", hidden_sizes=[64, 64])
    assert float(algorithm.greedy(algorithm.init_state(0), torch.randn(100, 5)).abs().max()) < 0.2


def test_a_run_reports_targets_that_the_support_clips(tmp_path: Path) -> None:
    fields = {"v_min": -0.5, "v_max": 0.0}
    with pytest.warns(UserWarning, match=r"fast_td3: v_min = -0\.5 and v_max = 0 clip 100% of the targets"):
        Trainer(config_for("fast_td3", tmp_path, num_envs=2, algo_kwargs=fields), progress=False).run()


@pytest.mark.parametrize(("fields", "message"), [
    ({"exploration_noise_min": 0.5}, r"exploration_noise_min = 0\.5 must not be above exploration_noise = 0\.4"),
    ({"v_min": 3.0, "v_max": 3.0}, "v_min = 3 must be below v_max = 3"),
    ({"v_min": 3.0}, "give two numbers, or leave both on auto"),
    ({"batch_per_env": -1}, "batch_per_env"),
])  # fmt: skip
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_algorithm("fast_td3", **fields)


def test_a_model_with_other_outputs_is_refused() -> None:
    algorithm = make_algorithm("fast_td3")
    with pytest.raises(UserError, match="the critics have 7 outputs, but num_atoms is 101"):
        type(algorithm)(model=TD3Model(algorithm.spec, (8,), critic_outputs=7))
