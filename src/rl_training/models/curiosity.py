"""Networks whose prediction errors say how new an observation is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.models.imitation import action_code_size
from rl_training.models.layers import orthogonal
from rl_training.models.torsos import torso
from rl_training.ops import distributions
from rl_training.spec import EnvSpec

GAIN = math.sqrt(2.0)


def encoder(spec: EnvSpec, hidden_sizes: Sequence[int], features: int) -> nn.Sequential:
    """Hidden layers (convolutions for images) and a linear layer that gives `features` numbers per observation."""
    network, size = torso(spec, hidden_sizes, "relu", GAIN)
    return nn.Sequential(network, orthogonal(nn.Linear(size, features), GAIN))


class RandomDistillation(nn.Module):
    """A random network that is never trained, and one that predicts its outputs, with two more layers (Burda et al.
    2019, appendix A.5)."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], features: int) -> None:
        super().__init__()
        self.target = encoder(spec, hidden_sizes, features)
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.ReLU(), orthogonal(nn.Linear(features, features), GAIN)]
        self.predictor = nn.Sequential(*encoder(spec, hidden_sizes, features), *layers)

    def forward(self, obs: Tensor) -> Tensor:
        """The mean squared error of the prediction: [B]."""
        error: Tensor = (self.predictor(obs) - self.target(obs).detach()).square().mean(-1)
        return error


class IntrinsicCuriosity(nn.Module):
    """Features of observations; a model that predicts the action between two of them, and one that predicts the next
    features from the action (Pathak et al. 2017, Eq. 2 to 5)."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], features: int) -> None:
        super().__init__()
        size = action_code_size(spec.action)
        outputs = spec.action.dim if spec.action.kind == "box" else distributions.for_action(spec.action).size
        self.encoder = encoder(spec, hidden_sizes, features)
        self.inverse_model = nn.Sequential(nn.Linear(2 * features, features), nn.ReLU(), nn.Linear(features, outputs))
        self.forward_model = nn.Sequential(
            nn.Linear(features + size, features), nn.ReLU(), nn.Linear(features, features)
        )

    def forward(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        """(||predicted - next features||^2 [B], what the inverse model says of the action [B, outputs]).

        `actions` are encoded as vectors.
        """
        now, following = self.encoder(obs), self.encoder(next_obs)
        predicted = self.forward_model(torch.cat([now, actions], -1))
        error: Tensor = (predicted - following).square().sum(-1)
        out: Tensor = self.inverse_model(torch.cat([now, following], -1))
        return error, out
