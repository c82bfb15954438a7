"""The networks of TD-MPC2 (Hansen et al. 2024, section 3.1): encoder, latent dynamics with rewards, critics, policy.

All are MLPs with LayerNorm and Mish. There is no decoder: latents are trained to predict later latents, rewards and
values only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_training.models.control import EnsembleCritic, vector_spec
from rl_training.models.layers import EnsembleLinear
from rl_training.models.torsos import mlp
from rl_training.spec import EnvSpec

GROUP = 8  # entries of a latent that sum to 1


class Sizes(NamedTuple):
    """Widths and depths (Hansen et al. 2024, Table 10)."""

    encoder: int  # width of the encoder's hidden layers ...
    encoder_layers: int  # ... and their number, with the output layer
    width: int  # of the hidden layers of all other networks
    latent: int
    critics: int


SIZES = {
    "tiny": Sizes(encoder=32, encoder_layers=2, width=32, latent=16, critics=2),
    "200k": Sizes(encoder=64, encoder_layers=2, width=128, latent=64, critics=2),
    "1m": Sizes(encoder=256, encoder_layers=2, width=384, latent=128, critics=2),
    "5m": Sizes(encoder=256, encoder_layers=2, width=512, latent=512, critics=5),
    "19m": Sizes(encoder=1024, encoder_layers=3, width=1024, latent=768, critics=5),
    "48m": Sizes(encoder=1792, encoder_layers=4, width=1792, latent=768, critics=5),
    "317m": Sizes(encoder=4096, encoder_layers=5, width=4096, latent=1376, critics=8),
}


class SimNorm(nn.Module):
    """Softmax within groups of entries (Hansen et al. 2024, Eq. 5): a latent is a vector of simplices."""

    def __init__(self, group: int = GROUP) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.group).softmax(-1).flatten(-2)


def to_latent(in_features: int, hidden_sizes: list[int], latent: int) -> nn.Sequential:
    """An MLP whose output is a latent."""
    hidden = mlp(in_features, hidden_sizes, "mish", layer_norm=True)
    return nn.Sequential(*hidden, nn.Linear(hidden_sizes[-1], latent), nn.LayerNorm(latent), SimNorm())


def head(in_features: int, width: int, outputs: int) -> nn.Sequential:
    """An MLP with two hidden layers and plain outputs."""
    return nn.Sequential(*mlp(in_features, (width, width), "mish", layer_norm=True), nn.Linear(width, outputs))


class LatentModel(nn.Module):
    """What follows an action: [B, L], [B, A] -> the next latent [B, L], logits of the reward [B, bins] and, with
    `ends`, the logit [B] that the episode terminates there (else None)."""

    def __init__(self, sizes: Sizes, actions: int, bins: int, *, ends: bool = False) -> None:
        super().__init__()
        size = sizes.latent + actions
        self.dynamics = to_latent(size, [sizes.width, sizes.width], sizes.latent)
        self.reward = head(size, sizes.width, bins)
        self.end = head(sizes.latent, sizes.width, 1) if ends else None

    def forward(self, latent: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x = torch.cat([latent, actions], -1)
        after = self.dynamics(x)
        return after, self.reward(x), None if self.end is None else self.end(after).squeeze(-1)


class TDMPC2Model(nn.Module):
    """All networks, with the authors' initial weights: truncated normals of std 0.02, biases 0, and zero in the last
    layer of rewards and values."""

    def __init__(
        self, spec: EnvSpec, size: str = "5m", *, bins: int = 101, dropout: float = 0.01, episodic: bool = False
    ) -> None:
        super().__init__()
        self.spec, sizes, actions = spec, SIZES[size], spec.action.dim
        self.encoder = to_latent(spec.obs_dim, [sizes.encoder] * (sizes.encoder_layers - 1), sizes.latent)
        self.model = LatentModel(sizes, actions, bins, ends=episodic)
        self.critic = EnsembleCritic(
            vector_spec(sizes.latent, actions), sizes.critics, (sizes.width, sizes.width), "mish", layer_norm=True,
            dropout=dropout, outputs=bins,
        )  # fmt: skip
        self.actor = head(sizes.latent, sizes.width, 2 * actions)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | EnsembleLinear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        for last in (self.model.reward[-1], self.critic.head):
            nn.init.zeros_(last.get_parameter("weight"))
