"""A value network that also predicts its own later features (SPR, Schwarzer et al. 2021), as BBF uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.torsos import Cnn, image_network, mlp
from rl_training.models.value import C51QNetwork
from rl_training.spec import EnvSpec


def renormalise(latent: Tensor) -> Tensor:
    """Each row scaled to [0, 1] by its smallest and largest value (MuZero, Schrittwieser et al. 2020, appendix G)."""
    flat = latent.flatten(1)
    low, high = flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)
    return ((flat - low) / (high - low + 1e-5)).view(latent.shape)


class LatentEncoder(nn.Module):
    """Observations as renormalised latents: images by the convolutions of a torso, [B, C, H, W]; vectors [B, D]."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], activation: str, cnn: Cnn, width: int) -> None:
        super().__init__()
        seen = spec.observation
        if isinstance(seen, dict) or spec.features is not None:
            raise UserError(f"the encoder needs one image or one vector, and no features; {spec.env_id} has {seen}")
        self.image = image_network(seen.shape, 0, None, cnn, width) if seen.is_image else None
        self.vector = None if seen.is_image else mlp(spec.obs_dim, hidden_sizes, activation)
        zeros = torch.zeros(1, *seen.shape)
        with torch.no_grad():
            self.shape = tuple(self(zeros).shape[1:])

    def forward(self, obs: Tensor) -> Tensor:
        if self.image is None:
            assert self.vector is not None
            return renormalise(self.vector(obs))
        return renormalise(nn.functional.relu(self.image.convs(self.image.scaled(obs))))


class Transition(nn.Module):
    """The latent after an action: two layers (3x3 convolutions of images) on the latent beside the one-hot action."""

    def __init__(self, shape: tuple[int, ...], num_actions: int) -> None:
        super().__init__()
        size, self.num_actions = shape[0], num_actions

        def layer(inputs: int) -> nn.Module:
            return nn.Conv2d(inputs, size, 3, padding=1) if len(shape) == 3 else nn.Linear(inputs, size)

        self.first, self.second = layer(size + num_actions), layer(size)

    def forward(self, latent: Tensor, actions: Tensor) -> Tensor:
        chosen = (actions.unsqueeze(-1) == torch.arange(self.num_actions, device=actions.device)).to(latent.dtype)
        if latent.ndim == 4:
            chosen = chosen.unsqueeze(-1).unsqueeze(-1).expand(-1, -1, *latent.shape[2:])
        x = nn.functional.relu(self.first(torch.cat([latent, chosen], 1)))
        return renormalise(nn.functional.relu(self.second(x)))


class SelfPredictiveQNetwork(C51QNetwork):
    """Logits of the return distribution [B, A, num_atoms] on one hidden layer, which also projects latents: from the
    latent of an observation and actions, it predicts the projections of the latents that follow."""

    def __init__(self, encoder: LatentEncoder, hidden: int, num_actions: int, **options: Any) -> None:
        size = math.prod(encoder.shape)
        torso = nn.Sequential(encoder, nn.Flatten(), nn.Linear(size, hidden), nn.ReLU())
        super().__init__(torso, hidden, num_actions, **options)
        self.transition = Transition(encoder.shape, num_actions)
        self.predictor = nn.Linear(hidden, hidden)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):  # as in the authors' code
                nn.init.xavier_uniform_(layer.weight)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(
        self, obs: Tensor, key: Tensor | None = None, actions: Tensor | None = None, project: bool = False
    ) -> Any:
        """Logits; with `actions` [B, K] also predictions [B, K, D] of the projections after each of them. `project`
        returns the projection of the observation's latent alone: [B, D]."""
        latent = self.latents(obs)
        projected = self.projected(latent)
        if project:
            return projected
        logits = self.head(nn.functional.relu(projected), key)
        if actions is None:
            return logits
        predictions = []
        for action in actions.unbind(-1):
            latent = self.transition(latent, action)
            predictions.append(self.predictor(self.projected(latent)))
        return logits, torch.stack(predictions, 1)

    def latents(self, obs: Tensor) -> Tensor:
        """Latents of images [B, C, H, W], or of vectors [B, D]."""
        latent: Tensor = self.layers[0](obs)
        return latent

    def projected(self, latent: Tensor) -> Tensor:
        """Latents before the activation of the hidden layer: [B, D]."""
        out: Tensor = self.layers[2](latent.flatten(1))
        return out

    @property
    def layers(self) -> nn.Sequential:
        """Encoder, flattening, projection, activation."""
        assert isinstance(self.torso, nn.Sequential)
        return self.torso


def initial_bounds(network: nn.Module) -> dict[str, float]:
    """The b of each parameter that starts uniformly in [-b, b]; 0 of those that start at 0."""
    bounds = {name: 0.0 for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        if parameter.ndim >= 2:
            patch = math.prod(parameter.shape[2:])
            bounds[name] = math.sqrt(6.0 / (patch * (parameter.shape[0] + parameter.shape[1])))
    return bounds
