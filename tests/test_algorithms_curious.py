"""RND and ICM by hand: their rewards and losses, the normalisation of both, two returns, and what learns from what."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ACTION_SPECS, assert_same_bits, batch_for, make_algorithm, random_actions
from torch import Tensor, nn

from rl_training.algorithms.policy_gradient.curious import CuriousPPO
from rl_training.algorithms.policy_gradient.ppo import PPO
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(4)


def rollout(algorithm: Any, steps: int = 9, envs: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Observations are continuous in time within an episode; some rows are no transitions."""
    g, n = np.random.default_rng(seed), algorithm.spec.obs_dim
    ends = g.random((steps, envs)) < 0.3
    terminated = ends & (g.random((steps, envs)) < 0.6)
    valid = g.random((steps, envs)) < 0.85
    obs, next_obs = 2.0 + 3.0 * g.standard_normal((2, steps, envs, n))
    stays = ~ends[:-1] & valid[1:]
    next_obs[:-1][stays] = obs[1:][stays]
    return {
        "obs": torch.as_tensor(obs).float(), "next_obs": torch.as_tensor(next_obs).float(),
        "rewards": torch.as_tensor(g.standard_normal((steps, envs))).float(),
        "actions": random_actions(algorithm.spec, (steps, envs), g), "terminated": torch.as_tensor(terminated),
        "truncated": torch.as_tensor(ends & ~terminated), "valid": torch.as_tensor(valid),
    }  # fmt: skip


def module(algorithm: Any, state: Any, name: str) -> Any:
    """An ordinary module with the weights of the state."""
    out = copy.deepcopy(algorithm.modules[name])
    algorithm.nets[name].write_to(out, state.params[name])
    return out.requires_grad_()


class Normaliser:
    """The moments of all valid rows so far, and the discounted sums, as OpenAI's code keeps them."""

    def __init__(self, obs_dim: int, envs: int) -> None:
        self.count, self.mean, self.square = 1e-4, np.zeros(obs_dim), np.ones(obs_dim) * 1e-4
        self.rows: list[np.ndarray] = []
        self.sums, self.running = [], np.zeros(envs)

    def seen(self, obs: np.ndarray, valid: np.ndarray) -> np.ndarray:
        self.rows.append(obs[valid])
        rows = np.concatenate(self.rows)
        return np.clip((obs - rows.mean(0)) / rows.std(0), -5.0, 5.0)

    def scaled(self, rewards: np.ndarray, valid: np.ndarray, continues: np.ndarray, gamma: float) -> np.ndarray:
        for t, row in enumerate(rewards):
            self.running = row + gamma * self.running
            self.sums += list(self.running[valid[t]])
            self.running = self.running * continues[t]
        return rewards / np.std(self.sums)


@pytest.mark.parametrize("episodic", [False, True])
def test_intrinsic_rewards_are_normalised_as_in_numpy(episodic: bool) -> None:
    """Observations by all that was seen and clipped to +-5, errors by the deviation of their discounted sums; over two
    rollouts, so that both go on."""
    algorithm = make_algorithm("rnd", intrinsic_gamma=0.8, episodic_bonus=episodic)
    state, reference = algorithm.init_state(0), Normaliser(algorithm.spec.obs_dim, 2)
    bonus = module(algorithm, state, "bonus")
    for seed in (1, 2):
        rows = rollout(algorithm, seed=seed)
        rows["next_obs"][2, 0] = 1e3  # far outside: clipped
        valid = rows["valid"].numpy()
        seen = torch.as_tensor(reference.seen(rows["next_obs"].numpy().astype(np.float64), valid)).float()
        with torch.no_grad():
            error = ((bonus.predictor(seen) - bonus.target(seen)) ** 2).mean(-1).numpy() * valid
        ends = (rows["terminated"] | rows["truncated"]).numpy() & episodic
        followed = valid & np.concatenate([valid[1:], np.ones((1, 2), bool)])
        expected = reference.scaled(error, valid, followed & ~ends, 0.8)
        state, batch = algorithm.prepare(state, rows, KEY)
        ours = batch["intrinsic_rewards"].view(valid.shape).numpy()
        assert ours[valid] == pytest.approx(expected[valid], rel=2e-3)  # moments begin with a weight of 1e-4
        assert not ours[~valid].any()


def advantages_by_hand(
    rewards: Any, values: Any, next_values: Any, valid: Any, ended: Any, discounts: Any, lam: float
) -> np.ndarray:
    """A loop from the last step to the first."""
    out = np.zeros(rewards.shape)
    for n in range(rewards.shape[1]):
        following = 0.0
        for t in reversed(range(rewards.shape[0])):
            broken = ended[t, n] or (t + 1 < len(rewards) and not valid[t + 1, n])
            delta = rewards[t, n] + discounts[t, n] * next_values[t, n] - values[t, n]
            following = delta + (0.0 if broken else discounts[t, n] * lam * following)
            out[t, n] = following
    return out


@pytest.mark.parametrize("episodic", [False, True])
def test_advantage_is_the_weighted_sum_of_two_separate_ones(episodic: bool) -> None:
    algorithm = make_algorithm(
        "rnd", gamma=0.9, intrinsic_gamma=0.7, gae_lambda=0.8, extrinsic_coef=3.0, intrinsic_coef=0.5,
        episodic_bonus=episodic,
    )  # fmt: skip
    state, rows = algorithm.init_state(0), rollout(algorithm)
    _, batch = algorithm.prepare(state, rows, KEY)
    shape = rows["rewards"].shape
    valid, terminated = rows["valid"].numpy(), rows["terminated"].numpy()
    ended = terminated | rows["truncated"].numpy()
    with torch.no_grad():
        policy, critic = (module(algorithm, state, name) for name in ("policy", "intrinsic_critic"))
        values, next_values = (policy.value(rows[name]).numpy() for name in ("obs", "next_obs"))
        inner, next_inner = (critic(rows[name]).numpy() for name in ("obs", "next_obs"))
    extrinsic = advantages_by_hand(
        rows["rewards"].numpy(), values, next_values, valid, ended, 0.9 * ~terminated, 0.8
    )  # fmt: skip
    rewards = batch["intrinsic_rewards"].view(shape).numpy()
    if episodic:
        intrinsic = advantages_by_hand(rewards, inner, next_inner, valid, ended, 0.7 * ~terminated, 0.8)
    else:  # what follows an episode is the first observation of the next one, and nothing ever ends
        next_inner[:-1] = np.where((valid[1:] & valid[:-1]), inner[1:], next_inner[:-1])
        endless = np.zeros_like(ended)
        intrinsic = advantages_by_hand(rewards, inner, next_inner, valid, endless, 0.7 * np.ones(shape), 0.8)
    keep = valid.ravel()
    assert batch["extrinsic_advantages"].numpy()[keep] == pytest.approx(extrinsic.ravel()[keep], abs=1e-5)
    assert batch["intrinsic_returns"].numpy()[keep] == pytest.approx((intrinsic + inner).ravel()[keep], abs=1e-5)
    total = 3.0 * extrinsic + 0.5 * intrinsic
    assert batch["advantages"].numpy()[keep] == pytest.approx(total.ravel()[keep], abs=1e-5)


def test_an_end_of_an_episode_cuts_only_episodic_intrinsic_returns() -> None:
    """Two steps with the end of an episode between them: the reward after it counts for the step before it, or not."""
    results = []
    for episodic in (False, True):
        algorithm = make_algorithm("rnd", episodic_bonus=episodic, gae_lambda=1.0, intrinsic_gamma=0.5)
        rows = rollout(algorithm, steps=2, envs=2)
        rows["valid"][:] = True
        rows["terminated"] = torch.tensor([[True, True], [False, False]])
        _, batch = algorithm.prepare(algorithm.init_state(0), rows, KEY)
        results.append((batch["intrinsic_returns"].view(2, 2)[0], batch["intrinsic_rewards"].view(2, 2)[0]))
    assert torch.allclose(results[1][0], results[1][1])
    assert (results[0][0] - results[0][1]).abs().min() > 1e-3


def test_icm_is_ppo_on_the_sum_of_both_rewards() -> None:
    """With one discount, episodic returns and weights of 1, both advantages add up to that of the summed reward."""
    algorithm = make_algorithm("icm", eta=0.5)
    hp, state, rows = algorithm.hp, algorithm.init_state(0), rollout(algorithm)
    assert (hp.gamma, hp.intrinsic_gamma, hp.extrinsic_coef, hp.intrinsic_coef) == (0.99, 0.99, 1.0, 1.0)
    assert hp.episodic_bonus
    assert not hp.normalize_bonus
    _, batch = algorithm.prepare(state, rows, KEY)
    with torch.no_grad():
        policy, critic = (module(algorithm, state, name) for name in ("policy", "intrinsic_critic"))
        values, next_values = ((policy.value(rows[k]) + critic(rows[k])).numpy() for k in ("obs", "next_obs"))
    rewards = (rows["rewards"] + batch["intrinsic_rewards"].view(rows["rewards"].shape)).numpy()
    assert batch["intrinsic_rewards"].abs().max() > 1e-3
    valid, terminated = rows["valid"].numpy(), rows["terminated"].numpy()
    ended = terminated | rows["truncated"].numpy()
    expected = advantages_by_hand(rewards, values, next_values, valid, ended, 0.99 * ~terminated, hp.gae_lambda)
    keep = valid.ravel()
    assert batch["advantages"].numpy()[keep] == pytest.approx(expected.ravel()[keep], abs=1e-4)


@pytest.mark.parametrize("kind", sorted(ACTION_SPECS))
def test_icm_reward_and_loss_equal_those_of_the_paper(kind: str) -> None:
    algorithm = make_algorithm("icm", kind, eta=0.3, beta=0.4, bonus_update_share=1.0)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    net: Any = module(algorithm, state, "bonus")
    obs, next_obs = (batch[name].clamp(-5.0, 5.0) for name in ("bonus_obs", "bonus_next_obs"))
    now, following = net.encoder(obs), net.encoder(next_obs)
    actions, spec = batch["actions"], algorithm.spec.action
    if kind == "discrete":
        code = nn.functional.one_hot(actions, spec.n).float()
    elif kind == "multi_discrete":
        code = torch.cat([nn.functional.one_hot(actions[:, i], n) for i, n in enumerate(spec.nvec)], -1).float()
    else:
        code = actions.float()
    out = net.inverse_model(torch.cat([now, following], -1))
    distance = ((net.forward_model(torch.cat([now, code], -1)) - following) ** 2).sum(-1)
    if kind == "discrete":
        inverse = nn.functional.cross_entropy(out, actions, reduction="none")
    elif kind == "multi_discrete":
        parts = zip(out.split(spec.nvec, -1), actions.unbind(-1))
        inverse = sum(nn.functional.cross_entropy(o, a, reduction="none") for o, a in parts)
    elif kind == "multi_binary":
        inverse = nn.functional.binary_cross_entropy_with_logits(out, code, reduction="none").sum(-1)
    else:
        inverse = ((out - code) ** 2).mean(-1)
    rows = algorithm.bonus.rows(
        state.extra["bonus_observations"],
        {"actions": actions, "obs": batch["bonus_obs"], "next_obs": batch["bonus_next_obs"]},
    )
    reward = algorithm.bonus.reward(algorithm.nets["bonus"], state.params["bonus"], rows)
    assert torch.allclose(reward, 0.3 / 2 * distance, rtol=1e-4, atol=1e-6)  # Eq. 6
    weights = batch["weights"]
    loss = ((0.6 * inverse + 0.4 * 0.5 * distance) * weights).sum() / (weights > 0).sum()  # Eq. 7
    loss.backward()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    optimizer.step()
    after, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["bonus_loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    moved = algorithm.nets["bonus"].flatten(net)
    torch.testing.assert_close(after.params["bonus"], moved, rtol=1e-4, atol=1e-6)


def test_rnd_update_equals_plain_autograd_and_that_of_ppo() -> None:
    fields = {"ent_coef": 0.02, "vf_coef": 0.7, "learning_rate": 1e-2, "max_grad_norm": 0.0}
    algorithm = make_algorithm("rnd", **fields, bonus_learning_rate=1e-3, bonus_update_share=1.0)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    after, aux = algorithm.train_step(state, batch, KEY)
    weights = batch["weights"] / (batch["weights"] > 0).sum()

    bonus, critic = module(algorithm, state, "bonus"), module(algorithm, state, "intrinsic_critic")
    seen = batch["bonus_next_obs"].clamp(-5.0, 5.0)
    error = ((bonus.predictor(seen) - bonus.target(seen).detach()) ** 2).mean(-1)
    loss = (weights * error).sum()
    loss.backward()
    torch.optim.Adam(bonus.predictor.parameters(), lr=1e-3).step()
    value_loss = (weights * (critic(batch["obs"]) - batch["intrinsic_returns"]) ** 2).sum()
    (0.7 * value_loss).backward()
    torch.optim.Adam(critic.parameters(), lr=1e-2, eps=1e-5).step()
    for name, net in (("bonus", bonus), ("intrinsic_critic", critic)):
        torch.testing.assert_close(after.params[name], algorithm.nets[name].flatten(net), rtol=1e-4, atol=2e-6)
    assert float(aux.metrics["bonus_loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert float(aux.metrics["intrinsic_value_loss"]) == pytest.approx(float(value_loss.detach()), rel=1e-4)

    ppo = make_algorithm("ppo", gamma=0.999, **fields)
    same = ppo.init_state(0)._replace(params={"policy": state.params["policy"]}, opt={"policy": state.opt["policy"]})
    expected, _ = ppo.train_step(same, batch, KEY)
    assert_same_bits(after.params["policy"], expected.params["policy"])


def test_random_network_never_changes() -> None:
    """Not even where the optimiser lets weights decay."""
    algorithm = make_algorithm("rnd", optimizer="adamw", weight_decay=0.1, learning_rate=1e-2)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    before = module(algorithm, state, "bonus")
    for i in range(5):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    after = module(algorithm, state, "bonus")
    assert all(torch.equal(a, b) for a, b in zip(before.target.parameters(), after.target.parameters()))
    assert not any(torch.equal(a, b) for a, b in zip(before.predictor.parameters(), after.predictor.parameters()))


@pytest.mark.parametrize("name", ["rnd", "icm"])
def test_what_was_seen_often_pays_less_than_what_is_new(name: str) -> None:
    algorithm = make_algorithm(name, bonus_learning_rate=3e-3, bonus_update_share=1.0, bonus_hidden_sizes=[32])
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    new = {k: x + 3.0 if k in ("bonus_obs", "bonus_next_obs") else x for k, x in batch_for(algorithm, seed=1).items()}

    def paid(state: Any, batch: Any) -> float:
        columns = {"actions": batch["actions"], **{k: batch[f"bonus_{k}"] for k in algorithm.bonus.columns}}
        rows = algorithm.bonus.rows(state.extra["bonus_observations"], columns)
        return float(algorithm.bonus.reward(algorithm.nets["bonus"], state.params["bonus"], rows).mean())

    before = paid(state, batch), paid(state, new)
    for i in range(300):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    assert paid(state, batch) < 0.2 * before[0]
    assert paid(state, new) > 3.0 * paid(state, batch)


def test_bonus_learns_from_a_share_of_each_minibatch() -> None:
    algorithm = make_algorithm("rnd", bonus_update_share=0.25)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    chosen = rng.uniform(rng.fold(KEY, 1), (len(batch["weights"]),)) < 0.25
    assert 0 < int(chosen.sum()) < len(chosen)
    after, _ = algorithm.train_step(state, batch, KEY)
    other = {**batch, "bonus_next_obs": torch.where(chosen.unsqueeze(-1), batch["bonus_next_obs"], 9.0)}
    assert_same_bits(algorithm.train_step(state, other, KEY)[0].params["bonus"], after.params["bonus"])
    other["bonus_next_obs"] = batch["bonus_next_obs"].where(~chosen.unsqueeze(-1), torch.tensor(0.5))
    assert not torch.equal(algorithm.train_step(state, other, KEY)[0].params["bonus"], after.params["bonus"])


def test_images_are_normalised_pixel_by_pixel() -> None:
    spec = EnvSpec("Image-v0", ArraySpec((1, 12, 12), "uint8"), ActionSpec("discrete", (2,)))
    algorithm = CuriousPPO(spec, n_steps=4, batch_size=8, num_envs=2)
    g = np.random.default_rng(0)
    images = torch.as_tensor(g.integers(0, 256, (2, 4, 2, 1, 12, 12)), dtype=torch.uint8)
    flags = torch.zeros(4, 2, dtype=torch.bool)
    rows = {
        "obs": images[0], "next_obs": images[1], "rewards": torch.zeros(4, 2), "valid": ~flags, "terminated": flags,
        "actions": torch.zeros(4, 2, dtype=torch.int64), "truncated": flags,
    }  # fmt: skip
    state, batch = algorithm.prepare(algorithm.init_state(0), rows, KEY)
    assert batch["bonus_next_obs"].dtype == torch.uint8
    moments = state.extra["bonus_observations"]
    flat = images[1].flatten(0, 1).double()
    torch.testing.assert_close(moments["mean"].double(), flat.mean(0), rtol=1e-3, atol=1e-2)
    seen = algorithm.bonus.seen(moments, batch["bonus_next_obs"]) / 255.0
    torch.testing.assert_close(seen.mean(0), torch.zeros(1, 12, 12), rtol=0.0, atol=1e-3)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(1, 12, 12), rtol=1e-2, atol=1e-2)
    assert torch.isfinite(algorithm.train_step(state, batch, KEY)[1].metrics["bonus_loss"])


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UserError, match="rnd cannot clip values"):
        make_algorithm("rnd", clip_range_vf=0.2)
    mixed = {"image": ArraySpec((1, 16, 16), "uint8"), "vector": ArraySpec((3,))}
    with pytest.raises(UserError, match="one vector or image; Mixed-v0 has"):
        CuriousPPO(EnvSpec("Mixed-v0", mixed, ActionSpec("discrete", (2,))))
    with pytest.raises(UserError, match="bonus"):
        make_algorithm("rnd", bonus="count")
    assert issubclass(CuriousPPO, PPO)
