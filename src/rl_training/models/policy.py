"""Actor and critic for on-policy algorithms, as separate modules or as one module with one optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.layers import Scalar, orthogonal
from rl_training.models.torsos import Cnn, torso
from rl_training.spec import EnvSpec


class Actor(nn.Module):
    """Orthogonal initialisation; Gaussian policies have a state-independent log-std.

    `outputs` is the output size that the action distribution needs (`ops.distributions`).
    """

    def __init__(
        self, spec: EnvSpec, outputs: int, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh",
        log_std_init: float = 0.0, cnn: Cnn = "nature",
    ) -> None:  # fmt: skip
        super().__init__()
        gaussian = spec.action.kind == "box"
        self.actor_torso, self.features = torso(spec, hidden_sizes, activation, math.sqrt(2.0), cnn)
        self.actor_head = orthogonal(nn.Linear(self.features, spec.action.dim if gaussian else outputs), 0.01)
        self.log_std = nn.Parameter(torch.full((spec.action.dim,), log_std_init)) if gaussian else None

    def policy(self, obs: Tensor) -> Tensor:
        return self.head(self.actor_torso(obs))

    def head(self, features: Tensor) -> Tensor:
        out: Tensor = self.actor_head(features)
        return out if self.log_std is None else torch.cat([out, self.log_std.expand_as(out)], -1)

    def forward(self, obs: Tensor) -> Any:
        return self.policy(obs)


class Critic(nn.Module):
    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh", cnn: Cnn = "nature"
    ) -> None:
        super().__init__()
        self.torso, features = torso(spec, hidden_sizes, activation, math.sqrt(2.0), cnn)
        self.head = Scalar(features, gain=1.0)

    def forward(self, obs: Tensor) -> Tensor:
        out: Tensor = self.head(self.torso(obs))
        return out


class ActorCritic(Actor):
    """Actor and critic with a torso each, or two heads on one (`shared`)."""

    def __init__(
        self, spec: EnvSpec, outputs: int, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh",
        log_std_init: float = 0.0, cnn: Cnn = "nature", shared: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(spec, outputs, hidden_sizes, activation, log_std_init, cnn)
        own = None if shared else torso(spec, hidden_sizes, activation, math.sqrt(2.0), cnn)[0]
        self.critic_torso: nn.Module | None = own
        self.critic_head: nn.Module = Scalar(self.features, gain=1.0)

    def value(self, obs: Tensor) -> Tensor:
        out: Tensor = self.critic_head((self.critic_torso or self.actor_torso)(obs))
        return out

    def forward(self, obs: Tensor, part: str = "both") -> Any:
        if part == "policy":
            return self.policy(obs)
        if part == "value":
            return self.value(obs)
        if self.critic_torso is not None:
            return self.policy(obs), self.value(obs)
        features = self.actor_torso(obs)
        return self.head(features), self.critic_head(features)


class ActionValueActorCritic(ActorCritic):
    """An actor of discrete actions, and a critic that values each of them: [B, A]."""

    def __init__(self, spec: EnvSpec, outputs: int, *options: Any) -> None:
        super().__init__(spec, outputs, *options)
        self.critic_head = orthogonal(nn.Linear(self.features, outputs), 1.0)
