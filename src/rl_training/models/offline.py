"""Networks of the offline algorithms: a Gaussian policy of fixed width, critics, a state value, an autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.control import Actor, BySizes, EnsembleCritic
from rl_training.models.layers import Scalar
from rl_training.models.torsos import mlp, observation_encoder, torso
from rl_training.models.value import DiscreteSACModel
from rl_training.ops.distributions import for_action
from rl_training.spec import EnvSpec

LOG_STD = (-5.0, 2.0)


class GaussianActor(Actor):
    """cat[tanh(mean), log_std] [B, 2A]; log_std is one parameter per action dimension, whatever the state."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu") -> None:
        super().__init__(spec, spec.action.dim, hidden_sizes, activation)
        self.log_std = nn.Parameter(torch.zeros(spec.action.dim))

    def forward(self, obs: Tensor, with_features: bool = False) -> Any:
        features: Tensor = self.torso(obs)
        mean = torch.tanh(self.head(features))
        out = torch.cat([mean, self.log_std.clamp(*LOG_STD).expand_as(mean)], -1)
        return (out, features) if with_features else out


class StateValue(nn.Module):
    """V(s): [B, ...] -> [B]."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu") -> None:
        super().__init__()
        self.torso, features = torso(spec, hidden_sizes, activation)
        self.head = Scalar(features)

    def forward(self, obs: Tensor) -> Tensor:
        value: Tensor = self.head(self.torso(obs))
        return value


class AWACModel(nn.Module):
    """Policy with actions in [-1, 1] and critics: AWAC, CRR."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, num_critics: int = 2,
        activation: str = "relu", layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.actor = GaussianActor(spec, hidden_sizes, activation)
        self.critic = EnsembleCritic(spec, num_critics, hidden_sizes, activation, layer_norm)


class IQLModel(AWACModel):
    """Policy with actions in [-1, 1], critics Q(s, a) and a value V(s): IQL, XQL."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, activation: str = "relu", **options: Any
    ) -> None:
        super().__init__(spec, hidden_sizes, activation=activation, **options)
        self.value = StateValue(spec, hidden_sizes, activation)


class DiscreteIQLModel(DiscreteSACModel):
    """Categorical policy, critics that return the values of all actions, and a value V(s)."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, num_critics: int = 2, activation: str = "relu"
    ) -> None:
        super().__init__(spec, hidden_sizes, num_critics=num_critics, activation=activation)
        self.value = StateValue(spec, hidden_sizes, activation)


class ImitationModel(nn.Module):
    """A policy for actions of any kind, and a value V(s): MARWIL."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, activation: str = "relu") -> None:
        super().__init__()
        self.spec = spec
        if spec.action.kind == "box":
            self.actor: Actor = GaussianActor(spec, hidden_sizes, activation)
        else:
            self.actor = Actor(spec, for_action(spec.action).size, hidden_sizes, activation)
        self.value = StateValue(spec, hidden_sizes, activation)


class ActionVAE(nn.Module):
    """A conditional variational autoencoder of actions: two latents for each action dimension.

    `vae(obs, z)` decodes latents [B, Z] to actions in [-1, 1]. `vae(obs, noise, actions)` encodes the actions and gives
    (mean, log_std [B, Z], the action decoded from mean + std x noise).
    """

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu") -> None:
        super().__init__()
        size, actions = spec.obs_dim, spec.action.dim
        last = hidden_sizes[-1] if hidden_sizes else size + actions
        self.encoder = mlp(size + actions, hidden_sizes, activation)
        self.latent = nn.Linear(last, 4 * actions)  # mean and log-deviation
        self.decoder = mlp(size + 2 * actions, hidden_sizes, activation)
        self.head = nn.Linear(hidden_sizes[-1] if hidden_sizes else size + 2 * actions, actions)

    def forward(self, obs: Tensor, noise: Tensor, actions: Tensor | None = None) -> Any:
        if actions is None:
            return torch.tanh(self.head(self.decoder(torch.cat([obs, noise], -1))))
        mean, log_std = self.latent(self.encoder(torch.cat([obs, actions], -1))).chunk(2, -1)
        log_std = log_std.clamp(-4.0, 15.0)
        return mean, log_std, self(obs, mean + log_std.exp() * noise)


class Perturbation(nn.Module):
    """The change of an action, in [-1, 1]: [B, A]."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "relu") -> None:
        super().__init__()
        size = spec.obs_dim + spec.action.dim
        self.torso = mlp(size, hidden_sizes, activation)
        self.head = nn.Linear(hidden_sizes[-1] if hidden_sizes else size, spec.action.dim)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return torch.tanh(self.head(self.torso(torch.cat([obs, actions], -1))))


class BCQModel(nn.Module):
    """Autoencoder, perturbation and twin critics: BCQ."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (400, 300), *, vae_hidden_sizes: Sequence[int] = (750, 750),
        activation: str = "relu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.vae = ActionVAE(spec, vae_hidden_sizes, activation)
        self.perturbation = Perturbation(spec, hidden_sizes, activation)
        self.critic = EnsembleCritic(spec, 2, hidden_sizes, activation)


class MLPIQLModel(BySizes, IQLModel):
    """`IQLModel` for vector observations, by sizes."""


class FlowActor(nn.Module):
    """Actions from an observation and noise: [B, ...], [B, A] -> [B, A]. With `timed`, the velocity of a point on its
    way from the noise to an action, at times [B] in [0, 1]."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], activation: str = "gelu", *, timed: bool) -> None:
        super().__init__()
        self.encoder, size = observation_encoder(spec)
        size += spec.action.dim + timed
        self.hidden = mlp(size, hidden_sizes, activation)
        self.head = nn.Linear(hidden_sizes[-1] if hidden_sizes else size, spec.action.dim)

    def forward(self, obs: Tensor, points: Tensor, times: Tensor | None = None) -> Tensor:
        parts = [self.encoder(obs), points] + ([] if times is None else [times.unsqueeze(-1)])
        out: Tensor = self.head(self.hidden(torch.cat(parts, -1)))
        return out


class FQLModel(nn.Module):
    """The flow that clones the data, the policy that takes one step, and critics (Park et al. 2025)."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (512, 512, 512, 512), *, num_critics: int = 2,
        activation: str = "gelu", layer_norm: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.flow = FlowActor(spec, hidden_sizes, activation, timed=True)
        self.actor = FlowActor(spec, hidden_sizes, activation, timed=False)
        self.critic = EnsembleCritic(spec, num_critics, hidden_sizes, activation, layer_norm, norm_last=True)
