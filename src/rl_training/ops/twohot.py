"""Transforms of scalars for networks: symlog and two-hot bins (DreamerV3), and value rescaling (R2D2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def symlog(x: Tensor) -> Tensor:
    """sign(x) * log(|x| + 1) (DreamerV3, Hafner 2023, Eq. 9)."""
    # At 0, clamp passes the gradient and relu does not, so the slope is 1, as it should be; sign * abs would give 0.
    return torch.log1p(x.clamp(min=0.0)) - torch.log1p(F.relu(-x))


def symexp(x: Tensor) -> Tensor:
    """sign(x) * (exp(|x|) - 1), the inverse of `symlog` (DreamerV3, Hafner 2023, Eq. 9)."""
    return torch.expm1(x.clamp(min=0.0)) - torch.expm1(F.relu(-x))


def symexp_bins(n: int = 255, limit: float = 20.0, device: torch.device | str | None = None) -> Tensor:
    """symexp(-limit .. limit), `[n]`, exactly antisymmetric (DreamerV3, Hafner 2023, Eq. 10)."""
    grid = torch.linspace(-limit, limit, n, device=device)
    return symexp((grid - grid.flip(0)) * 0.5)


def twohot_encode(x: Tensor, bins: Tensor) -> Tensor:
    """Weights on the two bins around x, `[...]` -> `[..., N]` (DreamerV3, Hafner 2023, "twohot" under Eq. 10).

    `bins` `[N]` must be ascending, with any spacing. Values beyond the ends are clamped.
    """
    # passed: how far x is through each interval, 1 below x and 0 above. Its differences are the weights; they sum to 1.
    passed = ((x.unsqueeze(-1) - bins[:-1]) / bins.diff()).clamp(0.0, 1.0)  # [..., N - 1]
    return F.pad(passed, (1, 0), value=1.0) - F.pad(passed, (0, 1))  # [..., N]


def twohot_decode(probs: Tensor, bins: Tensor) -> Tensor:
    """sum_i p_i b_i, `[..., N]` -> `[...]`, adding mirrored bins first.

    Uniform probabilities over antisymmetric bins give exactly 0, so a zero-initialised head predicts 0. A plain sum
    over bins as large as symexp(20) would not.
    """
    products = probs * bins
    return (products + products.flip(-1)).sum(-1) * 0.5


def value_rescale(x: Tensor, eps: float = 1e-3) -> Tensor:
    """h(x) = sign(x) * (sqrt(|x| + 1) - 1) + eps * x (R2D2, Kapturowski 2019, section 2.3)."""
    # sqrt(|x| + 1) - 1 = |x| / (sqrt(|x| + 1) + 1): no cancellation, and the correct slope at 0
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + eps * x


def value_rescale_inverse(x: Tensor, eps: float = 1e-3) -> Tensor:
    """h^-1 of `value_rescale` (Pohlen 2018, Proposition A.2), in a form without cancellation in float32.

    With q = sqrt(|y| + 1), |x| = |h(y)| becomes eps * q^2 + q = |x| + 1 + eps, and y = sign(x) * (q^2 - 1).
    """
    constant = x.abs() + (1.0 + eps)
    q_plus_1 = 2.0 * constant / ((1.0 + 4.0 * eps * constant).sqrt() + 1.0) + 1.0
    # (q - 1) * (1 + eps * (q + 1)) = |x|, hence q^2 - 1 = |x| * (q + 1) / (1 + eps * (q + 1))
    return x * q_plus_1 / (1.0 + eps * q_plus_1)
