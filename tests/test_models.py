"""Layers and networks compared with plain formulas, and modules as functions of one flat vector."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import OBS_DIM, spec_for
from torch import nn

from rl_training.models import ActorCritic, EnsembleCritic, MLPQNetwork, MLPSACModel, QNetwork
from rl_training.models.layers import EnsembleLinear, EnsembleScalar, NoisyLinear, Scalar
from rl_training.models.torsos import ImpalaCNN, NatureCNN, mlp, torso
from rl_training.ops import rng
from rl_training.ops.nets import Net
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

NEAR = {"rtol": 1e-5, "atol": 1e-5}


def seeded(make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_noisy_linear_mean_and_variance() -> None:
    """Over keys: mean W x + b, variance sum (sigma_ij x_j)^2 E[f_i^2] E[f_j^2] + bias_sigma^2 E[f_i^2]."""
    layer, x = seeded(lambda: NoisyLinear(6, 4, sigma=0.5)), torch.linspace(-1.0, 1.0, 6).unsqueeze(0)
    keys = torch.stack([rng.fold(rng.key_from_seed(0), i) for i in range(40_000)])
    with torch.no_grad():
        out = torch.vmap(lambda key: layer(x, key))(keys)[:, 0]  # [K, 4]
        mean = nn.functional.linear(x, layer.weight, layer.bias)[0]
        assert torch.equal(layer(x, None)[0], mean)
        square = (2.0 / torch.pi) ** 0.5  # E f(z)^2 = E|z|
        spread = square**2 * (layer.weight_sigma**2 @ (x[0] ** 2)) + square * layer.bias_sigma**2
    error = out.std(0) / len(keys) ** 0.5
    assert ((out.mean(0) - mean).abs() < 5 * error).all()
    torch.testing.assert_close(out.var(0), spread, rtol=0.06, atol=0.0)


def test_noisy_linear_equals_the_noisy_weight_matrix() -> None:
    layer, x, key = seeded(lambda: NoisyLinear(5, 3)), torch.randn(7, 5), rng.key_from_seed(4)
    z = rng.normal(key, (8,))
    f = z.sign() * z.abs().sqrt()
    weight = layer.weight + layer.weight_sigma * torch.outer(f[5:], f[:5])  # Fortunato et al. 2018, Eq. 10
    expected = nn.functional.linear(x, weight, layer.bias + layer.bias_sigma * f[5:])
    torch.testing.assert_close(layer(x, key), expected, **NEAR)


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("noisy", [False, True])
def test_dueling_mean_over_actions_is_the_value(outputs: int, noisy: bool) -> None:
    """Q = V + A - mean(A): the mean over actions of Q is V, whatever the advantages (Wang et al. 2016, Eq. 9)."""
    net = seeded(lambda: MLPQNetwork(OBS_DIM, 3, (8,), outputs=outputs, dueling=True, noisy=noisy))
    x, key = torch.randn(6, OBS_DIM), rng.key_from_seed(0) if noisy else None
    q = net(x, key).view(6, 3, outputs)
    features = net.torso(x)
    args = (rng.fold(key, 1),) if noisy else ()
    torch.testing.assert_close(q.mean(1), net.value(features, *args).view(6, outputs), **NEAR)
    assert len(net.value) == 3, "a hidden layer, its activation and the output"
    with torch.no_grad():
        net.advantage[-1].bias += 17.0
    torch.testing.assert_close(net(x, key).view(6, 3, outputs), q, rtol=1e-4, atol=1e-4)


def test_ensemble_layers_equal_separate_linears() -> None:
    layer, head = seeded(lambda: EnsembleLinear(3, 5, 4)), seeded(lambda: EnsembleScalar(3, 4))
    x = torch.randn(7, 5)
    out, values = layer(x), head(layer(x))
    assert out.shape == (3, 7, 4)
    assert values.shape == (3, 7)
    for e in range(3):
        linear, last = nn.Linear(5, 4), nn.Linear(4, 1)
        with torch.no_grad():
            linear.weight.copy_(layer.weight[e].T)
            linear.bias.copy_(layer.bias[e, 0])
            last.weight.copy_(head.weight[e])
            last.bias.copy_(head.bias[e])
        torch.testing.assert_close(out[e], linear(x), **NEAR)
        torch.testing.assert_close(values[e], last(linear(x))[:, 0], **NEAR)
    assert not torch.allclose(values[0], values[1]), "members must start apart"


def test_scalar_equals_a_linear_layer_of_width_one() -> None:
    layer, x = seeded(lambda: Scalar(6, gain=1.0)), torch.randn(4, 6)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight.unsqueeze(0), layer.bias.view(1))[:, 0])
    assert layer.weight.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert layer.bias.item() == 0.0


def test_actor_critic_is_initialised_orthogonally() -> None:
    net = seeded(lambda: ActorCritic(spec_for("ppo", "box"), 4, (32, 32), log_std_init=-0.5))
    hidden = net.actor_torso[2].weight
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(32), rtol=1e-4, atol=1e-4)  # gain sqrt 2
    rows = net.actor_head.weight
    torch.testing.assert_close(rows @ rows.T, 1e-4 * torch.eye(2), rtol=1e-3, atol=1e-7)  # gain 0.01: near uniform
    out, _ = net(torch.randn(5, OBS_DIM))
    assert torch.equal(out[:, 2:], torch.full((5, 2), -0.5))


def modules() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    x = torch.randn(4, OBS_DIM, generator=torch.Generator().manual_seed(2))
    box = spec_for("sac", "box")
    actions = torch.rand(4, box.action.dim) * 2 - 1
    return {
        "q": (seeded(lambda: MLPQNetwork(OBS_DIM, 3, (7, 5), dueling=True)), (x,)),
        "actor_critic": (seeded(lambda: ActorCritic(box, 4, (7,))), (x,)),
        "critic": (seeded(lambda: EnsembleCritic(box, 2, (7,), layer_norm=True)), (x, actions)),
    }


@pytest.mark.parametrize("name", modules())
def test_net_equals_the_module_with_those_parameters(name: str) -> None:
    module, args = modules()[name]
    net = Net(module)
    flat = net.flatten(module)
    assert flat.shape == (net.size,)
    named = net.named(flat)
    assert named.keys() == dict(module.named_parameters()).keys()
    assert all(torch.equal(named[n], p) for n, p in module.named_parameters())
    assert all(view.data_ptr() % 64 == flat.data_ptr() % 64 for view in named.values()), "aligned"
    for ours, theirs in zip(_tensors(net(flat, *args)), _tensors(module(*args))):
        assert torch.equal(ours, theirs)
    # With another vector, the original module is unchanged and the copy follows the vector.
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5).add_(0.1)
    for ours, theirs in zip(_tensors(net(net.flatten(other), *args)), _tensors(other(*args))):
        assert torch.equal(ours, theirs)
    net.write_to(module, net.flatten(other))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters()))


@pytest.mark.parametrize("name", modules())
def test_net_under_vmap_and_grad(name: str) -> None:
    module, args = modules()[name]
    net = Net(module)
    flats = torch.stack([net.flatten(module), 0.5 * net.flatten(module) + 0.01])
    batched = _tensors(torch.vmap(lambda flat: net(flat, *args))(flats))
    for i in range(2):
        for a, b in zip(batched, _tensors(net(flats[i], *args))):
            torch.testing.assert_close(a[i], b, **NEAR)

    def total(flat: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.square().sum() for x in _tensors(net(flat, *args))]).sum()

    functional = torch.func.grad(total)(flats[0])
    leaf = flats[0].clone().requires_grad_()
    (plain,) = torch.autograd.grad(total(leaf), leaf)
    module.zero_grad()
    torch.stack([x.square().sum() for x in _tensors(module(*args))]).sum().backward()
    torch.testing.assert_close(functional, plain, **NEAR)
    for n, gradient in net.named(plain).items():
        torch.testing.assert_close(gradient, dict(module.named_parameters())[n].grad, rtol=1e-4, atol=1e-4)
    padding = torch.ones_like(plain)
    for view in net.named(padding).values():
        view.zero_()
    assert not plain[padding.bool()].any(), "the padding has no gradient"


def _tensors(out: object) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def test_nature_cnn_adapts_to_image_sizes() -> None:
    for shape in ((4, 84, 84), (1, 16, 16)):
        net = NatureCNN(shape, 32)
        image = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
        assert net(image).shape == (3, 32)
        torch.testing.assert_close(net(image), net(image.float()))  # the network scales images itself


@pytest.mark.parametrize("size", [(7, 7), (3, 5), (1, 1)])
def test_nature_cnn_of_small_grids_does_not_depend_on_their_scale(size: tuple[int, int]) -> None:
    net = seeded(lambda: NatureCNN((3, *size), 32))
    codes = torch.randint(1, 11, (4, 3, *size), dtype=torch.uint8)
    assert net(codes).shape == (4, 32)
    torch.testing.assert_close(net(codes), net(20 * codes), rtol=5e-2, atol=1e-2)
    if size != (1, 1):
        assert not torch.allclose(net(codes)[0], net(codes)[1], atol=1e-3)


def _impala_by_hand(parameters: list[torch.Tensor], image: torch.Tensor) -> torch.Tensor:
    """Espeholt et al. 2018, figure 3 (right), written with functions on the weights in order."""
    f, rest = nn.functional, iter(parameters)
    x = image.double() / 255.0
    for _ in range(3):
        x = f.max_pool2d(f.conv2d(x, next(rest), next(rest), padding=1), 3, 2, 1)
        for _ in range(2):
            inner = f.conv2d(x.clamp(min=0.0), next(rest), next(rest), padding=1)
            x = x + f.conv2d(inner.clamp(min=0.0), next(rest), next(rest), padding=1)
    return (x.clamp(min=0.0).flatten(1) @ next(rest).T + next(rest)).clamp(min=0.0)


@pytest.mark.parametrize(("shape", "width"), [((4, 84, 84), 1), ((3, 13, 8), 1), ((1, 16, 10), 2)])
def test_impala_cnn_matches_the_paper(shape: tuple[int, int, int], width: int) -> None:
    net = seeded(lambda: ImpalaCNN(shape, 20, width=width))
    image = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    parameters = list(net.parameters())
    torch.testing.assert_close(net(image).double(), _impala_by_hand([p.double() for p in parameters], image), **NEAR)
    height, length, channels, count = shape[1], shape[2], shape[0], 0
    for out in (16 * width, 32 * width, 32 * width):  # 3x3 weights and biases: one convolution, then four
        count += (9 * channels + 1) * out + 4 * (9 * out + 1) * out
        channels, height, length = out, -(-height // 2), -(-length // 2)
    assert sum(p.numel() for p in parameters) == count + (channels * height * length + 1) * 20


def test_impala_cnn_of_an_atari_agent() -> None:
    """84 -> 42 -> 21 -> 11 pixels; 256 features as in the paper, for any `hidden_sizes`."""
    spec = EnvSpec("image", ArraySpec((4, 84, 84), "uint8"), ActionSpec("discrete", (6,)))
    body, features = torso(spec, (64, 64), cnn="impala")
    assert features == 256
    assert body.linear.in_features == 11 * 11 * 32
    assert sum(p.numel() for p in body.convs.parameters()) == 97_744
    assert ImpalaCNN((3, 6, 6), 20)(torch.zeros(2, 3, 6, 6, dtype=torch.uint8)).shape == (2, 20)
    wide, _ = torso(spec, (), cnn="nature", width=2)
    assert wide.convs[0].out_channels == 64


def test_parameter_counts_by_hand() -> None:
    count = sum(p.numel() for p in MLPQNetwork(4, 2, (64, 64)).parameters())
    assert count == 4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2
    model = MLPSACModel(17, 6, (256, 256))
    assert sum(p.numel() for p in model.actor.parameters()) == 17 * 256 + 256 + 256 * 256 + 256 + 256 * 12 + 12
    assert sum(p.numel() for p in model.critic.parameters()) == 2 * (23 * 256 + 256 + 256 * 256 + 256 + 256 + 1)
    assert isinstance(mlp(3, (), "tanh"), nn.Sequential)
    assert QNetwork(mlp(3, ()), 3, 2)(torch.randn(5, 3)).shape == (5, 2)
