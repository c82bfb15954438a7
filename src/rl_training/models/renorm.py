"""Networks with batch renormalisation (Ioffe 2017), for CrossQ. Running statistics are arguments and results, not
buffers: they are part of the training state, like everything else that learning changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.layers import ACTIVATIONS, EnsembleLinear, EnsembleScalar
from rl_training.models.torsos import observation_encoder
from rl_training.spec import EnvSpec

Statistics = dict[str, Any]


class BatchRenorm(nn.Module):
    """[E, B, D] -> [E, B, D], separately for each of the E members.

    With a mask (bool [B]: rows that count) it normalises by the batch and updates the running statistics; without one
    it normalises by the running statistics. For the first `warmup` passes it is plain batch normalisation; after them
    the result is corrected towards the running statistics (Ioffe 2017, Algorithm 1: r and d, bounded and detached).
    """

    def __init__(
        self, members: int, features: int, momentum: float = 0.01, warmup: int = 100_000, eps: float = 1e-3
    ) -> None:
        super().__init__()
        self.members, self.features = members, features
        self.momentum, self.warmup, self.eps = momentum, warmup, eps
        self.weight = nn.Parameter(torch.ones(members, 1, features))
        self.bias = nn.Parameter(torch.zeros(members, 1, features))

    def initial(self) -> Statistics:
        shape = (self.members, 1, self.features)
        return {"mean": torch.zeros(shape), "var": torch.ones(shape), "count": torch.zeros(())}

    def forward(self, x: Tensor, statistics: Statistics, mask: Tensor | None) -> tuple[Tensor, Statistics]:
        mean, deviation = statistics["mean"], torch.sqrt(statistics["var"] + self.eps)
        if mask is None:
            return (x - mean) / deviation * self.weight + self.bias, statistics
        rows = mask.to(x.dtype).unsqueeze(-1)  # [B, 1]
        total = rows.sum().clamp(min=1.0)
        batch_mean = (rows * x).sum(-2, keepdim=True) / total
        batch_var = (rows * (x - batch_mean).square()).sum(-2, keepdim=True) / total
        batch_deviation = torch.sqrt(batch_var + self.eps)
        warm = statistics["count"] >= self.warmup
        scale = torch.where(warm, (batch_deviation / deviation).clamp(1.0 / 3.0, 3.0), 1.0).detach()  # r
        shift = torch.where(warm, ((batch_mean - mean) / deviation).clamp(-5.0, 5.0), 0.0).detach()  # d
        out = (x - batch_mean) / batch_deviation * scale + shift
        renewed = {
            "mean": torch.lerp(mean, batch_mean.detach(), self.momentum),
            "var": torch.lerp(statistics["var"], batch_var.detach(), self.momentum),
            "count": statistics["count"] + 1.0,
        }
        return out * self.weight + self.bias, renewed


class RenormTorso(nn.Module):
    """Hidden layers of E members; the input of each layer and the output are normalised: [B, D] -> [E, B, H]."""

    def __init__(self, members: int, size: int, hidden_sizes: Sequence[int], activation: str, warmup: int) -> None:
        super().__init__()
        widths = [size, *hidden_sizes]
        self.members, self.features = members, widths[-1]
        self.norms = nn.ModuleList(BatchRenorm(members, width, warmup=warmup) for width in widths)
        self.linears = nn.ModuleList(EnsembleLinear(members, a, b) for a, b in pairwise(widths))
        self.activation = ACTIVATIONS[activation]()

    def initial(self) -> Statistics:
        return {str(i): norm.initial() for i, norm in enumerate(self.norms)}  # type: ignore[operator]

    def forward(self, x: Tensor, statistics: Statistics, mask: Tensor | None) -> tuple[Tensor, Statistics]:
        renewed: Statistics = {}
        x, renewed["0"] = self.norms[0](x.unsqueeze(0), statistics["0"], mask)  # [E, B, D]
        for i, linear in enumerate(self.linears, 1):
            x, renewed[str(i)] = self.norms[i](self.activation(linear(x)), statistics[str(i)], mask)
        return x, renewed


class RenormActor(nn.Module):
    """Actor: (outputs, statistics), and the features [B, F] if `with_features`."""

    def __init__(self, spec: EnvSpec, outputs: int, hidden_sizes: Sequence[int], activation: str, warmup: int) -> None:
        super().__init__()
        self.encoder, size = observation_encoder(spec)
        self.torso = RenormTorso(1, size, hidden_sizes, activation, warmup)
        self.features = self.torso.features
        self.head = nn.Linear(self.features, outputs)

    def forward(
        self, obs: Tensor, statistics: Statistics, mask: Tensor | None = None, with_features: bool = False
    ) -> tuple[Any, ...]:
        hidden, renewed = self.torso(self.encoder(obs), statistics, mask)
        out = self.head(hidden[0])
        return (out, renewed, hidden[0]) if with_features else (out, renewed)


class RenormCritic(nn.Module):
    """E critics: ([B, ...], [B, A]) -> (values [E, B], statistics)."""

    def __init__(self, spec: EnvSpec, members: int, hidden_sizes: Sequence[int], activation: str, warmup: int) -> None:
        super().__init__()
        self.encoder, size = observation_encoder(spec)
        self.torso = RenormTorso(members, size + spec.action.dim, hidden_sizes, activation, warmup)
        self.head = EnsembleScalar(members, self.torso.features)

    def forward(
        self, obs: Tensor, actions: Tensor, statistics: Statistics, mask: Tensor | None = None
    ) -> tuple[Tensor, Statistics]:
        hidden, renewed = self.torso(torch.cat([self.encoder(obs), actions], -1), statistics, mask)
        return self.head(hidden), renewed


class CrossQModel(nn.Module):
    """Actor and critics of CrossQ."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *,
        critic_hidden_sizes: Sequence[int] = (256, 256), num_critics: int = 2, activation: str = "relu",
        warmup: int = 100_000, actor_outputs: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.actor = RenormActor(spec, actor_outputs * spec.action.dim, hidden_sizes, activation, warmup)
        self.critic = RenormCritic(spec, num_critics, critic_hidden_sizes, activation, warmup)
