"""Action distributions: static objects with pure methods on the output `[..., size]` of a policy network.

A distribution holds only sizes and bounds, so it is a constant under `torch.compile` and works under `torch.vmap`.
Sampling uses the stateless generator: the same key gives the same action. Continuous samples are reparameterised:
gradients flow from the action and from its log-probability into the network's output.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.action_masks import forbid

if TYPE_CHECKING:
    from rl_training.spec import ActionSpec

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def _log_sigmoid(x: Tensor) -> Tensor:
    """Replaces `F.logsigmoid`, which torch 2.11 cannot compile under two levels of `vmap` on a GPU."""
    return -F.softplus(-x)


class Distribution(ABC):
    """Base class. `mask` applies to discrete distributions: a bool tensor shaped like `out`, False = forbidden.

    A forbidden choice has probability 0, adds 0 to entropy and KL, and gets no gradient. At least one choice must be
    allowed.
    """

    discrete: ClassVar[bool]

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of outputs that the network must produce."""

    @abstractmethod
    def sample(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """Draw an action."""

    def sample_and_log_prob(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw an action and its log-probability `[...]`."""
        action = self.sample(out, key, mask)
        return action, self.log_prob(out, action, mask)

    @abstractmethod
    def log_prob(self, out: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probability (density) of an action, `[...]`."""

    @abstractmethod
    def entropy(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy in nats, `[...]`."""

    @abstractmethod
    def mode(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        """The deterministic action."""

    @abstractmethod
    def kl(self, out_old: Tensor, out_new: Tensor, mask: Tensor | None = None) -> Tensor:
        """KL(old || new), `[...]`."""

    def _masked(self, out: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return out
        if not self.discrete:
            raise UserError(f"action masks need a discrete action space; {type(self).__name__} is continuous")
        return forbid(out, mask)


class _Choices(Distribution):
    """Choices with a logit for each alternative."""

    discrete: ClassVar[bool] = True

    @abstractmethod
    def log_probs(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probabilities of all alternatives, instead of their logits."""

    def sample(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        # Gumbel-max: argmax(logits + g) ~ softmax(logits). Masking after adding noise rules out forbidden actions.
        return self.mode(out + rng.gumbel(key, tuple(out.shape)), mask)

    def entropy(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        log_probs = self.log_probs(out, mask)
        return -(log_probs.exp() * log_probs).sum(-1)

    def kl(self, out_old: Tensor, out_new: Tensor, mask: Tensor | None = None) -> Tensor:
        log_old, log_new = self.log_probs(out_old, mask), self.log_probs(out_new, mask)
        return (log_old.exp() * (log_old - log_new)).sum(-1)


@dataclass(frozen=True)
class Categorical(_Choices):
    """One of n choices; out = logits `[..., n]`, action int64 `[...]`."""

    n: int

    @property
    def size(self) -> int:
        return self.n

    def log_probs(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._masked(out, mask).log_softmax(-1)

    def log_prob(self, out: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.log_probs(out, mask).gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def mode(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._masked(out, mask).argmax(-1)


@dataclass(frozen=True)
class MultiCategorical(_Choices):
    """k independent choices, the i-th among nvec[i]; out = all logits `[..., sum(nvec)]`, action int64 `[..., k]`."""

    nvec: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.nvec)

    def _parts(self, out: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        return torch.split(self._masked(out, mask), list(self.nvec), -1)

    def log_probs(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.cat([logits.log_softmax(-1) for logits in self._parts(out, mask)], -1)

    def log_prob(self, out: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = zip(self._parts(out, mask), action.long().chunk(len(self.nvec), -1))
        return torch.cat([logits.log_softmax(-1).gather(-1, chosen) for logits, chosen in parts], -1).sum(-1)

    def mode(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in self._parts(out, mask)], -1)


@dataclass(frozen=True)
class Bernoulli(Distribution):
    """n independent bits; out = logits of P(bit = 1) `[..., n]`, action int64 `[..., n]`. A masked bit is always 0."""

    n: int
    discrete: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.n

    def sample(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self._masked(out, mask)
        return (rng.uniform(key, tuple(out.shape)) < out.sigmoid()).long()

    def log_prob(self, out: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self._masked(out, mask)
        return _log_sigmoid(torch.where(action > 0, out, -out)).sum(-1)

    def entropy(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self._masked(out, mask)
        return -(out.sigmoid() * _log_sigmoid(out) + (-out).sigmoid() * _log_sigmoid(-out)).sum(-1)

    def mode(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        return (self._masked(out, mask) > 0).long()

    def kl(self, out_old: Tensor, out_new: Tensor, mask: Tensor | None = None) -> Tensor:
        old, new = self._masked(out_old, mask), self._masked(out_new, mask)
        ones = old.sigmoid() * (_log_sigmoid(old) - _log_sigmoid(new))
        zeros = (-old).sigmoid() * (_log_sigmoid(-old) - _log_sigmoid(-new))
        return (ones + zeros).sum(-1)


@dataclass(frozen=True)
class DiagGaussian(Distribution):
    """Independent normals; out = cat[mean, log_std] `[..., 2 * dim]`, action `[..., dim]`."""

    dim: int
    discrete: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return 2 * self.dim

    def split(self, out: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(mean, log_std), each `[..., dim]`."""
        mean, log_std = self._masked(out, mask).chunk(2, -1)
        return mean, log_std

    def sample(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        mean, log_std = self.split(out, mask)
        return mean + log_std.exp() * rng.normal(key, tuple(mean.shape))

    def sample_and_log_prob(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean, log_std = self.split(out, mask)
        noise = rng.normal(key, tuple(mean.shape))
        return mean + log_std.exp() * noise, self._log_density(noise, log_std)

    def log_prob(self, out: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        mean, log_std = self.split(out, mask)
        return self._log_density((action - mean) * (-log_std).exp(), log_std)

    def entropy(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        _, log_std = self.split(out, mask)
        return log_std.sum(-1) + self.dim * (0.5 + HALF_LOG_2PI)

    def mode(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.split(out, mask)[0]

    def kl(self, out_old: Tensor, out_new: Tensor, mask: Tensor | None = None) -> Tensor:
        mean_old, log_std_old = self.split(out_old, mask)
        mean_new, log_std_new = self.split(out_new, mask)
        log_ratio = log_std_old - log_std_new
        shift = (mean_old - mean_new) * (-log_std_new).exp()
        return (0.5 * ((2.0 * log_ratio).exp() + shift.square() - 1.0) - log_ratio).sum(-1)

    def _log_density(self, standardised: Tensor, log_std: Tensor) -> Tensor:
        return (-0.5 * standardised.square() - log_std).sum(-1) - self.dim * HALF_LOG_2PI


@dataclass(frozen=True)
class SquashedGaussian(DiagGaussian):
    """tanh of independent normals, in (-1, 1); out = cat[mean, log_std] `[..., 2 * dim]` (SAC, Haarnoja 2018, app. C).

    log_std is clamped. The KL divergence equals that of the normals because tanh is a bijection. `mode` is tanh(mean).
    """

    log_std_min: float = -5.0
    log_std_max: float = 2.0

    def split(self, out: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean, log_std = super().split(out, mask)
        return mean, log_std.clamp(self.log_std_min, self.log_std_max)

    def sample(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().sample(out, key, mask).tanh()

    def sample_and_log_prob(self, out: Tensor, key: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pre_tanh, log_prob = super().sample_and_log_prob(out, key, mask)
        return pre_tanh.tanh(), log_prob - _log_tanh_slope(pre_tanh).sum(-1)  # Haarnoja 2018, Eq. 21

    def log_prob(self, out: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        pre_tanh = action.clamp(-1.0 + 1e-6, 1.0 - 1e-6).atanh()  # float32 tanh rounds to 1 near 9
        return super().log_prob(out, pre_tanh, mask) - _log_tanh_slope(pre_tanh).sum(-1)

    def entropy(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        """Entropy of the normals + E log(1 - tanh^2), which has no closed form and is integrated numerically.

        49 trapezoids over +-6 standard deviations. The error per dimension is below 1e-5 nats for std up to 3, and
        1e-3 at std = exp(2).
        """
        mean, log_std = self.split(out, mask)
        node = torch.linspace(-6.0, 6.0, 49, device=out.device, dtype=out.dtype)
        weight = (-0.5 * node.square()).softmax(-1)
        pre_tanh = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * node  # [..., dim, 49]
        return super().entropy(out, mask) + (_log_tanh_slope(pre_tanh) @ weight).sum(-1)

    def mode(self, out: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().mode(out, mask).tanh()


@dataclass(frozen=True)
class BoundedGaussian(DiagGaussian):
    """Independent normals with mean tanh(x) and a bounded std, from the same outputs (DreamerV3, Hafner 2023).

    Samples may leave [-1, 1]; the environment adapter clips them. Entropy and log-probability are those of the normals.
    """

    std_min: float = 0.1
    std_max: float = 1.0

    def split(self, out: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean, raw = super().split(out, mask)
        std = self.std_min + (self.std_max - self.std_min) * torch.sigmoid(raw + 2.0)  # starts near std_max
        return mean.tanh(), std.log()


def _log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), finite for every x."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))


def for_action(spec: ActionSpec, squash: bool = False) -> Distribution:
    """The distribution for an action space; `squash` selects the tanh Gaussian for a bounded box."""
    if spec.kind == "discrete":
        return Categorical(spec.n)
    if spec.kind == "multi_discrete":
        return MultiCategorical(spec.nvec)
    if spec.kind == "multi_binary":
        return Bernoulli(spec.dim)
    if squash and not spec.bounded:
        raise UserError(f"a tanh policy needs a bounded action space; {spec} has no finite bounds")
    return SquashedGaussian(spec.dim) if squash else DiagGaussian(spec.dim)
