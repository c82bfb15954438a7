"""Actor and critic for on-policy algorithms: separate networks in one module, so that one optimiser serves both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.envs.spec import EnvSpec
from rl_training.models.layers import Scalar, orthogonal
from rl_training.models.torsos import torso


class ActorCritic(nn.Module):
    """Orthogonal initialisation, separate torsos; Gaussian policies have a state-independent log-std.

    `outputs` is the number of numbers the action distribution reads (`ops.distributions`).
    """

    def __init__(
        self, spec: EnvSpec, outputs: int, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh",
        log_std_init: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        gain = math.sqrt(2.0)
        gaussian = spec.action.kind == "box"
        self.actor_torso, features = torso(spec, hidden_sizes, activation, gain)
        self.actor_head = orthogonal(nn.Linear(features, spec.action.dim if gaussian else outputs), 0.01)
        self.log_std = nn.Parameter(torch.full((spec.action.dim,), log_std_init)) if gaussian else None
        self.critic_torso, features = torso(spec, hidden_sizes, activation, gain)
        self.critic_head = Scalar(features, gain=1.0)

    def policy(self, obs: Tensor) -> Tensor:
        out: Tensor = self.actor_head(self.actor_torso(obs))
        return out if self.log_std is None else torch.cat([out, self.log_std.expand_as(out)], -1)

    def value(self, obs: Tensor) -> Tensor:
        out: Tensor = self.critic_head(self.critic_torso(obs))
        return out

    def forward(self, obs: Tensor, part: str = "both") -> Tensor | tuple[Tensor, Tensor]:
        if part == "policy":
            return self.policy(obs)
        if part == "value":
            return self.value(obs)
        return self.policy(obs), self.value(obs)
