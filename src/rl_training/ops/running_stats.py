"""Running mean and variance of observations, and percentiles of returns. They are trees of tensors in the policy's
state, updated by pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

Moments = dict[str, Tensor]


def init_moments(shape: tuple[int, ...] = ()) -> Moments:
    return {"mean": torch.zeros(shape), "var": torch.ones(shape), "count": torch.tensor(1e-4)}


def update_moments(moments: Moments, x: Tensor, weights: Tensor) -> Moments:
    """Merge in a batch [B, ...] with weights [B]; weight 0 skips a row (parallel variance, Chan et al. 1982)."""
    w = weights.view(-1, *([1] * (x.ndim - 1)))
    n = weights.sum()
    mean = (w * x).sum(0) / n.clamp(min=1e-8)
    var = (w * (x - mean) ** 2).sum(0) / n.clamp(min=1e-8)
    return merge_moments(moments, {"mean": mean, "var": var, "count": n})


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of both sets combined; two empty sets stay empty."""
    count, n, delta = a["count"], b["count"], b["mean"] - a["mean"]
    total = (count + n).clamp(min=1e-8)
    spread = a["var"] * count + b["var"] * n + delta**2 * count * n / total
    return {"mean": a["mean"] + delta * n / total, "var": spread / total, "count": count + n}


def normalise(moments: Moments, x: Tensor, clip: float = 10.0) -> Tensor:
    return torch.clamp((x - moments["mean"]) * torch.rsqrt(moments["var"] + 1e-8), -clip, clip)


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """The q-quantile of the entries of x where `mask` is true, interpolated as in NumPy; 0 if there are none."""
    ordered = torch.where(mask, x, torch.inf).flatten().sort().values
    last = (mask.sum() - 1).clamp(min=0)
    place = q * last.to(x.dtype)
    low = place.floor()
    ends = ordered.gather(0, torch.stack([low.long(), torch.minimum(low.long() + 1, last)]))
    ends = torch.where(mask.any(), ends, 0.0)
    return torch.lerp(ends[0], ends[1], place - low)


def init_percentiles() -> Moments:
    return {"low": torch.zeros(()), "high": torch.zeros(())}


def update_percentiles(
    moving: Moments, x: Tensor, mask: Tensor, rate: float = 0.01, low: float = 0.05, high: float = 0.95
) -> Moments:
    """Moving averages of two percentiles of x where `mask` is true (DreamerV3, Hafner 2023, Eq. 7)."""
    return {
        "low": torch.lerp(moving["low"], masked_quantile(x, mask, low), rate),
        "high": torch.lerp(moving["high"], masked_quantile(x, mask, high), rate),
    }


def percentile_scale(moving: Moments, least: float = 1.0) -> Tensor:
    """The divisor for advantages: the range between the percentiles, but at least `least`."""
    return (moving["high"] - moving["low"]).clamp(min=least)
