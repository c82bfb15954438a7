"""Networks of the algorithms that regress on a dataset's actions: a Gaussian of fixed width, critics, a state value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.envs.spec import EnvSpec
from rl_training.models.continuous import Actor, EnsembleCritic, vector_spec
from rl_training.models.layers import Scalar
from rl_training.models.torsos import torso

LOG_STD = (-5.0, 2.0)


class GaussianActor(Actor):
    """cat[tanh(mean), log_std] [B, 2A]; the deviation is one parameter for each action, not a function of the state."""

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


class IQLModel(nn.Module):
    """Policy with actions in [-1, 1], critics Q(s, a) and a value V(s): IQL, XQL."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, num_critics: int = 2,
        activation: str = "relu", layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.actor = GaussianActor(spec, hidden_sizes, activation)
        self.critic = EnsembleCritic(spec, num_critics, hidden_sizes, activation, layer_norm)
        self.value = StateValue(spec, hidden_sizes, activation)


class AWACModel(nn.Module):
    """Policy with actions in [-1, 1] and critics: AWAC, CRR."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, num_critics: int = 2, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.spec = spec
        self.actor = GaussianActor(spec, hidden_sizes, activation)
        self.critic = EnsembleCritic(spec, num_critics, hidden_sizes, activation)


class MLPIQLModel(IQLModel):
    """`IQLModel` for vector observations, by sizes."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), **options: Any) -> None:
        super().__init__(vector_spec(obs_dim, action_dim), hidden_sizes, **options)
