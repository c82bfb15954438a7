"""Actors and critics for continuous actions. A *model* is a module whose direct children are the networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.layers import ACTIVATIONS, EnsembleLinear, EnsembleNorm, EnsembleScalar
from rl_training.models.residual import HEAD_GAIN, Network, check_network, of_members, orthogonal_each, residual_layers
from rl_training.models.torsos import hidden_layers, observation_encoder, torso
from rl_training.ops import categorical, rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec


class Actor(nn.Module):
    """Torso and one linear head: mean and log-std of a Gaussian, or the action before its tanh.

    On images it has an encoder of its own, which its own loss trains. For continuous actions, the hidden layers follow.
    """

    def __init__(
        self, spec: EnvSpec, outputs: int, hidden_sizes: Sequence[int], activation: str = "relu",
        network: Network = "mlp",
    ) -> None:  # fmt: skip
        super().__init__()
        continuous = spec.action.kind == "box"
        self.torso, self.features = torso(
            spec, hidden_sizes, activation, hidden_after_cnn=continuous, network=network
        )  # fmt: skip
        self.head = nn.Linear(self.features, outputs)
        if network != "mlp":
            orthogonal_each(self.head, HEAD_GAIN[network])

    def forward(self, obs: Tensor, with_features: bool = False) -> Any:
        """Outputs [B, outputs]; `with_features` adds the features [B, F], which state-dependent exploration uses."""
        features: Tensor = self.torso(obs)
        out: Tensor = self.head(features)
        return (out, features) if with_features else out


class EnsembleCritic(nn.Module):
    """E critics Q(s, a) as batched products: [B, ...], [B, A] -> [E, B]; [E, B, Z] with Z outputs (quantiles, atoms).

    The members share the encoder of images. LayerNorm comes before the activation, or after it with `norm_last`.
    `members` selects the critics to evaluate; dropout is on with a `key`. `network` chooses between plain hidden layers
    and residual blocks, which have LayerNorm of their own.
    """

    def __init__(
        self, spec: EnvSpec, members: int, hidden_sizes: Sequence[int], activation: str = "relu",
        layer_norm: bool = False, dropout: float = 0.0, outputs: int = 1, norm_last: bool = False,
        network: Network = "mlp",
    ) -> None:  # fmt: skip
        super().__init__()
        self.members, self.dropout = members, dropout
        check_network(network, hidden_sizes, layer_norm=layer_norm, norm_last=norm_last, dropout=dropout > 0.0)
        self.encoder, size = observation_encoder(spec)
        size += spec.action.dim
        layers: list[nn.Module] = []
        for width in hidden_sizes if network == "mlp" else ():
            norm: list[nn.Module] = [EnsembleNorm(members, width)] if layer_norm else []
            active = ACTIVATIONS[activation]()
            after = [active, *norm] if norm_last else [*norm, active]
            layers += [EnsembleLinear(members, size, width), *after]
            size = width
        if network != "mlp":
            layers, size = residual_layers(network, size, hidden_sizes, activation, members), hidden_sizes[-1]
        self.hidden = nn.Sequential(*layers)
        self.head = EnsembleScalar(members, size) if outputs == 1 else EnsembleLinear(members, size, outputs)
        if network != "mlp":
            orthogonal_each(self.head, HEAD_GAIN[network])

    def forward(
        self, obs: Tensor, actions: Tensor, key: Tensor | None = None, members: Tensor | slice | None = None
    ) -> Tensor:
        x = torch.cat([self.encoder(obs), actions], -1)
        for number, layer in enumerate(self.hidden):
            x = of_members(layer, x, members)
            if self.dropout and key is not None and isinstance(layer, EnsembleLinear):
                # DroQ: dropout, then LayerNorm, then the activation (Hiraoka et al. 2022, Fig. 1).
                keep = rng.uniform(rng.fold(key, number), tuple(x.shape)) >= self.dropout
                x = torch.where(keep, x * (1.0 / (1.0 - self.dropout)), 0.0)
        out: Tensor = self.head(x, members)
        return out


class Explorer(nn.Module):
    """The shift from an actor's mean to that of a policy that explores (BRO, Nauman et al. 2024): [B, ...], [B, A] ->
    [B, A]. It is small at the start."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int], activation: str, network: Network) -> None:
        super().__init__()
        self.encoder, size = observation_encoder(spec)
        size += spec.action.dim
        self.hidden = hidden_layers(network, size, hidden_sizes, activation)
        self.head = nn.Linear(hidden_sizes[-1] if hidden_sizes else size, spec.action.dim, bias=False)
        orthogonal_each(self.head, 0.01)

    def forward(self, obs: Tensor, mean: Tensor) -> Tensor:
        shift: Tensor = self.head(self.hidden(torch.cat([self.encoder(obs), mean], -1)))
        return shift


def vector_spec(obs_dim: int, action_dim: int) -> EnvSpec:
    """The spec of a plain task with [-1, 1] actions, for models made without an environment."""
    action = ActionSpec("box", (), (action_dim,), (-1.0,) * action_dim, (1.0,) * action_dim)
    return EnvSpec("custom", ArraySpec((obs_dim,)), action)


class ActorCriticModel(nn.Module):
    """An actor with `actor_outputs` numbers per action dimension, and an ensemble of critics."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, actor_outputs: int, num_critics: int = 2,
        activation: str = "relu", layer_norm: bool = False, dropout: float = 0.0, critic_outputs: int = 1,
        norm_last: bool = False, network: Network = "mlp", critic_hidden_sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.actor = Actor(spec, actor_outputs * spec.action.dim, hidden_sizes, activation, network)
        self.critic = EnsembleCritic(
            spec, num_critics, hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes, activation,
            layer_norm, dropout, critic_outputs, norm_last, network,
        )  # fmt: skip


class SACModel(ActorCriticModel):
    """Gaussian actor (mean and log-std; the algorithm squashes) and an ensemble of critics: SAC, REDQ, TQC, MPO."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), **options: Any) -> None:
        super().__init__(spec, hidden_sizes, actor_outputs=2, **options)


class TD3Model(ActorCriticModel):
    """Deterministic actor (the algorithm applies the tanh) and an ensemble of critics: DDPG, TD3."""

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), **options: Any) -> None:
        super().__init__(spec, hidden_sizes, actor_outputs=1, **options)


class D4PGModel(ActorCriticModel):
    """Deterministic actor and a critic whose value distribution lies on fixed atoms (Barth-Maron et al. 2018)."""

    support: Tensor  # the atoms z_i: [Z]

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, num_atoms: int = 51, v_min: float = -150.0,
        v_max: float = 150.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            spec, hidden_sizes, actor_outputs=1, num_critics=1, critic_outputs=num_atoms, **options
        )  # fmt: skip
        self.register_buffer("support", categorical.support(v_min, v_max, num_atoms), persistent=False)

    def act(self, obs: Tensor) -> Tensor:
        """mu(s) in [-1, 1]: [B, A]."""
        return torch.tanh(self.actor(obs))

    def logits(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the atoms: [B, Z]."""
        logits: Tensor = self.critic(obs, actions)[0]
        return logits

    def q_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Expected value of the distribution: [B]."""
        return self.logits(obs, actions).softmax(-1) @ self.support


def quadratic_q(mean: Tensor, value: Tensor, lower: Tensor, actions: Tensor) -> Tensor:
    """Q = V - (a - mu)^T P (a - mu) / 2 with P = L L^T (NAF, Gu et al. 2016, Eq. 8), by ||L^T (a - mu)||^2: [B]."""
    distance = ((actions - mean).unsqueeze(-2) @ lower).squeeze(-2)  # (a - mu)^T L: [B, A]
    return value - 0.5 * distance.square().sum(-1)


class NAFModel(nn.Module):
    """mu(s), V(s) and the lower-triangular L(s), with a positive diagonal, on one torso (Gu et al. 2016, section 4)."""

    place: Tensor
    below: Tensor
    diagonal: Tensor

    def __init__(self, spec: EnvSpec, hidden_sizes: Sequence[int] = (256, 256), *, activation: str = "relu") -> None:
        super().__init__()
        self.spec = spec
        self.dim = dim = spec.action.dim
        self.torso, self.features = torso(spec, hidden_sizes, activation)
        self.entries = dim * (dim + 1) // 2
        self.head = nn.Linear(self.features, dim + 1 + self.entries)
        rows, columns = torch.tril_indices(dim, dim)
        place = torch.zeros(dim, dim, dtype=torch.int64)
        place[rows, columns] = torch.arange(self.entries)
        self.register_buffer("place", place, persistent=False)  # index of the entry at (row, column)
        self.register_buffer("below", torch.ones(dim, dim).tril(-1) > 0, persistent=False)
        self.register_buffer("diagonal", torch.eye(dim) > 0, persistent=False)

    def forward(self, obs: Tensor, with_features: bool = False) -> Any:
        """(mu before its tanh [B, A], V [B], L [B, A, A]), and the features [B, F] if `with_features`."""
        features: Tensor = self.torso(obs)
        out = self.head(features)
        pre_tanh, value = out[..., : self.dim], out[..., self.dim]
        square = out[..., self.dim + 1 :][..., self.place]  # [B, A, A]
        # Entries off the diagonal are 0 before exp: a large one must not make the gradient infinite.
        positive = torch.exp(torch.where(self.diagonal, square, 0.0))
        below = torch.where(self.below, square, 0.0)
        lower = torch.where(self.diagonal, positive, below)
        return (pre_tanh, value, lower, features) if with_features else (pre_tanh, value, lower)

    def actor(self, obs: Tensor) -> Tensor:
        """mu(s), the action that maximises Q: [B, A]."""
        return torch.tanh(self(obs)[0])

    def state_values(self, obs: Tensor) -> Tensor:
        """V(s) = max_a Q(s, a): [B]."""
        value: Tensor = self(obs)[1]
        return value

    def q_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q(s, a): [B]."""
        pre_tanh, value, lower = self(obs)
        return quadratic_q(torch.tanh(pre_tanh), value, lower, actions)


class BySizes(nn.Module):
    """A model made from sizes instead of a spec, for vector observations. It goes first in the list of bases."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), **options: Any) -> None:
        super().__init__(vector_spec(obs_dim, action_dim), hidden_sizes, **options)


class MLPSACModel(BySizes, SACModel):
    """`SACModel` for vector observations, by sizes."""


class MLPREDQModel(BySizes, SACModel):
    """`SACModel` with the ten critics of REDQ, by sizes."""

    def __init__(self, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), **options: Any) -> None:
        super().__init__(obs_dim, action_dim, hidden_sizes, **{"num_critics": 10, **options})


class MLPTD3Model(BySizes, TD3Model):
    """`TD3Model` for vector observations, by sizes."""


class MLPD4PGModel(BySizes, D4PGModel):
    """`D4PGModel` for vector observations, by sizes."""


class MLPNAFModel(BySizes, NAFModel):
    """`NAFModel` for vector observations, by sizes."""
