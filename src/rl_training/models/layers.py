"""The layers that networks are built from. All work under vmap, and none has state besides its parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.ops import rng

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "mish": nn.Mish,
}


def orthogonal(layer: nn.Module, gain: float) -> nn.Module:
    """Initialise with orthogonal weights and zero bias, which PPO needs to reproduce its published scores."""
    for name, parameter in layer.named_parameters():
        if parameter.ndim >= 2:
            nn.init.orthogonal_(parameter, gain)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return layer


class Scalar(nn.Module):
    """A linear layer with one output. On a GPU it is a weighted sum, because a matrix product of width 1 is slow."""

    def __init__(self, in_features: int, gain: float | None = None) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        weight = torch.empty(1, in_features)
        if gain is None:
            nn.init.uniform_(weight, -bound, bound)
        else:
            nn.init.orthogonal_(weight, gain)
        self.weight = nn.Parameter(weight[0].clone())
        self.bias = nn.Parameter(torch.zeros(()) if gain is not None else torch.empty(()).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":  # here, the backward pass of the sum is slower
            return nn.functional.linear(x, self.weight.unsqueeze(0)).squeeze(-1) + self.bias
        return (x * self.weight).sum(-1) + self.bias  # [..., D] -> [...]


class EnsembleLinear(nn.Module):
    """E linear layers as one batched product. Input [B, D] (shared) or [E, B, D]; output [E, B, out].

    `members` (int64 [M], or a slice) selects layers; only their products are computed.
    """

    def __init__(self, members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(members, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        weight, bias = (self.weight, self.bias) if members is None else (self.weight[members], self.bias[members])
        if x.dim() == 2 and x.device.type == "cpu":  # matmul would copy the weights into one wide matrix
            x = x.expand(weight.shape[0], -1, -1)
        return torch.matmul(x, weight) + bias


class EnsembleScalar(nn.Module):
    """The last layer of an ensemble of scalar critics: [E, B, D] -> [E, B]."""

    def __init__(self, members: int, in_features: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(members, 1, in_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1).uniform_(-bound, bound))

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        if members is None:
            return (x * self.weight).sum(-1) + self.bias
        return (x * self.weight[members]).sum(-1) + self.bias[members]


class EnsembleNorm(nn.Module):
    """LayerNorm with a separate scale and shift for each member: [E, B, D] -> [E, B, D]."""

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, features))
        self.bias = nn.Parameter(torch.zeros(members, 1, features))

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        x = nn.functional.layer_norm(x, x.shape[-1:])
        if members is None:
            return x * self.weight + self.bias
        return x * self.weight[members] + self.bias[members]


class Keyed(nn.Module):
    """Base class of the modules that may contain noisy layers: `forward` takes a key too."""


def call(layer: nn.Module, x: Any, key: Tensor | None, number: int) -> Tensor:
    """The layer's output. A module with noise gets its own fold of the key; without a key there is no noise."""
    out: Tensor = layer(x, rng.fold(key, number)) if key is not None and isinstance(layer, Keyed) else layer(x)
    return out


class Chain(nn.Sequential, Keyed):
    """Layers one after the other, each noisy one with its own noise."""

    def forward(self, x: Any, key: Tensor | None = None) -> Tensor:
        for number, layer in enumerate(self):
            x = call(layer, x, key, number)
        return x  # type: ignore[no-any-return]


class NoisyLinear(Keyed):
    """Factorised Gaussian noise on the weights (Fortunato et al. 2018, Eq. 9-11); no noise without a key."""

    def __init__(self, in_features: int, out_features: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), sigma * bound))

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if key is None:
            return nn.functional.linear(x, self.weight, self.bias)
        noise = rng.normal(key, (self.in_features + self.out_features,))
        noise = noise.sign() * noise.abs().sqrt()
        noise_in, noise_out = noise[: self.in_features], noise[self.in_features :]
        if x.ndim > 2:  # many rows: a noisy weight matrix costs less than a second product
            weight = self.weight + self.weight_sigma * (noise_out.unsqueeze(-1) * noise_in)
            return nn.functional.linear(x, weight, self.bias + self.bias_sigma * noise_out)
        # (W + S * (out in^T)) x = W x + out * (S (in * x)), without forming the noisy weight matrix.
        mean = nn.functional.linear(x, self.weight, self.bias)
        return mean + noise_out * (nn.functional.linear(x * noise_in, self.weight_sigma) + self.bias_sigma)


def dense(in_features: int, out_features: int, sigma: float = 0.0) -> nn.Module:
    """A linear layer, with noise of the initial scale `sigma` unless that is 0."""
    return NoisyLinear(in_features, out_features, sigma) if sigma else nn.Linear(in_features, out_features)
