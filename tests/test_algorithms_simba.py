"""The residual networks of SimBa and BRO: sizes by hand, values by plain matrix products, initial weights, and the
settings that `simba` stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ACTION_DIM, ACTIONS, OBS_DIM, batch_for, make_algorithm
from torch import Tensor

from rl_training import registry
from rl_training.errors import UserError
from rl_training.models.control import EnsembleCritic
from rl_training.models.residual import ResidualBlock, residual_layers
from rl_training.ops import rng

KEY = rng.key_from_seed(2)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def test_networks_have_the_parameters_of_the_papers() -> None:
    algorithm = make_algorithm("sac", network="simba", hidden_sizes=[128], critic_hidden_sizes=[512, 512])
    embedding, norm = linear(OBS_DIM, 128), 2 * 128
    block = norm + linear(128, 4 * 128) + linear(4 * 128, 128)
    assert count(algorithm.modules["actor"]) == embedding + block + norm + linear(128, 2 * ACTION_DIM)
    embedding, norm = linear(OBS_DIM + ACTION_DIM, 512), 2 * 512
    block = norm + linear(512, 2048) + linear(2048, 512)
    assert count(algorithm.modules["critic"]) == 2 * (embedding + 2 * block + norm + linear(512, 1))


def test_bro_networks_have_the_parameters_of_the_paper() -> None:
    algorithm = make_algorithm("sac", network="bro", hidden_sizes=[256], critic_hidden_sizes=[512, 512],
                               critic={"kind": "quantile", "num_quantiles": 100})  # fmt: skip
    first, norm = linear(OBS_DIM, 256), 2 * 256
    block = 2 * (linear(256, 256) + norm)
    assert count(algorithm.modules["actor"]) == first + norm + block + linear(256, 2 * ACTION_DIM)
    first, norm = linear(OBS_DIM + ACTION_DIM, 512), 2 * 512
    block = 2 * (linear(512, 512) + norm)
    assert count(algorithm.modules["critic"]) == 2 * (first + norm + 2 * block + linear(512, 100))


def randomised(module: torch.nn.Module) -> Any:
    """The module with every parameter drawn anew, so that norms and biases count."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return module


def member(critic: EnsembleCritic, e: int) -> list[Tensor]:
    """The parameters of one critic, in order, with its weights as [in, out]."""
    return [p.detach()[e].squeeze(0) if p.ndim == 3 else p.detach()[e] for p in critic.parameters()]


def norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * scale + shift


def test_simba_critic_is_embedding_blocks_and_final_norm() -> None:
    algorithm = make_algorithm("sac", network="simba", hidden_sizes=[8, 8])
    critic, batch = randomised(algorithm.modules["critic"]), batch_for(algorithm)
    q = critic(batch["obs"], batch["actions"])
    for e in range(2):
        values = member(critic, e)
        x = torch.cat([batch["obs"], batch["actions"]], -1) @ values[0] + values[1]
        for i in (2, 8):
            scale, shift, w1, b1, w2, b2 = values[i : i + 6]
            x = x + torch.relu(norm(x, scale, shift) @ w1 + b1) @ w2 + b2
        x = norm(x, values[14], values[15])
        torch.testing.assert_close(q[e], (x * values[16]).sum(-1) + values[17], rtol=1e-5, atol=1e-5)


def test_bro_actor_is_a_normed_layer_and_blocks_with_a_norm_at_the_end() -> None:
    algorithm = make_algorithm("sac", network="bro", hidden_sizes=[8, 8])
    actor, batch = randomised(algorithm.modules["actor"]), batch_for(algorithm)
    values = [p.detach() for p in actor.parameters()]
    x = torch.relu(norm(F.linear(batch["obs"], *values[:2]), *values[2:4]))
    for i in (4, 12):
        w1, b1, g1, s1, w2, b2, g2, s2 = values[i : i + 8]
        x = x + norm(F.linear(torch.relu(norm(F.linear(x, w1, b1), g1, s1)), w2, b2), g2, s2)
    torch.testing.assert_close(actor(batch["obs"]), F.linear(x, *values[20:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network", ["simba", "bro"])
def test_drawn_members_are_those_of_the_whole_ensemble(network: str) -> None:
    algorithm = make_algorithm("redq", network=network, hidden_sizes=[8])
    critic, batch = randomised(algorithm.modules["critic"]), batch_for(algorithm)
    drawn = torch.tensor([7, 2])
    every = critic(batch["obs"], batch["actions"])
    some = critic(batch["obs"], batch["actions"], None, drawn)
    torch.testing.assert_close(some, every[drawn], rtol=1e-5, atol=1e-5)


def test_weights_start_as_in_the_simba_code() -> None:
    torch.manual_seed(0)
    layers = residual_layers("simba", 40, (64, 64), "relu", members=3)
    for member_weight in layers[0].weight:
        torch.testing.assert_close(member_weight @ member_weight.T, torch.eye(40), rtol=0, atol=1e-5)
    block = layers[1]
    assert isinstance(block, ResidualBlock)
    for layer, inputs in ((block.inner[1], 64), (block.inner[3], 256)):
        weight, deviation = layer.weight.detach(), math.sqrt(2.0 / inputs)
        assert float(weight.std()) == pytest.approx(deviation, rel=0.02)
        assert float(weight.abs().max()) <= 2.0 * deviation / 0.8796  # cut at two deviations of the uncut normal
        assert not layer.bias.any()
    q = make_algorithm("sac", network="simba", hidden_sizes=[8]).modules["critic"].head.weight
    torch.testing.assert_close(q.square().sum(-1), torch.ones(2, 1))


def test_simba_is_sac_with_the_published_settings() -> None:
    published = {
        "network": "simba", "hidden_sizes": (128,), "critic_hidden_sizes": (512, 512), "normalize_observations": True,
        "optimizer": "adamw", "weight_decay": 0.01, "gradient_steps": 2, "batch_size": 256, "tau": 0.005,
        "ent_coef_init": 0.01, "n_step": 1,
    }  # fmt: skip
    simba = registry.entry("simba").load()
    algorithm = simba(make_algorithm("sac").spec)
    assert {name: getattr(algorithm.hp, name) for name in published} == published
    assert algorithm.hp.learning_rate(torch.zeros(())) == pytest.approx(1e-4)
    assert algorithm.target_entropy == -0.5 * ACTION_DIM
    assert make_algorithm("sac").target_entropy == -1.0 * ACTION_DIM
    assert make_algorithm("rlpd").target_entropy == -0.5 * ACTION_DIM


@pytest.mark.parametrize("name", ["sac", "td3", "fast_td3", "ddpg", "tqc", "redq"])
def test_every_family_takes_the_networks(name: str) -> None:
    algorithm = make_algorithm(name, network="simba", hidden_sizes=[8], critic_hidden_sizes=[16])
    assert count(algorithm.modules["actor"].torso) == linear(OBS_DIM, 8) + 16 + linear(8, 32) + linear(32, 8) + 16
    state = algorithm.init_state(0)
    after, _ = algorithm.train_step(state, batch_for(algorithm), KEY)
    assert all(not torch.equal(after.params[n], flat) for n, flat in state.params.items())


@pytest.mark.parametrize("name", ["dqn", "dueling_dqn", "c51_dqn", "qr_dqn", "iqn", "fqf", "drqn", "bootstrapped_dqn"])
def test_value_networks_have_the_blocks_before_their_heads(name: str) -> None:
    algorithm = make_algorithm(name, network="simba", hidden_sizes=[8, 8])
    network = algorithm.modules["q"]
    block = 16 + linear(8, 32) + linear(32, 8)
    assert count(network.torso) == linear(OBS_DIM, 8) + 2 * block + 16
    if name == "dueling_dqn":
        assert count(network) == count(network.torso) + linear(8, ACTIONS) + linear(8, 1)
    state = algorithm.init_state(0)
    after, _ = algorithm.train_step(state, batch_for(algorithm), KEY)
    assert not torch.equal(after.params["q"], state.params["q"])


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("sac", {"hidden_sizes": [64, 32]}, "one width for each block"),
        ("sac", {"hidden_sizes": []}, "one width for each block"),
        ("sac", {"layer_norm": True}, "layer_norm cannot be combined with network: simba"),
        ("sac", {"critic": {"kind": "twin", "norm_last": True}}, "norm_last cannot be combined with network: simba"),
        ("redq", {"dropout": 0.1}, "dropout cannot be combined with network: simba"),
        ("dqn", {"noisy": True}, "noisy cannot be combined with network: simba"),
        ("drqn", {"layer_norm": True}, "layer_norm cannot be combined with network: simba"),
        ("crossq", {}, "cannot be combined with renormalised critics"),
        ("fast_td3", {"hidden_sizes": [64, 32]}, "one width for each block"),
        ("bbf", {}, "network: simba cannot be combined with bbf"),
    ],
)
def test_what_cannot_be_combined_is_refused(name: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_algorithm(name, network="simba", **fields)
