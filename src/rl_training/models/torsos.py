"""Torsos: from an encoded observation to a feature vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.envs.spec import ArraySpec, EnvSpec
from rl_training.errors import UserError
from rl_training.models.layers import ACTIVATIONS, orthogonal

Obs = Tensor | dict[str, Tensor]


def mlp(
    in_features: int, hidden_sizes: Sequence[int], activation: str = "relu", gain: float | None = None,
    layer_norm: bool = False,
) -> nn.Sequential:  # fmt: skip
    """Hidden layers only, each followed by its activation (and LayerNorm before it)."""
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
    """Mnih et al. 2015 for 84x84 images; smaller images get smaller kernels. uint8 [B, C, H, W] -> [B, features]."""

    def __init__(self, shape: tuple[int, ...], features: int = 512, gain: float | None = None) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) >= 36:
            plan = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        elif min(height, width) >= 8:
            plan = [(16, 3, 2), (32, 3, 1)]
        else:
            raise UserError(f"images must be at least 8x8 for the convolutional network; this one is {height}x{width}")
        layers: list[nn.Module] = []
        for out, kernel, stride in plan:
            conv: nn.Module = nn.Conv2d(channels, out, kernel, stride)
            layers += [conv if gain is None else orthogonal(conv, gain), nn.ReLU()]
            channels, height, width = out, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.convs = nn.Sequential(*layers)
        linear: nn.Module = nn.Linear(channels * height * width, features)
        self.linear = linear if gain is None else orthogonal(linear, gain)

    def forward(self, image: Tensor) -> Tensor:
        x = self.convs(image.to(torch.float32) * (1.0 / 255.0))
        return nn.functional.relu(self.linear(x.flatten(1)))


class MixedTorso(nn.Module):
    """Images and a vector together: the features of each image beside the vector."""

    def __init__(self, parts: dict[str, ArraySpec], features: int, gain: float | None) -> None:
        super().__init__()
        self.images = nn.ModuleDict({k: NatureCNN(s.shape, features, gain) for k, s in parts.items() if s.is_image})
        self.vectors = [k for k, s in parts.items() if not s.is_image]
        self.out_features = features * len(self.images) + sum(parts[k].shape[0] for k in self.vectors)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.cat([cnn(obs[k]) for k, cnn in self.images.items()] + [obs[k] for k in self.vectors], -1)


def observation_encoder(spec: EnvSpec, features: int = 512, gain: float | None = None) -> tuple[nn.Module, int]:
    """What turns an observation into a vector: nothing for vectors, a CNN for images, both for a mix."""
    observation = spec.observation
    if isinstance(observation, dict):
        mixed = MixedTorso(observation, features // 2, gain)
        return mixed, mixed.out_features
    if observation.is_image:
        return NatureCNN(observation.shape, features, gain), features
    return nn.Identity(), math.prod(observation.shape)


def torso(
    spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu", gain: float | None = None
) -> tuple[nn.Module, int]:
    """Encoder and hidden layers; images go from the CNN's 512 features straight to the head."""
    encoder, size = observation_encoder(spec, gain=gain)
    if isinstance(encoder, NatureCNN):
        return encoder, size
    hidden = mlp(size, hidden_sizes, activation, gain)
    out = hidden_sizes[-1] if hidden_sizes else size
    return (hidden, out) if isinstance(encoder, nn.Identity) else (nn.Sequential(encoder, hidden), out)
