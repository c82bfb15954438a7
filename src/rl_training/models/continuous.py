"""Actors and critics for continuous actions. A *model* is a module whose direct children are the networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.envs.spec import ActionSpec, ArraySpec, EnvSpec
from rl_training.models.layers import ACTIVATIONS, EnsembleLinear, EnsembleScalar
from rl_training.models.torsos import observation_encoder, torso


class Actor(nn.Module):
    """Torso and one linear head: mean and log-std of a Gaussian, or the action itself."""

    def __init__(self, spec: EnvSpec, outputs: int, hidden_sizes: Sequence[int], activation: str = "relu") -> None:
        super().__init__()
        self.torso, features = torso(spec, hidden_sizes, activation)
        self.head = nn.Linear(features, outputs)

    def forward(self, obs: Tensor) -> Tensor:
        out: Tensor = self.head(self.torso(obs))
        return out


class EnsembleCritic(nn.Module):
    """E critics Q(s, a) as batched products: [B, ...], [B, A] -> [E, B]. Images share one encoder."""

    def __init__(
        self, spec: EnvSpec, members: int, hidden_sizes: Sequence[int], activation: str = "relu",
        layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encoder, size = observation_encoder(spec)
        size += spec.action.dim
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers.append(EnsembleLinear(members, size, width))
            if layer_norm:
                layers.append(nn.LayerNorm(width, elementwise_affine=False))
            layers.append(ACTIVATIONS[activation]())
            size = width
        self.hidden = nn.Sequential(*layers)
        self.head = EnsembleScalar(members, size)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(torch.cat([self.encoder(obs), actions], -1)))
        return out


def vector_spec(obs_dim: int, action_dim: int) -> EnvSpec:
    """The spec of a plain task with [-1, 1] actions, for models made without an environment."""
    action = ActionSpec("box", (), (action_dim,), (-1.0,) * action_dim, (1.0,) * action_dim)
    return EnvSpec("custom", ArraySpec((obs_dim,)), action)


class SACModel(nn.Module):
    """Squashed-Gaussian actor and an ensemble of critics."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, num_critics: int = 2,
        activation: str = "relu", layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.actor = Actor(spec, 2 * spec.action.dim, hidden_sizes, activation)
        self.critic = EnsembleCritic(spec, num_critics, hidden_sizes, activation, layer_norm)


class MLPSACModel(SACModel):
    """`SACModel` for vector observations, by sizes."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), **options: int) -> None:
        super().__init__(vector_spec(obs_dim, action_dim), hidden_sizes, **options)  # type: ignore[arg-type]
