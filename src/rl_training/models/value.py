"""Networks for discrete actions: one class with options for output size, dueling and noise, and two classes that take
quantile fractions as input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.control import Actor
from rl_training.models.layers import ACTIVATIONS, EnsembleLinear, NoisyLinear
from rl_training.models.torsos import mlp, observation_encoder
from rl_training.ops import rng
from rl_training.ops.quantiles import cosine_embedding_features, quantile_midpoints
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec


def discrete_spec(obs_dim: int, num_actions: int) -> EnvSpec:
    """A spec for networks that are made without an environment."""
    return EnvSpec("custom", ArraySpec((obs_dim,)), ActionSpec("discrete", (num_actions,)))


def require_at_least(low: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < low:
            raise UserError(f"{name} = {size}: must be at least {low}")


class QNetwork(nn.Module):
    """Values of every action: [B, A], or [B, A, Z] when each action has Z outputs (atoms, quantiles).

    dueling: Q = V + A - mean(A) (Wang et al. 2016, Eq. 9). noisy: the layers after the torso have parameter noise.
    """

    output_kind = "one value"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, outputs: int = 1, dueling: bool = False,
        noisy: bool = False, noisy_sigma: float = 0.5, squeeze: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_actions, self.outputs, self.dueling, self.noisy = num_actions, outputs, dueling, noisy
        self.squeeze = squeeze and outputs == 1  # a distribution keeps its axis even with one atom or quantile
        self.torso = torso

        def linear(size: int) -> nn.Module:
            return NoisyLinear(features, size, noisy_sigma) if noisy else nn.Linear(features, size)

        self.advantage = linear(num_actions * outputs)
        self.value = linear(outputs) if dueling else None

    def forward(self, obs: Tensor, key: Tensor | None = None) -> Tensor:
        return self.head(self.torso(obs), key)

    def head(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Values from features [..., D]."""
        key_a, key_v = (None, None) if key is None else (rng.fold(key, 0), rng.fold(key, 1))
        q: Tensor = self.advantage(x, key_a) if self.noisy else self.advantage(x)
        q = q.view(*q.shape[:-1], self.num_actions, self.outputs)  # [B, A, Z]
        if self.value is not None:
            value = self.value(x, key_v) if self.noisy else self.value(x)
            q = q - q.mean(-2, keepdim=True) + value.unsqueeze(-2)
        return q.squeeze(-1) if self.squeeze else q


class C51QNetwork(QNetwork):
    """Logits of the return distribution on `num_atoms` values from v_min to v_max: [B, A, num_atoms]."""

    output_kind = "logits of atoms"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, num_atoms: int = 51, v_min: float = -10.0,
        v_max: float = 10.0, **options: Any,
    ) -> None:  # fmt: skip
        require_at_least(2, num_atoms=num_atoms)
        if v_min >= v_max:
            raise UserError(f"v_min = {v_min:g} must be below v_max = {v_max:g}")
        super().__init__(torso, features, num_actions, outputs=num_atoms, squeeze=False, **options)
        self.num_atoms, self.v_min, self.v_max = num_atoms, v_min, v_max


class QRQNetwork(QNetwork):
    """Quantiles of the return at the midpoints (2i + 1) / 2N: [B, A, num_quantiles]."""

    output_kind = "quantiles"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, num_quantiles: int = 50, **options: Any
    ) -> None:
        require_at_least(1, num_quantiles=num_quantiles)
        super().__init__(torso, features, num_actions, outputs=num_quantiles, squeeze=False, **options)
        self.num_quantiles = num_quantiles


class ImplicitQuantileNetwork(nn.Module):
    """Quantiles of the return at any fractions tau, Z(x, a; tau) = w_a . (psi(x) * phi(tau)) (IQN, Eq. 4 and above it).

    The head is one linear layer, so the product is computed as (psi * w_a) . phi: two small factors and one matrix
    product, instead of features for every pair of state and fraction. Dueling and noise apply to the weights w_a.
    If the fractions differ between rows, each would need its own embedding. With `num_knots` > 0, the quantile function
    is instead evaluated at the ends of that many equal intervals of [0, 1], shared by all rows, and linear in between.
    """

    output_kind = "quantiles at given fractions"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, num_quantiles: int = 32, num_cosines: int = 64,
        num_knots: int = 0, dueling: bool = False, noisy: bool = False, noisy_sigma: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__()
        require_at_least(1, num_quantiles=num_quantiles, num_cosines=num_cosines)
        require_at_least(0, num_knots=num_knots)
        self.num_actions, self.features, self.dueling, self.noisy = num_actions, features, dueling, noisy
        self.num_quantiles, self.num_cosines, self.num_knots = num_quantiles, num_cosines, num_knots
        self.torso = torso
        self.embedding = nn.Linear(num_cosines, features)
        outputs = num_actions + dueling  # the last row is the state's value
        self.head = NoisyLinear(features, outputs, noisy_sigma) if noisy else nn.Linear(features, outputs)

    def weights(self, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights [A, D] and bias [A] of the head, including the key's noise and the combined dueling streams."""
        head: Any = self.head
        weight, bias = head.weight, head.bias
        if self.noisy and key is not None:
            noise = rng.normal(key, (self.features + weight.shape[0],))
            noise = noise.sign() * noise.abs().sqrt()
            noise_in, noise_out = noise[: self.features], noise[self.features :]
            weight = weight + head.weight_sigma * (noise_out.unsqueeze(-1) * noise_in)
            bias = bias + head.bias_sigma * noise_out
        if self.dueling:
            weight = weight[:-1] - weight[:-1].mean(0) + weight[-1]
            bias = bias[:-1] - bias[:-1].mean(0) + bias[-1]
        return weight, bias

    def forward(
        self, obs: Tensor | None, taus: Tensor | None = None, key: Tensor | None = None,
        actions: Tensor | None = None, *, features: Tensor | None = None, only_features: bool = False,
    ) -> Tensor:  # fmt: skip
        """Quantiles [B, A, N] at `taus` ([N] or [B, N]; by default the midpoints), or [B, N] for given `actions` [B].

        `only_features` returns psi(x) [B, D], which `features` accepts in a later call.
        """
        x: Tensor = self.torso(obs) if features is None else features
        if only_features:
            return x
        if taus is None:
            taus = quantile_midpoints(self.num_quantiles, x.device)
        knots = self.num_knots if taus.ndim == 2 else 0
        at = torch.arange(knots + 1, device=x.device) / knots if knots else taus
        phi = torch.relu(self.embedding(cosine_embedding_features(at, self.num_cosines)))  # [(B,) N, D]
        weight, bias = self.weights(key)
        if actions is not None:  # select weight rows by a product, whose gradient needs no scatter
            chosen = (actions.unsqueeze(-1) == torch.arange(self.num_actions, device=x.device)).to(x.dtype)  # [B, A]
            weight, bias = (chosen @ weight).unsqueeze(1), (chosen * bias).sum(-1, keepdim=True)
        z = (x.unsqueeze(1) * weight) @ phi.transpose(-1, -2) + bias.unsqueeze(-1)  # [B, A or 1, N]
        if knots:  # interpolate as a sum over all knots: unlike scatters, sums have deterministic gradients
            share = (1.0 - (taus.unsqueeze(-1) - at).abs() * knots).clamp(min=0.0)  # [B, N, knots + 1]
            z = (z.unsqueeze(-2) * share.unsqueeze(1)).sum(-1)
        return z if actions is None else z.squeeze(1)


class Fractions(NamedTuple):
    taus: Tensor  # [B, N + 1], from 0 to 1
    tau_hats: Tensor  # [B, N], their midpoints
    entropy: Tensor  # [B], entropy of the widths


class FractionProposal(nn.Module):
    """Fractions that depend only on the state: a softmax gives widths, their cumulative sum fractions (FQF, 3.3)."""

    def __init__(self, features: int, num_quantiles: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, num_quantiles)
        nn.init.xavier_uniform_(self.linear.weight, gain=0.01)  # nearly uniform fractions at the start
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Fractions:
        log_width = self.linear(features).log_softmax(-1)
        width = log_width.exp()
        upper = width.cumsum(-1)
        taus = torch.cat([torch.zeros_like(upper[..., :1]), upper], -1)
        return Fractions(taus, 0.5 * (taus[..., 1:] + taus[..., :-1]), -(width * log_width).sum(-1))


class FQFOutput(NamedTuple):
    quantiles_hat: Tensor  # [B, A, N], at tau_hats
    taus: Tensor  # [B, N + 1]
    tau_hats: Tensor  # [B, N]


class FQFModel(nn.Module):
    """The two networks of FQF: one proposes fractions, the other predicts the quantiles there."""

    output_kind = "quantiles at proposed fractions"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, num_quantiles: int = 32, num_knots: int = 64,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_actions, self.num_quantiles = num_actions, num_quantiles
        options = {**options, "num_quantiles": num_quantiles, "num_knots": num_knots}
        self.q = ImplicitQuantileNetwork(torso, features, num_actions, **options)
        self.fraction = FractionProposal(features, num_quantiles)

    def forward(self, obs: Tensor, key: Tensor | None = None) -> FQFOutput:
        x = self.q(obs, only_features=True)
        taus, tau_hats, _ = self.fraction(x.detach())
        return FQFOutput(self.q(None, tau_hats, key, features=x), taus, tau_hats)


class EnsembleQNetwork(nn.Module):
    """E Q-networks as batched products: [B, ...] -> [E, B, A]. For images, they share one encoder."""

    def __init__(self, spec: EnvSpec, members: int, hidden_sizes: Sequence[int], activation: str = "relu") -> None:
        super().__init__()
        self.encoder, size = observation_encoder(spec)
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [EnsembleLinear(members, size, width), ACTIVATIONS[activation]()]
            size = width
        self.layers = nn.Sequential(*layers, EnsembleLinear(members, size, spec.action.n))

    def forward(self, obs: Tensor) -> Tensor:
        q: Tensor = self.layers(self.encoder(obs))
        return q


class DiscreteSACModel(nn.Module):
    """A categorical actor, and an ensemble of critics that return the values of all actions."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (64, 64), *, num_critics: int = 2, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.spec = spec
        self.actor = Actor(spec, spec.action.n, hidden_sizes, activation)  # logits [B, A]
        self.critic = EnsembleQNetwork(spec, num_critics, hidden_sizes, activation)


class MLPDiscreteSACModel(DiscreteSACModel):
    """`DiscreteSACModel` for vector observations of the given size."""

    def __init__(self, obs_dim: int, num_actions: int, hidden_sizes: Sequence[int] = (64, 64), **options: Any) -> None:
        super().__init__(discrete_spec(obs_dim, num_actions), hidden_sizes, **options)


class MLPTorsoMixin:
    """Builds a network on an MLP torso, for vector observations of the given size."""

    def __init__(
        self, obs_dim: int, num_actions: int, hidden_sizes: Sequence[int] = (64, 64), *, activation: str = "relu",
        **options: Any,
    ) -> None:  # fmt: skip
        features = hidden_sizes[-1] if hidden_sizes else obs_dim
        super().__init__(mlp(obs_dim, hidden_sizes, activation), features, num_actions, **options)  # type: ignore[call-arg]
        self.spec = discrete_spec(obs_dim, num_actions)


class MLPQNetwork(MLPTorsoMixin, QNetwork):
    pass


class MLPC51QNetwork(MLPTorsoMixin, C51QNetwork):
    pass


class MLPQRQNetwork(MLPTorsoMixin, QRQNetwork):
    pass


class MLPIQNNetwork(MLPTorsoMixin, ImplicitQuantileNetwork):
    pass


class MLPFQFNetwork(MLPTorsoMixin, FQFModel):
    pass
