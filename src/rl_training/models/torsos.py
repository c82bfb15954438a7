"""Torsos: networks that map an encoded observation to a feature vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.layers import ACTIVATIONS, orthogonal
from rl_training.spec import ArraySpec, EnvSpec

Obs = Tensor | dict[str, Tensor]
Cnn = Literal["nature", "impala"]


def mlp(
    in_features: int, hidden_sizes: Sequence[int], activation: str = "relu", gain: float | None = None,
    layer_norm: bool = False,
) -> nn.Sequential:  # fmt: skip
    """Hidden layers without an output layer: linear, LayerNorm if wanted, activation."""
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        linear: nn.Module = nn.Linear(in_features, size)
        layers.append(linear if gain is None else orthogonal(linear, gain))
        if layer_norm:
            layers.append(nn.LayerNorm(size))
        layers.append(ACTIVATIONS[activation]())
        in_features = size
    return nn.Sequential(*layers)


class NatureCNN(nn.Module):
    """The network of Mnih et al. 2015: uint8 [B, C, H, W] -> [B, features]. Images below 36x36 get smaller kernels.

    `width` multiplies the channels."""

    def __init__(
        self, shape: tuple[int, ...], features: int = 512, gain: float | None = None, *, width: int = 1
    ) -> None:
        super().__init__()
        channels, height, length = shape
        if min(height, length) >= 36:
            plan = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        elif min(height, length) >= 8:
            plan = [(16, 3, 2), (32, 3, 1)]
        else:
            raise UserError(f"images must be at least 8x8 for the convolutional network; this one is {height}x{length}")
        layers: list[nn.Module] = []
        for out, kernel, stride in plan:
            conv: nn.Module = nn.Conv2d(channels, out * width, kernel, stride)
            layers += [conv if gain is None else orthogonal(conv, gain), nn.ReLU()]
            channels, height, length = out * width, (height - kernel) // stride + 1, (length - kernel) // stride + 1
        self.convs = nn.Sequential(*layers)
        linear: nn.Module = nn.Linear(channels * height * length, features)
        self.linear = linear if gain is None else orthogonal(linear, gain)

    def forward(self, image: Tensor) -> Tensor:
        x = self.convs(image.to(torch.float32) * (1.0 / 255.0))
        return nn.functional.relu(self.linear(x.flatten(1)))


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), both convolutions 3x3."""

    def __init__(self, channels: int, gain: float | None) -> None:
        super().__init__()
        self.first, self.second = _conv3(channels, channels, gain), _conv3(channels, channels, gain)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(nn.functional.relu(self.first(nn.functional.relu(x))))
        return out


class ImpalaCNN(nn.Module):
    """The deep network of Espeholt et al. 2018 (figure 3, right) without its LSTM. uint8 [B, C, H, W] -> [B, features].

    Three sections of 16, 32 and 32 channels (times `width`): a convolution, 3x3 max-pooling with stride 2, and two
    residual blocks. Each section halves the image, rounding up.
    """

    def __init__(
        self, shape: tuple[int, ...], features: int = 256, gain: float | None = None, *, width: int = 1
    ) -> None:
        super().__init__()
        channels, height, length = shape
        if min(height, length) < 8:
            raise UserError(f"images must be at least 8x8 for the convolutional network; this one is {height}x{length}")
        layers: list[nn.Module] = []
        for out in (16 * width, 32 * width, 32 * width):
            layers += [_conv3(channels, out, gain), nn.MaxPool2d(3, 2, 1), Residual(out, gain), Residual(out, gain)]
            channels, height, length = out, (height + 1) // 2, (length + 1) // 2
        self.convs = nn.Sequential(*layers)
        linear: nn.Module = nn.Linear(channels * height * length, features)
        self.linear = linear if gain is None else orthogonal(linear, gain)

    def forward(self, image: Tensor) -> Tensor:
        x = nn.functional.relu(self.convs(image.to(torch.float32) * (1.0 / 255.0)))
        return nn.functional.relu(self.linear(x.flatten(1)))


def _conv3(channels: int, out: int, gain: float | None) -> nn.Module:
    conv = nn.Conv2d(channels, out, 3, padding=1)
    return conv if gain is None else orthogonal(conv, gain)


def image_network(
    shape: tuple[int, ...], features: int, gain: float | None, cnn: Cnn = "nature", width: int = 1
) -> nn.Module:
    if cnn == "impala":
        return ImpalaCNN(shape, features, gain, width=width)
    return NatureCNN(shape, features, gain, width=width)


class MixedTorso(nn.Module):
    """For images and vectors together: the features of each image, concatenated with the vectors."""

    def __init__(
        self, parts: dict[str, ArraySpec], features: int, gain: float | None, cnn: Cnn = "nature", width: int = 1
    ) -> None:
        super().__init__()
        self.images = nn.ModuleDict(
            {k: image_network(s.shape, features, gain, cnn, width) for k, s in parts.items() if s.is_image}
        )
        self.vectors = [k for k, s in parts.items() if not s.is_image]
        self.out_features = features * len(self.images) + sum(parts[k].shape[0] for k in self.vectors)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.cat([cnn(obs[k]) for k, cnn in self.images.items()] + [obs[k] for k in self.vectors], -1)


def observation_encoder(
    spec: EnvSpec, features: int | None = None, gain: float | None = None, cnn: Cnn = "nature", width: int = 1
) -> tuple[nn.Module, int]:
    """(network, output size) that maps an observation to a vector: the identity for vectors, a CNN for images, or both.

    `features` of the image network defaults to the paper's: 512 (nature) or 256 (impala).
    """
    observation = spec.observation
    features = features or (256 if cnn == "impala" else 512)
    if isinstance(observation, dict):
        mixed = MixedTorso(observation, features // 2, gain, cnn, width)
        return mixed, mixed.out_features
    if observation.is_image:
        return image_network(observation.shape, features, gain, cnn, width), features
    return nn.Identity(), math.prod(observation.shape)


def torso(
    spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu", gain: float | None = None,
    cnn: Cnn = "nature", width: int = 1,
) -> tuple[nn.Module, int]:  # fmt: skip
    """(network, output size): encoder and hidden layers. Images have no hidden layers after the CNN."""
    encoder, size = observation_encoder(spec, gain=gain, cnn=cnn, width=width)
    if isinstance(encoder, NatureCNN | ImpalaCNN):
        return encoder, size
    hidden = mlp(size, hidden_sizes, activation, gain)
    out = hidden_sizes[-1] if hidden_sizes else size
    return (hidden, out) if isinstance(encoder, nn.Identity) else (nn.Sequential(encoder, hidden), out)
