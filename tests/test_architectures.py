"""The published networks: parameter counts by hand from the layer lists of the papers, and which layers are noisy or
shared. A = 6 actions and 4 x 84 x 84 frames on Atari; 17 observations and 6 actions on HalfCheetah."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rl_training import registry
from rl_training.errors import UserError
from rl_training.models import MLPC51QNetwork, MLPIQNNetwork, MLPQNetwork, MLPQRQNetwork
from rl_training.models.layers import NoisyLinear
from rl_training.models.policy import ActorCritic
from rl_training.models.torsos import torso
from rl_training.ops import rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

A = 6
ATARI = EnvSpec("Atari", ArraySpec((4, 84, 84), "uint8"), ActionSpec("discrete", (A,)))
CHEETAH = EnvSpec("HalfCheetah", ArraySpec((17,)), ActionSpec("box", (), (A,), (-1.0,) * A, (1.0,) * A))
KEY = rng.key_from_seed(3)

# Mnih et al. 2015: 32 filters of 8x8 with stride 4 (84 -> 20), 64 of 4x4 with stride 2 (-> 9), 64 of 3x3 (-> 7).
CONVS = 8 * 8 * 4 * 32 + 32 + 4 * 4 * 32 * 64 + 64 + 3 * 3 * 64 * 64 + 64
FLAT = 7 * 7 * 64  # 3136
# Espeholt et al. 2018: sections of 16, 32, 32 channels, each one convolution and two blocks of two, all 3x3.
IMPALA = (
    (9 * 4 * 16 + 16 + 4 * (9 * 16 * 16 + 16))
    + (9 * 16 * 32 + 32 + 4 * (9 * 32 * 32 + 32))
    + (9 * 32 * 32 + 32 + 4 * (9 * 32 * 32 + 32))
)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def network(name: str, spec: EnvSpec = ATARI, part: str = "q", **settings: Any) -> Any:
    return registry.entry(name).load()(spec, **settings).modules[part]


def layers(module: nn.Module) -> list[tuple[str, int, int]]:
    """(kind, inputs, outputs) of every fully connected layer, in order."""
    kinds = {nn.Linear: "plain", NoisyLinear: "noisy"}
    return [(kinds[type(m)], m.in_features, m.out_features) for m in module.modules() if type(m) in kinds]  # type: ignore[misc]


VALUE_HEADS = {
    # Mnih et al. 2015: 512 units, then the output.
    "dqn": ({}, (FLAT * 512 + 512) + (512 * A + A)),
    # Wang et al. 2016: two streams of 512 units.
    "dueling_dqn": ({}, 2 * (FLAT * 512 + 512) + (512 * A + A) + (512 * 1 + 1)),
    # Fortunato et al. 2018: means and deviations of every weight and bias of the fully connected layers.
    "noisy_dqn": ({}, 2 * ((FLAT * 512 + 512) + (512 * A + A))),
    # Bellemare et al. 2017: 51 atoms for every action.
    "c51_dqn": ({"num_atoms": 51}, (FLAT * 512 + 512) + (512 * A * 51 + A * 51)),
    # Dabney et al. 2018a: 200 quantiles for every action.
    "qr_dqn": ({"num_quantiles": 200}, (FLAT * 512 + 512) + (512 * A * 200 + A * 200)),
    # Hessel et al. 2018: dueling streams of 512 units over 51 atoms, all noisy.
    "rainbow_dqn": (
        {"num_atoms": 51},
        2 * (2 * (FLAT * 512 + 512) + (512 * A * 51 + A * 51) + (512 * 51 + 51)),
    ),
    # Dabney et al. 2018b: 64 cosines to 3136 features, their product with the convolutions, 512 units, the output.
    "iqn": ({}, (64 * FLAT + FLAT) + (FLAT * 512 + 512) + (512 * A + A)),
    # Yang et al. 2019: the same; the fractions are proposed from the features of the convolutions.
    "fqf": ({"num_quantiles": 32}, (64 * FLAT + FLAT) + (FLAT * 512 + 512) + (512 * A + A)),
    # Kapturowski et al. 2019: 512 units, an LSTM of 512 (one bias for each of the four gates), dueling streams of 512.
    "r2d2": (
        {"cell_size": 512},
        (FLAT * 512 + 512)
        + (512 * 4 * 512 + 512 * 4 * 512 + 4 * 512)
        + 2 * (512 * 512 + 512) + (512 * A + A) + (512 * 1 + 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUE_HEADS)
def test_atari_value_networks(name: str) -> None:
    settings, head = VALUE_HEADS[name]
    net = network(name, **settings)
    assert CONVS == 77_984
    assert count(net.torso.convs) == CONVS
    assert count(net) == CONVS + head


def test_published_totals() -> None:
    """Numbers as they are often quoted: 1,687,206 for DQN with 6 actions."""
    assert count(network("dqn")) == 77_984 + 1_606_144 + 3_078 == 1_687_206
    assert count(network("dueling_dqn")) == 77_984 + 2 * 1_606_144 + 3_078 + 513
    assert count(network("fqf", part="fraction", num_quantiles=32)) == FLAT * 32 + 32


def test_fully_connected_layers() -> None:
    hidden, noisy = ("plain", FLAT, 512), ("noisy", FLAT, 512)
    assert layers(network("dqn")) == [hidden, ("plain", 512, A)]
    assert layers(network("dueling_dqn")) == [hidden, ("plain", 512, A), hidden, ("plain", 512, 1)]
    assert layers(network("noisy_dqn")) == [noisy, ("noisy", 512, A)]
    assert layers(network("rainbow_dqn")) == [noisy, ("noisy", 512, A * 51), noisy, ("noisy", 512, 51)]
    assert layers(network("iqn")) == [hidden, ("plain", 512, A), ("plain", 64, FLAT)]
    assert layers(network("fqf", part="fraction")) == [("plain", FLAT, 32)]
    r2d2 = network("r2d2", cell_size=512)
    assert layers(r2d2.torso) == [hidden]
    assert layers(r2d2.advantage) + layers(r2d2.value) == [
        ("plain", 512, 512), ("plain", 512, A), ("plain", 512, 512), ("plain", 512, 1)
    ]  # fmt: skip
    assert layers(network("r2d2", noisy=True).torso) == [noisy]
    assert layers(network("drqn", cell_size=512).advantage) == [("plain", 512, A)], "Hausknecht and Stone 2015"
    wide = network("dqn", cnn="impala")
    assert count(wide) == IMPALA + (11 * 11 * 32 * 256 + 256) + (256 * A + A)


def test_layers_on_vectors() -> None:
    """The first layer is shared, the last hidden layer belongs to each stream."""
    spec = EnvSpec("CartPole", ArraySpec((4,)), ActionSpec("discrete", (2,)))
    sizes = {"hidden_sizes": [64, 32]}
    net = network("dueling_dqn", spec, **sizes)
    assert layers(net.torso) == [("plain", 4, 64)]
    assert layers(net.advantage) == [("plain", 64, 32), ("plain", 32, 2)]
    assert layers(net.value) == [("plain", 64, 32), ("plain", 32, 1)]
    assert {kind for kind, _, _ in layers(network("rainbow_dqn", spec, **sizes))} == {"noisy"}
    assert {kind for kind, _, _ in layers(network("r2d2", spec, noisy=True))} == {"noisy"}
    assert network("iqn", spec, **sizes).embedding.out_features == 64
    assert network("iqn", spec, hidden_sizes=[32]).embedding.out_features == 4
    mixed = {"image": ArraySpec((4, 84, 84), "uint8"), "vector": ArraySpec((3,))}
    both = network("noisy_dqn", EnvSpec("Both", mixed, ActionSpec("discrete", (2,))), **sizes)
    assert layers(both) == [("noisy", FLAT, 256), ("noisy", 256 + 3, 64), ("noisy", 64, 32), ("noisy", 32, 2)]


@pytest.mark.parametrize("sizes", [(), (8,), (8, 7)])
@pytest.mark.parametrize("options", [{}, {"dueling": True}, {"noisy": True}, {"dueling": True, "noisy": True}], ids=str)
def test_any_number_of_hidden_layers(sizes: tuple[int, ...], options: dict[str, bool]) -> None:
    obs = torch.randn(5, 4)
    assert MLPQNetwork(4, 3, sizes, **options)(obs, KEY).shape == (5, 3)
    assert MLPIQNNetwork(4, 3, sizes, num_quantiles=6, **options)(obs, None, KEY).shape == (5, 3, 6)


def test_dueling_is_not_a_linear_head() -> None:
    """V = |x| and A = +/- relu(x - 1), with hidden layers set by hand: no linear head gives it."""
    net = MLPQNetwork(1, 2, (2,), dueling=True)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.value[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        net.value[2].weight.copy_(torch.tensor([[1.0, 1.0]]))
        net.advantage[0].weight[0] = 1.0
        net.advantage[0].bias[0] = -1.0
        net.advantage[2].weight[:, 0] = torch.tensor([1.0, -1.0])
    q = net(torch.tensor([[-2.0], [0.5], [3.0]]))
    assert q.tolist() == [[2.0, 2.0], [0.5, 0.5], [5.0, 1.0]]
    assert not set(net.advantage.parameters()) & set(net.value.parameters())
    # The gradient of the mean over actions, which is V, reaches only the value stream and the torso.
    net.zero_grad()
    net(torch.tensor([[3.0]])).mean().backward()
    assert not any(p.grad.any() for p in net.advantage.parameters())
    assert all(p.grad.any() for p in net.value.parameters())


def test_dueling_values_do_not_fold_into_one_layer() -> None:
    """Regress the values of a random network on the features of its torso: a linear head leaves an error."""
    torch.manual_seed(0)
    net = MLPQNetwork(6, 3, (16, 16), dueling=True)
    obs = 2.0 * torch.randn(400, 6)
    with torch.no_grad():
        features = torch.cat([net.torso(obs), torch.ones(400, 1)], -1).double()
        q = net(obs).double()
    error = q - features @ torch.linalg.lstsq(features, q).solution
    assert float(error.std() / q.std()) > 0.02


def test_noise_reaches_the_hidden_layers() -> None:
    torch.manual_seed(0)
    net, obs = MLPQNetwork(4, 2, (8, 8), noisy=True), torch.randn(5, 4)
    assert torch.equal(net.encode(obs), net.encode(obs, None))
    a, b = (net.encode(obs, rng.fold(KEY, i)) for i in (0, 1))
    assert not torch.allclose(a, net.encode(obs))
    assert not torch.allclose(a, b)
    hidden = net.advantage[0]
    x = torch.randn(5, 8)
    assert not torch.allclose(hidden(x, KEY), hidden(x))
    plain = MLPQNetwork(4, 2, (8, 8))
    assert torch.equal(plain(obs, KEY), plain(obs))


def test_noise_differs_between_layers() -> None:
    """Two layers of equal weights have different noise under the same key, and the streams differ as well."""
    net = MLPQNetwork(4, 1, (4, 4), noisy=True, dueling=True)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, NoisyLinear):
                module.weight.zero_()
                module.bias.zero_()
                module.weight_sigma.zero_()
                module.bias_sigma.fill_(1.0)
    outputs: list[torch.Tensor] = []
    for module in net.modules():
        if isinstance(module, NoisyLinear):
            module.register_forward_hook(lambda _, __, out: outputs.append(out[0]))
    net(torch.zeros(1, 4), KEY)
    drawn = [float(out[0].detach()) for out in outputs]
    assert len(drawn) == 5
    assert len(set(drawn)) == 5


def test_many_rows_have_the_noise_of_few() -> None:
    layer, x = NoisyLinear(5, 3), torch.randn(4, 7, 5)
    torch.testing.assert_close(layer(x, KEY), torch.stack([layer(row, KEY) for row in x]))


@pytest.mark.parametrize(
    ("kind", "outputs"), [(MLPQNetwork, 1), (MLPC51QNetwork, 51), (MLPQRQNetwork, 50)], ids=["dqn", "c51", "qr"]
)
def test_plain_networks_keep_the_order_of_their_parameters(kind: Any, outputs: int) -> None:
    """Checkpoints hold parameters in this order."""
    shapes = [tuple(p.shape) for p in kind(4, 2, (64, 32)).parameters()]
    assert shapes == [(64, 4), (64,), (32, 64), (32,), (2 * outputs, 32), (2 * outputs,)]


def test_discrete_sac_has_separate_critics_of_images() -> None:
    """CleanRL's sac_atari: actor and critics each have their own convolutions, 512 units and an output."""
    one = CONVS + (FLAT * 512 + 512) + (512 * A + A)
    actor, critic = (network("discrete_sac", part=part) for part in ("actor", "critic"))
    assert count(actor) == one
    assert count(critic) == 2 * one
    image = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    critic.requires_grad_()
    critic(image)[0].sum().backward()
    first, second = critic.encoders
    assert all(p.grad is not None and p.grad.any() for p in first.convs.parameters())
    assert not any(p.grad.any() for p in second.parameters() if p.grad is not None)
    values = critic(image)
    assert values.shape == (2, 2, A)
    assert not torch.allclose(values[0], values[1])


def test_actor_critic_torsos() -> None:
    """Nature torso of 512 units (PPO) and residual torso of 256 units (IMPALA, figure 3, right, without its LSTM)."""
    separate = ActorCritic(ATARI, A)
    assert count(separate.actor_torso) == count(separate.critic_torso) == CONVS + (FLAT * 512 + 512)
    assert count(separate) == 2 * (CONVS + FLAT * 512 + 512) + (512 * A + A) + (512 * 1 + 1)
    deep, features = torso(ATARI, (), cnn="impala")
    assert features == 256
    assert count(deep) == IMPALA + (11 * 11 * 32 * 256 + 256)  # 84 -> 42 -> 21 -> 11


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala"])
def test_atari_actor_critics(name: str) -> None:
    """Policy and value are two outputs of one network: 1,687,719 parameters for 6 actions (Mnih et al. 2016; the agent
    of CleanRL's ppo_atari.py), or 1,091,031 with the residual network (Espeholt et al. 2018, without its LSTM)."""
    nature = network(name, part="policy")
    assert count(nature) == CONVS + (FLAT * 512 + 512) + (512 * A + A) + (512 * 1 + 1) == 1_687_719
    assert layers(nature) == [("plain", FLAT, 512), ("plain", 512, A)], "the value is a layer of its own kind"
    assert nature.critic_head.weight.shape == (512,)
    deep = network(name, part="policy", cnn="impala")
    assert IMPALA == 97_744
    assert count(deep) == IMPALA + (11 * 11 * 32 * 256 + 256) + (256 * A + A) + (256 * 1 + 1) == 1_091_031
    apart = network(name, part="policy", shared_trunk=False)
    assert count(apart) == 2 * (CONVS + FLAT * 512 + 512) + (512 * A + A) + (512 * 1 + 1)


def test_ppg_has_two_networks() -> None:
    """Cobbe et al. 2021, section 2: disjoint policy and value networks, and an auxiliary value head on the policy."""
    actor, critic = (network("ppg", part=part, cnn="impala") for part in ("actor", "critic"))
    torso_size = IMPALA + (11 * 11 * 32 * 256 + 256)
    assert count(actor) == torso_size + (256 * A + A) + (256 * 1 + 1)
    assert count(critic) == torso_size + (256 * 1 + 1)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_mujoco_actor_critics(name: str) -> None:
    """Schulman et al. 2017, section 6.1: two networks of 64 x 64 units, and a deviation for each action."""
    policy = network(name, CHEETAH, "policy")
    hidden = (17 * 64 + 64) + (64 * 64 + 64)
    assert count(policy) == 2 * hidden + (64 * A + A) + A + (64 * 1 + 1)


def test_discrete_sac_on_vectors() -> None:
    spec = EnvSpec("CartPole", ArraySpec((4,)), ActionSpec("discrete", (2,)))
    critic = network("discrete_sac", spec, "critic", hidden_sizes=[64, 32])
    assert count(critic) == 2 * ((4 * 64 + 64) + (64 * 32 + 32) + (32 * 2 + 2))


@pytest.mark.parametrize(("name", "critics", "actor_outputs"), [("sac", 2, 2 * A), ("td3", 2, A), ("redq", 10, 2 * A)])
def test_mujoco_networks(name: str, critics: int, actor_outputs: int) -> None:
    """Haarnoja et al. 2018, Fujimoto et al. 2018 with SAC's sizes, Chen et al. 2021: two layers of 256 units."""
    sizes = {"hidden_sizes": [256, 256]}
    actor, critic = (network(name, CHEETAH, part, **sizes) for part in ("actor", "critic"))
    assert count(actor) == (17 * 256 + 256) + (256 * 256 + 256) + (256 * actor_outputs + actor_outputs)
    assert count(critic) == critics * (((17 + A) * 256 + 256) + (256 * 256 + 256) + (256 + 1))


def test_network_of_bbf() -> None:
    """Schwarzer et al. 2023: the residual convolutions at four times the width (64, 128, 128 channels, 84 -> 11), one
    hidden layer of 2048, dueling heads over 51 atoms; a transition model of two convolutions, which sees the action as
    A planes, and a predictor of 2048."""
    net = network("bbf")
    sections = ((4, 64), (64, 128), (128, 128))
    convs = sum(9 * a * b + b + 4 * (9 * b * b + b) for a, b in sections)
    assert count(net.torso[0]) == convs
    assert count(net.torso) == convs + (128 * 11 * 11) * 2048 + 2048
    assert count(net.transition) == (9 * (128 + A) * 128 + 128) + (9 * 128 * 128 + 128)
    assert count(net.predictor) == 2048 * 2048 + 2048
    assert count(net.advantage) + count(net.value) == 2048 * 51 * (A + 1) + 51 * (A + 1)


@pytest.mark.parametrize(("name", "actor_outputs"), [("drq_v2", A), ("td3", A), ("sac", 2 * A)])
def test_networks_of_drq_v2(name: str, actor_outputs: int) -> None:
    """Yarats et al. 2021 on three frames in colour: four convolutions of 32 channels (84 -> 41 -> 39 -> 37 -> 35), and
    in actor and critics a layer of 50 with LayerNorm, then two of 1024. The critics share the layer of 50."""
    pixels = EnvSpec("walker", ArraySpec((9, 84, 84), "uint8"), CHEETAH.action)
    made = registry.entry(name).load()(pixels, shared_encoder="drq", hidden_sizes=[1024, 1024]).modules
    assert set(made) == {"encoder", "actor", "critic"}
    assert count(made["encoder"]) == (9 * 9 * 32 + 32) + 3 * (9 * 32 * 32 + 32) == 30_368
    layer = (32 * 35 * 35) * 50 + 50 + 2 * 50
    hidden = 1024 * 1024 + 1024
    assert count(made["actor"]) == layer + (50 * 1024 + 1024) + hidden + (1024 * actor_outputs + actor_outputs)
    assert count(made["critic"]) == layer + 2 * (((50 + A) * 1024 + 1024) + hidden + (1024 + 1))


def dreamer_by_hand(d: int, pixels: int = 3) -> dict[str, int]:
    """DreamerV3 with d units (dreamerv3/configs.yaml and rssm.py; Hafner et al. 2023, appendix B): 8 d deterministic
    and 32 x d / 16 = 2 d stochastic units, 8 blocks, convolutions 5 x 5 of 2, 3, 4, 4 x d / 16 channels down to 4 x 4.
    A bias and a normalisation with one scale a unit follow every hidden layer."""

    def dense(inputs: int, outputs: int) -> int:
        return inputs * outputs + 2 * outputs

    deter, stoch, tokens, features = 8 * d, 2 * d, 4 * d, 10 * d
    a, b, c, e = (k * d // 16 for k in (2, 3, 4, 4))
    encoder = sum(25 * i * o + 2 * o for i, o in ((pixels, a), (a, b), (b, c), (c, e)))
    inputs = dense(deter, d) + dense(stoch, d) + dense(A, d)
    cell = 8 * (d + 3 * d) * d + 2 * deter + 8 * d * 3 * d + 3 * deter  # 8 blocks: joined inputs, then three gates
    prior = dense(deter, d) + dense(d, d) + (d * stoch + stoch)
    posterior = dense(deter + tokens, d) + (d * stoch + stoch)
    start = 8 * d * (tokens // 8) + tokens + dense(stoch, 2 * d) + (2 * d * tokens + tokens) + e  # of the decoder
    decoder = start + sum(25 * i * o + 2 * o for i, o in ((e, c), (c, b), (b, a))) + 25 * a * pixels + pixels
    reward, end = (dense(features, d) + (d * out + out) for out in (255, 1))
    hidden = dense(features, d) + 2 * dense(d, d)
    return {
        "world": encoder + inputs + cell + prior + posterior + decoder + reward + end,
        "actor": hidden + (d * A + A),
        "critic": hidden + (d * 255 + 255),
    }


@pytest.mark.parametrize(("size", "units"), [("12m", 256), ("25m", 384), ("50m", 512), ("100m", 768), ("200m", 1024)])
def test_networks_of_dreamer(size: str, units: int) -> None:
    pixels = EnvSpec("Atari", ArraySpec((3, 64, 64), "uint8"), ActionSpec("discrete", (A,)))
    algorithm = registry.entry("dreamer").load()(pixels, size="tiny")
    algorithm.hp = algorithm.hp.model_copy(update={"size": size})
    with torch.device("meta"):  # shapes alone: 200 million parameters take no memory
        made = algorithm.networks(pixels)
    assert {name: count(module) for name, module in made.items()} == dreamer_by_hand(units)


@pytest.mark.parametrize(
    ("name", "observation", "action", "fields", "mark"),
    [
        ("iqn", ArraySpec((4,)), ActionSpec("discrete", (2,)), {"hidden_sizes": [64, 64]}, "hidden_after_product"),
        ("fqf", ArraySpec((4,)), ActionSpec("discrete", (2,)), {"hidden_sizes": [64, 64]}, "hidden_after_product"),
        ("rebrac", ArraySpec((4,)), CHEETAH.action, {"hidden_sizes": [8]}, "norm_after_activation"),
        ("dreamer", ArraySpec((3, 16, 16), "uint8"), ActionSpec("discrete", (2,)), {"size": "tiny"}, "shifted_images"),
    ],
)
def test_checkpoints_of_older_networks_of_the_same_size_are_refused(
    name: str, observation: ArraySpec, action: ActionSpec, fields: dict[str, Any], mark: str
) -> None:
    """The number of parameters alone does not show the difference, so a mark in the state does."""
    algorithm = registry.entry(name).load()(EnvSpec("Test-v0", observation, action), **fields)
    tensors = algorithm.state_dict()
    marks = [key for key in tensors if key.endswith(mark)]
    assert len(marks) == 1
    del tensors[marks[0]]
    with pytest.raises(UserError, match=mark):
        algorithm.load_state_dict(tensors)


def test_older_checkpoints_of_dreamer_load_where_only_the_initial_weights_changed() -> None:
    spec = EnvSpec("Test-v0", ArraySpec((4,)), ActionSpec("discrete", (2,)))
    assert registry.entry("dreamer").load()(spec, size="tiny").init_extra().keys() == {"returns"}
