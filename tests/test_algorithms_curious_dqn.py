"""DQN with a bonus by hand: the update of each network against plain autograd, what is paid, and who follows what."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_bits, batch_for, make_algorithm
from torch import Tensor, nn

from rl_training.algorithms.value.curious_dqn import CuriousDQN
from rl_training.algorithms.value.dqn import DQN
from rl_training.errors import UserError
from rl_training.models.value import MLPQNetwork
from rl_training.ops import rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(7)
PLAIN = {"learning_rate": 1e-2, "max_grad_norm": 0.0, "bonus_learning_rate": 1e-3, "bonus_update_share": 1.0}


def module(algorithm: Any, flat: Tensor, name: str) -> Any:
    """An ordinary module with these weights."""
    out = copy.deepcopy(algorithm.modules[name])
    algorithm.nets[name].write_to(out, flat)
    return out.requires_grad_()


def different_targets(algorithm: Any) -> Any:
    """A state whose slow networks are those of another seed."""
    other = algorithm.init_state(1).params
    return algorithm.init_state(0)._replace(target={name: other[name] for name in ("q", "intrinsic_q")})


def bonus_by_hand(algorithm: Any, state: Any, batch: Any) -> tuple[Any, Tensor]:
    """(the bonus's network as a module, the unscaled errors of RND with observations normalised by this batch)"""
    raw = batch["next_obs"].double()
    seen = ((raw - raw.mean(0)) / raw.std(0, correction=0)).clamp(-5.0, 5.0).float()
    net = module(algorithm, state.params["bonus"], "bonus")
    return net, ((net.predictor(seen) - net.target(seen).detach()) ** 2).mean(-1)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_update_equals_two_dqns_and_a_predictor_in_plain_torch(double: bool, normalize: bool) -> None:
    """Each value network has its own reward, discount, greedy policy and slow copy; the predictor learns its error."""
    algorithm = make_algorithm(
        "rnd_dqn", double=double, normalize_bonus=normalize, intrinsic_gamma=0.7, **PLAIN
    )  # fmt: skip
    state, batch = different_targets(algorithm), batch_for(algorithm)
    batch["weights"] = torch.ones_like(batch["weights"])
    batch["discounts"][:4] = 0.0
    bonus, errors = bonus_by_hand(algorithm, state, batch)
    paid = errors.detach() / errors.detach().std(correction=0) if normalize else errors.detach()
    ended = batch["discounts"] == 0.0
    rewards = {"q": batch["rewards"], "intrinsic_q": paid}
    discounts = {"q": batch["discounts"], "intrinsic_q": torch.where(ended, 0.0, 0.7)}
    rows, priority = torch.arange(len(paid)), torch.zeros(len(paid))
    expected = {}
    for name in ("q", "intrinsic_q"):
        online, slow = module(algorithm, state.params[name], name), module(algorithm, state.target[name], name)
        best = (online if double else slow)(batch["next_obs"]).argmax(-1)
        target = (rewards[name] + discounts[name] * slow(batch["next_obs"])[rows, best]).detach()
        q = online(batch["obs"])[rows, batch["actions"]]
        nn.functional.huber_loss(q, target).backward()
        torch.optim.Adam(online.parameters(), lr=1e-2).step()
        expected[name] = online
        priority += (q - target).abs().detach()
    errors.mean().backward()
    torch.optim.Adam(bonus.predictor.parameters(), lr=1e-3).step()
    expected["bonus"] = bonus

    after, aux = algorithm.train_step(state, batch, KEY)
    for name, net in expected.items():
        torch.testing.assert_close(after.params[name], algorithm.nets[name].flatten(net), rtol=1e-3, atol=5e-5)
    torch.testing.assert_close(aux.priority, priority, rtol=1e-3, atol=1e-4)
    assert float(aux.metrics["intrinsic_reward_mean"]) == pytest.approx(float(paid.mean()), rel=1e-3)
    assert float(aux.metrics["bonus_loss"]) == pytest.approx(float(errors.mean().detach()), rel=1e-3)
    assert int(after.step) == 1


def test_values_of_the_environments_rewards_are_those_of_dqn() -> None:
    """Bit for bit: the bonus changes only what is explored."""
    options = {"dueling": True, "target_rule": "munchausen", "target_update_interval": 2, "learning_rate": 1e-2}
    algorithm, plain = make_algorithm("rnd_dqn", **options), make_algorithm("dqn", **options)
    state = algorithm.init_state(0)
    like = plain.init_state(0)._replace(params={"q": state.params["q"]}, target={"q": state.target["q"]})
    for step in range(3):
        batch = batch_for(algorithm, seed=step)
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, step))
        like, _ = plain.train_step(like, batch, rng.fold(KEY, step))
    assert_same_bits(state.params["q"], like.params["q"])
    assert_same_bits(state.target["q"], like.target["q"])
    assert int(state.step) == int(like.step) == 3
    assert not torch.equal(state.target["intrinsic_q"], algorithm.init_state(0).target["intrinsic_q"])


def test_exploration_follows_the_sum_and_evaluation_the_environments_values() -> None:
    algorithm = make_algorithm(
        "rnd_dqn", intrinsic_coef=3.0, exploration_initial_eps=0.0, exploration_final_eps=0.0
    )  # fmt: skip
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    q, inner = (module(algorithm, state.params[name], name)(obs) for name in ("q", "intrinsic_q"))
    greedy, curious = q.argmax(-1), (q + 3.0 * inner).argmax(-1)
    assert not torch.equal(greedy, curious)
    assert torch.equal(algorithm.select_action(state, (), obs, KEY, explore=False)[1], greedy)
    assert torch.equal(algorithm.select_action(state, (), obs, KEY, explore=True)[1], curious)
    torch.testing.assert_close(algorithm.value(state, obs), q.amax(-1))
    algorithm = make_algorithm("rnd_dqn", exploration_initial_eps=1.0, exploration_final_eps=1.0)
    drawn = torch.stack([algorithm.select_action(state, (), obs, rng.fold(KEY, i), explore=True)[1] for i in range(9)])
    assert len(drawn.unique()) == algorithm.spec.action.n


@pytest.mark.parametrize("name", ["rnd_dqn", "icm_dqn"])
def test_what_was_replayed_often_pays_less_than_what_is_new(name: str) -> None:
    algorithm = make_algorithm(
        name, normalize_bonus=False, bonus_learning_rate=3e-3, bonus_update_share=1.0, bonus_hidden_sizes=[32]
    )  # fmt: skip
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state, _, _ = algorithm.paid(state, batch)
    new = {**batch, **{k: batch[k] + 3.0 for k in ("obs", "next_obs")}, "weights": torch.zeros_like(batch["weights"])}
    before = float(algorithm.paid(state, batch)[1].mean())
    for i in range(300):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    old, fresh = (float(algorithm.paid(state, rows)[1].mean()) for rows in (batch, new))
    assert old < 0.2 * before
    assert fresh > 3.0 * old


def test_moments_are_those_of_all_rows_seen_so_far() -> None:
    algorithm = make_algorithm("rnd_dqn")
    state, rows, rewards = algorithm.init_state(0), [], []
    for seed in range(3):
        batch = batch_for(algorithm, seed=seed)
        batch["weights"] = (torch.arange(len(batch["weights"])) % 3 > 0).float()
        state, paid, _ = algorithm.paid(state, batch)
        spread = float(torch.sqrt(state.extra["bonus_rewards"]["var"] + 1e-8))
        kept = batch["weights"] > 0
        rows.append(batch["next_obs"][kept].numpy())
        rewards.append((paid * spread)[kept].numpy())
    moments = state.extra["bonus_observations"]
    assert moments["mean"].numpy() == pytest.approx(np.concatenate(rows).mean(0), abs=1e-3)
    assert moments["var"].numpy() == pytest.approx(np.concatenate(rows).var(0), rel=1e-3)
    assert float(state.extra["bonus_rewards"]["var"]) == pytest.approx(np.concatenate(rewards).var(), rel=1e-2)


def test_random_network_survives_weight_decay_but_not_a_reset() -> None:
    algorithm = make_algorithm("rnd_dqn", optimizer="adamw", weight_decay=0.1, reset_interval=4, learning_rate=1e-2)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    for i in range(4):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    before, after = (module(algorithm, s.params["bonus"], "bonus") for s in (algorithm.init_state(0), state))
    assert all(torch.equal(a, b) for a, b in zip(before.target.parameters(), after.target.parameters()))
    assert not any(torch.equal(a, b) for a, b in zip(before.predictor.parameters(), after.predictor.parameters()))
    reset = algorithm.shell.resets.apply(state, 0)
    assert not torch.equal(reset.params["bonus"], state.params["bonus"])
    assert float(reset.extra["bonus_rewards"]["count"]) < 1.0  # the errors of the new networks have another scale


def test_images_are_normalised_pixel_by_pixel() -> None:
    spec = EnvSpec("Image-v0", ArraySpec((1, 12, 12), "uint8"), ActionSpec("discrete", (2,)))
    algorithm = CuriousDQN(spec, batch_size=4, bonus_hidden_sizes=[8], hidden_sizes=[8])
    g = np.random.default_rng(0)
    images = torch.as_tensor(g.integers(0, 256, (2, 6, 1, 12, 12)), dtype=torch.uint8)
    batch = {
        "obs": images[0], "next_obs": images[1], "rewards": torch.zeros(6), "discounts": torch.full((6,), 0.9),
        "actions": torch.zeros(6, dtype=torch.int64), "weights": torch.ones(6),
    }  # fmt: skip
    state, _ = algorithm.train_step(algorithm.init_state(0), batch, KEY)
    mean = state.extra["bonus_observations"]["mean"]
    torch.testing.assert_close(mean.double(), images[1].double().mean(0), rtol=1e-3, atol=1e-2)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UserError, match="leave out n_step"):
        make_algorithm("rnd_dqn", n_step=3)
    with pytest.raises(UserError, match="gamma must be above 0"):
        make_algorithm("rnd_dqn", gamma=0.0)
    with pytest.raises(UserError, match="takes no ready-made one"):
        CuriousDQN(EnvSpec("Test-v0", ArraySpec((4,)), ActionSpec("discrete", (2,))), q_network=MLPQNetwork(4, 2))
    mixed = {"image": ArraySpec((1, 16, 16), "uint8"), "vector": ArraySpec((3,))}
    with pytest.raises(UserError, match="one vector or image; Mixed-v0 has"):
        CuriousDQN(EnvSpec("Mixed-v0", mixed, ActionSpec("discrete", (2,))))
    assert CuriousDQN.__mro__[1] is DQN
