"""Details that published coefficients of offline algorithms depend on, and the networks of sac and td3 on images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ACTION_DIM, ACTION_SPECS, BATCH, OBS_DIM, batch_for, config_for, make_algorithm, modules_of

from rl_training import registry
from rl_training.algorithms.offline.xql import gumbel_loss
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.spec import ArraySpec, EnvSpec

KEY = rng.key_from_seed(0)


# --- coefficients mean what they mean in CORL -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fields"), [("edac", {"eta": 0.7}), ("cql", {"cql_alpha": 3.0, "num_actions": 2})])
def test_penalties_are_added_to_squared_errors_without_a_half(name: str, fields: dict[str, float]) -> None:
    """CORL: sum over the critics of the mean squared error, plus the weighted penalty. The penalty is the difference
    between two losses on the same batch, with and without its weight; the rest is the squared error itself."""
    weight = next(iter(fields))
    with_penalty = make_algorithm(name, **fields)
    without = make_algorithm(name, **{**fields, weight: 0.0})
    state, batch = with_penalty.init_state(0), batch_for(with_penalty)
    m = modules_of(without, without.init_state(0))
    loss = {a: float(a.train_step(state, batch, KEY)[1].metrics["critic_loss"]) for a in (with_penalty, without)}
    next_action, log_prob = without.dist.sample_and_log_prob(m["actor"](batch["next_obs"]), rng.fold(KEY, 0))
    entropy = -log_prob if name == "edac" else 0.0  # the temperature starts at 1
    next_q = m["slow_critic"](batch["next_obs"], next_action).amin(0) + entropy
    target = batch["rewards"] + batch["discounts"] * next_q
    q = m["critic"](batch["obs"], batch["actions"])
    squared = (batch["weights"] * (q - target).square().sum(0)).mean()
    halved = 0.5 if name == "edac" else 1.0  # without its penalty, EDAC is SAC itself
    assert loss[without] == pytest.approx(halved * float(squared.detach()), rel=1e-4)
    loss[without] = float(squared.detach())
    doubled = make_algorithm(name, **{**fields, weight: 2.0 * fields[weight]})
    twice = float(doubled.train_step(state, batch, KEY)[1].metrics["critic_loss"])
    assert twice - loss[with_penalty] == pytest.approx(loss[with_penalty] - loss[without], rel=1e-3)
    assert abs(loss[with_penalty] - loss[without]) > 1e-3


def test_rlpd_aims_at_half_the_entropy_of_sac() -> None:
    assert make_algorithm("sac").target_entropy == -ACTION_DIM
    assert make_algorithm("rlpd").target_entropy == -ACTION_DIM / 2
    assert make_algorithm("rlpd", target_entropy=-3.0).target_entropy == -3.0


def test_xql_divides_its_loss_by_the_largest_exponential_of_the_batch() -> None:
    difference = torch.tensor([0.5, 3.0, -2.0, 9.0], requires_grad=True)
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0])  # the last row does not count
    loss = gumbel_loss(difference, 2.0, 7.0, weights)
    z = difference / 2.0
    expected = (torch.exp(z) - z - 1.0) / math.exp(1.5)
    torch.testing.assert_close(loss[:3], expected[:3])
    (weights * loss).sum().backward()
    # The divisor is a constant: (exp z - 1) / (temperature exp m).
    gradient = (torch.exp(z.detach()) - 1.0) / (2.0 * math.exp(1.5)) * weights
    assert difference.grad is not None
    torch.testing.assert_close(difference.grad, gradient)
    low = gumbel_loss(torch.tensor([-6.0, -8.0]), 2.0, 7.0, torch.ones(2))  # m is at least -1
    torch.testing.assert_close(low, (torch.tensor([-3.0, -4.0]).exp() + torch.tensor([2.0, 3.0])) * math.e)
    algorithm: Any = make_algorithm("xql", temperature=2.0)
    torch.testing.assert_close(algorithm.value_loss(difference, weights), loss)


def test_rebrac_normalises_after_the_activation() -> None:
    """CORL: Dense, ReLU, LayerNorm, so the inputs of the next layer have mean 0 and deviation 1."""
    critic = make_algorithm("rebrac", hidden_sizes=[16, 16]).modules["critic"]
    kinds = [type(layer).__name__ for layer in critic.hidden]
    assert kinds == ["EnsembleLinear", "ReLU", "EnsembleNorm"] * 2
    x = torch.randn(BATCH, OBS_DIM + ACTION_DIM)
    for layer in critic.hidden:
        x = layer(x)
    torch.testing.assert_close(x.mean(-1), torch.zeros(2, BATCH), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(x.std(-1, unbiased=False), torch.ones(2, BATCH), atol=1e-2, rtol=0.0)
    before = make_algorithm("td3", critic={"kind": "twin", "layer_norm": True}).modules["critic"]
    assert [type(layer).__name__ for layer in before.hidden] == ["EnsembleLinear", "EnsembleNorm", "ReLU"]


def test_decision_transformer_sees_observations_normalised_by_its_dataset(tmp_path: Path) -> None:
    config = config_for("decision_transformer", tmp_path, total_timesteps=3)
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    obs = trainer.algorithm.dataset.obs.astype(np.float64)
    agent = Agent.load(result.checkpoint_path)
    extra = agent.state.extra
    np.testing.assert_allclose(extra["obs_mean"].reshape(-1), obs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(extra["obs_std"].reshape(-1), obs.std(0) + 1e-6, rtol=1e-5)


def test_decision_transformer_feeds_the_network_normalised_observations() -> None:
    algorithm: Any = make_algorithm("decision_transformer", dropout=0.0)
    plain: Any = make_algorithm("decision_transformer", dropout=0.0, normalize_observations=False)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    mean, std = torch.arange(OBS_DIM) - 1.0, torch.arange(OBS_DIM) + 0.5
    state = state._replace(extra={**state.extra, "obs_mean": mean, "obs_std": std})
    moved = {**batch, "obs": batch["obs"] * std + mean}
    expected = plain.outputs(state.params["actor"], state.extra, batch, None)
    torch.testing.assert_close(algorithm.outputs(state.params["actor"], state.extra, moved, None), expected)


# --- images ----------------------------------------------------------------------------------------------------------

IMAGES = EnvSpec("Test-v0", ArraySpec((1, 12, 12), "uint8"), ACTION_SPECS["box"])


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_each_loss_trains_its_own_encoder_of_images(name: str) -> None:
    algorithm: Any = registry.entry(name).load()(IMAGES, hidden_sizes=[8, 8], batch_size=4)
    image = torch.randint(0, 256, (4, 1, 12, 12), dtype=torch.uint8)
    batch = {"obs": image, "next_obs": image.flip(-1), "actions": torch.rand(4, ACTION_DIM), "rewards": torch.rand(4),
             "discounts": torch.full((4,), 0.9), "weights": torch.ones(4)}  # fmt: skip
    start = algorithm.init_state(0)

    def moved(before: Any, after: Any, network: str) -> dict[str, bool]:
        old, new = (algorithm.nets[network].named(state.params[network]) for state in (before, after))
        parts = {key.split(".")[0] for key in old}
        return {part: any(not torch.equal(old[k], new[k]) for k in old if k.split(".")[0] == part) for part in parts}

    critics, *_ = algorithm.critic_step(start, batch, KEY)
    assert moved(start, critics, "critic") == {"encoder": True, "hidden": True, "head": True}
    assert not any(moved(start, critics, "actor").values())
    actor, _ = algorithm.policy_step(critics, batch, KEY)
    assert moved(critics, actor, "actor") == {"torso": True, "head": True}
    assert not any(moved(critics, actor, "critic").values())
    convolutions = [key for key in algorithm.nets["actor"].named(start.params["actor"]) if "convs" in key]
    old, new = (algorithm.nets["actor"].named(state.params["actor"]) for state in (critics, actor))
    assert convolutions
    assert all(not torch.equal(old[key], new[key]) for key in convolutions)


def test_actor_of_images_has_its_hidden_layers() -> None:
    """Stable-Baselines3's CnnPolicy of SAC: 512 features, then `net_arch` in actor and critics alike."""
    algorithm: Any = registry.entry("sac").load()(IMAGES, hidden_sizes=[7, 6])
    shapes = [tuple(p.shape) for n, p in algorithm.modules["actor"].named_parameters() if n.endswith("weight")]
    assert shapes[-4:] == [(512, shapes[-4][1]), (7, 512), (6, 7), (2 * ACTION_DIM, 6)]
