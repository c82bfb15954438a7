"""Running mean and variance as a tree of tensors: part of the policy's state, updated by pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

Moments = dict[str, Tensor]


def init_moments(shape: tuple[int, ...] = ()) -> Moments:
    return {"mean": torch.zeros(shape), "var": torch.ones(shape), "count": torch.tensor(1e-4)}


def update_moments(moments: Moments, x: Tensor, weights: Tensor) -> Moments:
    """Merge a batch [B, ...] with weights [B] (0 leaves a row out): Chan et al. 1982, parallel variance."""
    w = weights.view(-1, *([1] * (x.ndim - 1)))
    n = weights.sum()
    mean = (w * x).sum(0) / n.clamp(min=1e-8)
    var = (w * (x - mean) ** 2).sum(0) / n.clamp(min=1e-8)
    return merge_moments(moments, {"mean": mean, "var": var, "count": n})


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of both sets together; two empty ones stay empty."""
    count, n, delta = a["count"], b["count"], b["mean"] - a["mean"]
    total = (count + n).clamp(min=1e-8)
    spread = a["var"] * count + b["var"] * n + delta**2 * count * n / total
    return {"mean": a["mean"] + delta * n / total, "var": spread / total, "count": count + n}


def normalise(moments: Moments, x: Tensor, clip: float = 10.0) -> Tensor:
    return torch.clamp((x - moments["mean"]) * torch.rsqrt(moments["var"] + 1e-8), -clip, clip)
