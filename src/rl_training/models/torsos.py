"""Torsos: networks that map an encoded observation to a feature vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.layers import ACTIVATIONS, Chain, Keyed, call, dense, orthogonal
from rl_training.models.residual import Network, check_network, residual_layers
from rl_training.spec import ArraySpec, EnvSpec

Obs = Tensor | dict[str, Tensor]
Cnn = Literal["nature", "impala"]
Convolutions = Cnn | Literal["drq"]


def mlp(
    in_features: int, hidden_sizes: Sequence[int], activation: str = "relu", gain: float | None = None,
    layer_norm: bool = False, sigma: float = 0.0,
) -> nn.Sequential:  # fmt: skip
    """Hidden layers without an output layer: linear (noisy if `sigma` > 0), LayerNorm if wanted, activation."""
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        linear = dense(in_features, size, sigma)
        layers.append(linear if gain is None else orthogonal(linear, gain))
        if layer_norm:
            layers.append(nn.LayerNorm(size))
        layers.append(ACTIVATIONS[activation]())
        in_features = size
    return Chain(*layers) if sigma else nn.Sequential(*layers)


def hidden_layers(network: Network, size: int, hidden_sizes: Sequence[int], activation: str) -> nn.Sequential:
    """Plain hidden layers or residual blocks, without an output layer."""
    if network == "mlp":
        return mlp(size, hidden_sizes, activation)
    return nn.Sequential(*residual_layers(network, size, hidden_sizes, activation))


class ConvolutionalNetwork(Keyed):
    """Convolutions and, unless `features` is 0, one fully connected layer: uint8 [B, C, H, W] -> [B, out_features]."""

    convs: nn.Sequential

    def connect(self, size: int, features: int, gain: float | None, sigma: float) -> None:
        """Add the fully connected layer after the `size` outputs of the convolutions."""
        self.out_features = features or size
        linear = dense(size, features, sigma) if features else None
        self.linear = orthogonal(linear, gain) if linear is not None and gain is not None else linear

    def forward(self, image: Tensor, key: Tensor | None = None) -> Tensor:
        x = nn.functional.relu(self.convs(self.scaled(image))).flatten(1)
        return x if self.linear is None else nn.functional.relu(call(self.linear, x, key, 0))

    def scaled(self, image: Tensor) -> Tensor:
        """Bytes as numbers in [0, 1]."""
        return image.to(torch.float32) * (1.0 / 255.0)


class NatureCNN(ConvolutionalNetwork):
    """The network of Mnih et al. 2015. Images below 36x36 get smaller kernels. `width` multiplies the channels.

    An image below 8x8 is rather a grid of codes than a picture, so its values may have any scale. Its convolutions keep
    the size, and the first one is normalised.
    """

    def __init__(
        self, shape: tuple[int, ...], features: int = 512, gain: float | None = None, *, width: int = 1,
        sigma: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, height, length = shape
        if min(height, length) >= 36:
            plan = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        elif min(height, length) >= 8:
            plan = [(16, 3, 2), (32, 3, 1)]
        else:
            plan = [(16, 3, 1), (32, 3, 1)]
        small = min(height, length) < 8
        layers: list[nn.Module] = []
        for number, (out, kernel, stride) in enumerate(plan):
            pad, scaled = (kernel // 2 if small else 0), small and number == 0
            conv: nn.Module = nn.Conv2d(channels, out * width, kernel, stride, pad, bias=not scaled)
            layers.append(conv if gain is None else orthogonal(conv, gain))
            layers += [*([nn.GroupNorm(1, out * width, eps=1e-8)] if scaled else []), nn.ReLU()]
            channels = out * width
            height, length = ((side + 2 * pad - kernel) // stride + 1 for side in (height, length))
        self.convs = nn.Sequential(*layers[:-1])  # the last activation is in `forward`
        self.connect(channels * height * length, features, gain, sigma)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), both convolutions 3x3."""

    def __init__(self, channels: int, gain: float | None) -> None:
        super().__init__()
        self.first, self.second = _conv3(channels, channels, gain), _conv3(channels, channels, gain)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(nn.functional.relu(self.first(nn.functional.relu(x))))
        return out


class ImpalaCNN(ConvolutionalNetwork):
    """The deep network of Espeholt et al. 2018 (figure 3, right) without its LSTM.

    Three sections of 16, 32 and 32 channels (times `width`): a convolution, 3x3 max-pooling with stride 2, and two
    residual blocks. Each section halves the image, rounding up.
    """

    def __init__(
        self, shape: tuple[int, ...], features: int = 256, gain: float | None = None, *, width: int = 1,
        sigma: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, height, length = shape
        layers: list[nn.Module] = []
        for out in (16 * width, 32 * width, 32 * width):
            layers += [_conv3(channels, out, gain), nn.MaxPool2d(3, 2, 1), Residual(out, gain), Residual(out, gain)]
            channels, height, length = out, (height + 1) // 2, (length + 1) // 2
        self.convs = nn.Sequential(*layers)
        self.connect(channels * height * length, features, gain, sigma)


class DrQCNN(ConvolutionalNetwork):
    """The encoder of Yarats et al. 2021: four 3x3 convolutions of 32 channels (times `width`), the first with stride 2,
    on pixels in [-1/2, 1/2]."""

    def __init__(
        self, shape: tuple[int, ...], features: int = 50, gain: float | None = None, *, width: int = 1,
        sigma: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, height, length = shape
        if min(height, length) < 15:
            raise UserError(f"the drq encoder needs images of at least 15 x 15 pixels, not {height} x {length}")
        layers: list[nn.Module] = []
        for stride in (2, 1, 1, 1):
            layers += [_conv3(channels, 32 * width, gain, stride, 0), nn.ReLU()]
            channels = 32 * width
            height, length = ((side - 3) // stride + 1 for side in (height, length))
        self.convs = nn.Sequential(*layers[:-1])  # the last activation is in `forward`
        self.connect(channels * height * length, features, gain, sigma)

    def scaled(self, image: Tensor) -> Tensor:
        return super().scaled(image) - 0.5


def _conv3(channels: int, out: int, gain: float | None, stride: int = 1, padding: int = 1) -> nn.Module:
    conv = nn.Conv2d(channels, out, 3, stride, padding)
    return conv if gain is None else orthogonal(conv, gain)


_KINDS: dict[str, type[ConvolutionalNetwork]] = {"nature": NatureCNN, "impala": ImpalaCNN, "drq": DrQCNN}


def image_network(
    shape: tuple[int, ...], features: int, gain: float | None, cnn: Convolutions = "nature", width: int = 1,
    sigma: float = 0.0,
) -> ConvolutionalNetwork:  # fmt: skip
    network: ConvolutionalNetwork = _KINDS[cnn](shape, features, gain, width=width, sigma=sigma)
    return network


class MixedTorso(Keyed):
    """For images and vectors together: the features of each image, concatenated with the vectors."""

    def __init__(
        self, parts: dict[str, ArraySpec], features: int, gain: float | None, cnn: Convolutions = "nature",
        width: int = 1, sigma: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        images = {k: image_network(s.shape, features, gain, cnn, width, sigma) for k, s in parts.items() if s.is_image}
        self.images = nn.ModuleDict(images)
        self.vectors = [k for k, s in parts.items() if not s.is_image]
        widths = [parts[k].shape[0] for k in self.vectors]
        self.out_features = sum(net.out_features for net in images.values()) + sum(widths)

    def forward(self, obs: dict[str, Tensor], key: Tensor | None = None) -> Tensor:
        images = [call(cnn, obs[k], key, number) for number, (k, cnn) in enumerate(self.images.items())]
        return torch.cat(images + [obs[k] for k in self.vectors], -1)


class OwnFeatures(nn.Module):
    """A copy of the user's own network for observations, `spec.features`, with the size of its output."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        given = spec.features
        network = copy.deepcopy(given) if isinstance(given, nn.Module) else given(spec) if callable(given) else given
        if not isinstance(network, nn.Module):
            raise UserError(f"features must be a module or a function that makes one, not {type(network).__name__}")
        self.network = network
        seen = spec.observation
        try:
            with torch.no_grad():
                out = network(blank_observations(spec))
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"features cannot read the observations of {spec.env_id}, {seen}: {error}") from error
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2:
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise UserError(f"features must return one vector for each observation, [B, D]; for B = 2 it was {shape}")
        self.out_features = out.shape[1]

    def forward(self, obs: Any) -> Tensor:
        out: Tensor = self.network(obs)
        return out


def blank_observations(spec: EnvSpec) -> Any:
    """Two observations of zeros, to try a network on."""

    def zeros(part: ArraySpec) -> Tensor:
        return torch.zeros(2, *part.shape, dtype=getattr(torch, part.dtype))

    seen = spec.observation
    return {name: zeros(part) for name, part in seen.items()} if isinstance(seen, dict) else zeros(seen)


FEATURES: dict[str, int] = {"nature": 512, "impala": 256, "drq": 50}  # width of the papers' fully connected layer


def observation_encoder(
    spec: EnvSpec, features: int | None = None, gain: float | None = None, cnn: Convolutions = "nature", width: int = 1,
    sigma: float = 0.0,
) -> tuple[nn.Module, int]:  # fmt: skip
    """(network, output size) that maps an observation to a vector: the identity for vectors, a CNN for images, or both;
    or the user's own network.

    `features` of the image network defaults to the paper's: 512 (nature), 256 (impala) or 50 (drq); 0 leaves out its
    fully connected layer. With several parts, each image has half as many.
    """
    if spec.features is not None:
        own = OwnFeatures(spec)
        return own, own.out_features
    observation = spec.observation
    features = FEATURES[cnn] if features is None else features
    if isinstance(observation, dict):
        mixed = MixedTorso(observation, features // 2, gain, cnn, width, sigma)
        return mixed, mixed.out_features
    if observation.is_image:
        network = image_network(observation.shape, features, gain, cnn, width, sigma)
        return network, network.out_features
    return nn.Identity(), math.prod(observation.shape)


def torso(
    spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu", gain: float | None = None,
    cnn: Cnn = "nature", width: int = 1, sigma: float = 0.0, hidden_after_cnn: bool = False, layer_norm: bool = False,
    network: Network = "mlp",
) -> tuple[nn.Module, int]:  # fmt: skip
    """(network, output size): encoder and hidden layers, noisy if `sigma` > 0. Images have no hidden layers after the
    CNN unless `hidden_after_cnn`. `network` chooses between plain hidden layers and residual blocks."""
    encoder, size = observation_encoder(spec, gain=gain, cnn=cnn, width=width, sigma=sigma)
    if isinstance(encoder, ConvolutionalNetwork) and not hidden_after_cnn:
        return encoder, size
    if network == "mlp":
        hidden = mlp(size, hidden_sizes, activation, gain, layer_norm, sigma)
    else:
        check_network(network, hidden_sizes, layer_norm=layer_norm, noisy=sigma > 0.0)
        hidden = hidden_layers(network, size, hidden_sizes, activation)
    out = hidden_sizes[-1] if hidden_sizes else size
    return (hidden, out) if isinstance(encoder, nn.Identity) else (Chain(encoder, hidden), out)


class Body(NamedTuple):
    """A torso without its last hidden layer, which is left to the head."""

    network: nn.Module
    features: int  # its output size
    hidden: int  # width of the layer left out; 0: there are no hidden layers
    activation: str  # of that layer


def body(
    spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu", cnn: Cnn = "nature", width: int = 1,
    sigma: float = 0.0, layer_norm: bool = False, network: Network = "mlp",
) -> Body:  # fmt: skip
    """The part of `torso` before its last fully connected layer: the convolutions, or all hidden layers but one. A
    residual network leaves no layer to the head."""
    if network != "mlp":
        whole, size = torso(spec, hidden_sizes, activation, cnn=cnn, width=width, sigma=sigma, layer_norm=layer_norm,
                            hidden_after_cnn=True, network=network)  # fmt: skip
        return Body(whole, size, 0, activation)
    if spec.features is None and isinstance(spec.observation, ArraySpec) and spec.observation.is_image:
        convs, size = observation_encoder(spec, 0, cnn=cnn, width=width)
        return Body(convs, size, FEATURES[cnn], "relu")
    layers, size = torso(spec, hidden_sizes[:-1], activation, cnn=cnn, width=width, sigma=sigma, layer_norm=layer_norm)
    return Body(layers, size, hidden_sizes[-1] if hidden_sizes else 0, activation)
