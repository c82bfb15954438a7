"""Networks for discrete actions: one class with options for output size, dueling and noise, and two that take quantile
fractions as input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.control import Actor
from rl_training.models.layers import ACTIVATIONS, Chain, EnsembleLinear, EnsembleNorm, call, dense
from rl_training.models.torsos import ConvolutionalNetwork, body, observation_encoder
from rl_training.ops.quantiles import cosine_embedding_features, quantile_midpoints
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec


def discrete_spec(obs_dim: int, num_actions: int) -> EnvSpec:
    """A spec for networks that are made without an environment."""
    return EnvSpec("custom", ArraySpec((obs_dim,)), ActionSpec("discrete", (num_actions,)))


def require_at_least(low: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < low:
            raise UserError(f"{name} = {size}: must be at least {low}")


_TORSO = 3  # the torso's fold of the key; the streams have 0 and 1, the fractions of IQN have 2


def stream(
    features: int, hidden: int, outputs: int, activation: str = "relu", sigma: float = 0.0, layer_norm: bool = False
) -> nn.Module:
    """A hidden layer, unless its width is 0, and an output layer; both noisy if `sigma` > 0."""
    if not hidden:
        return dense(features, outputs, sigma)
    norm = [nn.LayerNorm(hidden)] if layer_norm else []
    return Chain(dense(features, hidden, sigma), *norm, ACTIVATIONS[activation](), dense(hidden, outputs, sigma))


class QNetwork(nn.Module):
    """Values of every action: [B, A], or [B, A, Z] when each action has Z outputs (atoms, quantiles).

    The last hidden layer has `hidden` units, or is part of the torso if that is 0. dueling: two streams, each with such
    a layer, and Q = V + A - mean(A) (Wang et al. 2016, Eq. 9). noisy: both layers of each stream have parameter noise;
    a torso that is noisy too (`torsos.body`) gets its share of the key.
    """

    output_kind = "one value"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, hidden: int = 0, activation: str = "relu",
        outputs: int = 1, dueling: bool = False, noisy: bool = False, noisy_sigma: float = 0.5, squeeze: bool = True,
        layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_actions, self.outputs, self.dueling, self.noisy = num_actions, outputs, dueling, noisy
        self.squeeze = squeeze and outputs == 1  # a distribution keeps its axis even with one atom or quantile
        self.torso = torso
        sigma = noisy_sigma if noisy else 0.0
        self.advantage = stream(features, hidden, num_actions * outputs, activation, sigma, layer_norm)
        self.value = stream(features, hidden, outputs, activation, sigma, layer_norm) if dueling else None

    def forward(self, obs: Tensor, key: Tensor | None = None) -> Tensor:
        return self.head(self.encode(obs, key), key)

    def encode(self, obs: Any, key: Tensor | None = None) -> Tensor:
        """Features [..., D] of observations."""
        return call(self.torso, obs, key, _TORSO)

    def head(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Values from features [..., D]."""
        q = call(self.advantage, x, key, 0)
        q = q.view(*q.shape[:-1], self.num_actions, self.outputs)  # [B, A, Z]
        if self.value is not None:
            q = q - q.mean(-2, keepdim=True) + call(self.value, x, key, 1).unsqueeze(-2)
        return q.squeeze(-1) if self.squeeze else q


class C51QNetwork(QNetwork):
    """Logits of the return distribution on `num_atoms` values from v_min to v_max, or on a range that the algorithm
    finds ("auto"): [B, A, num_atoms]."""

    output_kind = "logits of atoms"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, num_atoms: int = 51,
        v_min: float | str = -10.0, v_max: float | str = 10.0, **options: Any,
    ) -> None:  # fmt: skip
        require_at_least(2, num_atoms=num_atoms)
        if not isinstance(v_min, str) and not isinstance(v_max, str) and v_min >= v_max:
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


class ImplicitQuantileNetwork(QNetwork):
    """Quantiles of the return at any fractions tau, Z(x, a; tau) = f(psi(x) * phi(tau))_a (IQN, Eq. 4 and above it).

    psi is the torso, phi the embedding of a fraction, f the hidden layer and the output of `QNetwork`: the product is
    taken on the features before the last hidden layer.
    """

    output_kind = "quantiles at given fractions"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, num_quantiles: int = 32, num_cosines: int = 64,
        **options: Any,
    ) -> None:  # fmt: skip
        require_at_least(1, num_quantiles=num_quantiles, num_cosines=num_cosines)
        super().__init__(torso, features, num_actions, **options)
        self.num_quantiles, self.num_cosines = num_quantiles, num_cosines
        self.embedding = nn.Linear(num_cosines, features)

    def forward(  # type: ignore[override]
        self, obs: Tensor | None, taus: Tensor | None = None, key: Tensor | None = None,
        actions: Tensor | None = None, *, features: Tensor | None = None, only_features: bool = False,
    ) -> Tensor:  # fmt: skip
        """Quantiles [B, A, N] at `taus` ([N] or [B, N]; by default the midpoints), or [B, N] for given `actions` [B].

        `only_features` returns psi(x) [B, D], which `features` accepts in a later call.
        """
        x = self.encode(obs, key) if features is None else features
        if only_features:
            return x
        if taus is None:
            taus = quantile_midpoints(self.num_quantiles, x.device)
        phi = torch.relu(self.embedding(cosine_embedding_features(taus, self.num_cosines)))  # [(B,) N, D]
        z = self.head(x.unsqueeze(-2) * phi, key)  # [B, N, A]
        if actions is None:
            return z.transpose(-1, -2)
        chosen = actions.unsqueeze(-1) == torch.arange(self.num_actions, device=x.device)  # [B, A]
        return (z * chosen.unsqueeze(-2)).sum(-1)  # the gradient of a sum needs no scatter


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
        self, torso: nn.Module, features: int, num_actions: int, *, num_quantiles: int = 32, **options: Any
    ) -> None:
        super().__init__()
        self.num_actions, self.num_quantiles = num_actions, num_quantiles
        self.q = ImplicitQuantileNetwork(torso, features, num_actions, num_quantiles=num_quantiles, **options)
        self.fraction = FractionProposal(features, num_quantiles)

    def forward(self, obs: Tensor, key: Tensor | None = None) -> FQFOutput:
        x = self.q.encode(obs, key)
        taus, tau_hats, _ = self.fraction(x.detach())
        return FQFOutput(self.q(None, tau_hats, key, features=x), taus, tau_hats)


class EnsembleQNetwork(nn.Module):
    """E Q-networks: [B, ...] -> [E, B, A]. Each has its own encoder of images, as in CleanRL; the other layers are
    batched products. Plain images have no hidden layers after the encoder."""

    def __init__(
        self, spec: EnvSpec, members: int, hidden_sizes: Sequence[int], activation: str = "relu",
        layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        encoders, sizes = zip(*(observation_encoder(spec) for _ in range(members)))
        self.encoders = nn.ModuleList(() if isinstance(encoders[0], nn.Identity) else encoders)
        size, layers = sizes[0], []
        for width in () if isinstance(encoders[0], ConvolutionalNetwork) else hidden_sizes:
            norm = [EnsembleNorm(members, width)] if layer_norm else []
            layers += [EnsembleLinear(members, size, width), *norm, ACTIVATIONS[activation]()]
            size = width
        self.layers = nn.Sequential(*layers, EnsembleLinear(members, size, spec.action.n))

    def forward(self, obs: Any) -> Tensor:
        x = torch.stack([encoder(obs) for encoder in self.encoders]) if len(self.encoders) else obs
        q: Tensor = self.layers(x)
        return q


class BootstrappedQNetwork(nn.Module):
    """Values of every action from `num_heads` heads on one torso: [B, K, A].

    Each head has a hidden layer of its own, unless its width is 0; with `dueling` it has two streams. With a `prior`, a
    network that returns [K, B, A] and is never trained, head k is f_k + prior_scale p_k (Osband et al. 2018, Eq. 8).
    """

    output_kind = "values of several heads"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, num_heads: int = 10, hidden: int = 0,
        activation: str = "relu", dueling: bool = False, layer_norm: bool = False, prior: nn.Module | None = None,
        prior_scale: float = 0.0,
    ) -> None:  # fmt: skip
        require_at_least(1, num_heads=num_heads)
        super().__init__()
        self.num_actions, self.num_heads, self.dueling, self.prior_scale = num_actions, num_heads, dueling, prior_scale

        def stream(outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            if hidden:
                norm = [EnsembleNorm(num_heads, hidden)] if layer_norm else []
                layers = [EnsembleLinear(num_heads, features, hidden), *norm, ACTIVATIONS[activation]()]
            return nn.Sequential(*layers, EnsembleLinear(num_heads, hidden or features, outputs))

        self.torso, self.advantage = torso, stream(num_actions)
        self.value = stream(1) if dueling else None
        self.prior = prior

    def forward(self, obs: Any) -> Tensor:
        x = self.torso(obs)
        q: Tensor = self.advantage(x)  # [K, B, A]
        if self.value is not None:
            q = q - q.mean(-1, keepdim=True) + self.value(x)
        if self.prior is not None:
            q = q + self.prior_scale * self.prior(obs).detach()
        return q.transpose(0, 1)


class DiscreteSACModel(nn.Module):
    """A categorical actor, and an ensemble of critics that return the values of all actions."""

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (64, 64), *, num_critics: int = 2, activation: str = "relu",
        layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.actor = Actor(spec, spec.action.n, hidden_sizes, activation)  # logits [B, A]
        self.critic = EnsembleQNetwork(spec, num_critics, hidden_sizes, activation, layer_norm)


class MLPDiscreteSACModel(DiscreteSACModel):
    """`DiscreteSACModel` for vector observations of the given size."""

    def __init__(self, obs_dim: int, num_actions: int, hidden_sizes: Sequence[int] = (64, 64), **options: Any) -> None:
        super().__init__(discrete_spec(obs_dim, num_actions), hidden_sizes, **options)


class MLPTorsoMixin:
    """Builds a network on an MLP torso, for vector observations of the given size."""

    def __init__(
        self, obs_dim: int, num_actions: int, hidden_sizes: Sequence[int] = (64, 64), *, activation: str = "relu",
        noisy: bool = False, noisy_sigma: float = 0.5, layer_norm: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        spec, sigma = discrete_spec(obs_dim, num_actions), noisy_sigma if noisy else 0.0
        network, features, *last = body(spec, hidden_sizes, activation, sigma=sigma, layer_norm=layer_norm)
        options |= {
            "layer_norm": layer_norm,
            "hidden": last[0],
            "activation": last[1],
            "noisy": noisy,
            "noisy_sigma": noisy_sigma,
        }
        super().__init__(network, features, num_actions, **options)  # type: ignore[call-arg]
        self.spec = spec


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
