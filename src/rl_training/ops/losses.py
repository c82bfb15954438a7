"""Per-sample losses, and the one reduction that every algorithm uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def weighted_mean(per_sample: Tensor, weights: Tensor) -> Tensor:
    """sum(w * x) / number of rows with w > 0.

    This serves both uses of `weights`. Importance weights scale the step without being renormalised (Schaul 2016,
    section 3.4). Rows with weight 0 neither contribute nor count. If all weights are 0, the result is 0.
    """
    if per_sample.shape != weights.shape:
        raise ValueError(f"the loss has shape {tuple(per_sample.shape)}, but weights has {tuple(weights.shape)}")
    return (weights * per_sample).sum() / (weights > 0).sum().clamp(min=1)


def weighted_means(per_sample: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """`weighted_mean` of several metrics at once; takes a third of the operations in eager mode."""
    rows = torch.stack(list(per_sample.values()))  # [K, B]
    means = (rows * weights).sum(-1) / torch.count_nonzero(weights).clamp(min=1)
    return dict(zip(per_sample, means.unbind(0)))


def weighted_normalise(x: Tensor, weights: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) over the rows with w > 0, for advantages. The scale of `weights` does not matter.

    The standard deviation is unbiased (n / (n - 1) over the n rows with w > 0), so equal weights give
    `(x - x.mean()) / (x.std() + eps)`. A single row becomes 0. Pass constants: there is no gradient if all x are equal.
    """
    total = weights.sum().clamp(min=1e-30)
    count = (weights > 0).sum()
    centred = x - (weights * x).sum() / total
    variance = (weights * centred.square()).sum() / total * (count / (count - 1).clamp(min=1))
    return centred / (variance.sqrt() + eps)


def mse(error: Tensor) -> Tensor:
    """error^2."""
    return error.square()


def huber(error: Tensor, delta: float = 1.0) -> Tensor:
    """error^2 / 2 within +-delta, delta * (|error| - delta / 2) outside (Huber 1964)."""
    size = error.abs()
    quadratic = size.clamp(max=delta)
    return quadratic * (size - 0.5 * quadratic)


def expectile_loss(diff: Tensor, expectile: float | Tensor) -> Tensor:
    """|expectile - 1(diff < 0)| * diff^2 with diff = target - prediction (IQL, Kostrikov 2022, Eq. 4)."""
    return (expectile - (diff < 0).to(diff.dtype)).abs() * diff.square()


def gaussian_nll(mean: Tensor, log_var: Tensor, target: Tensor) -> Tensor:
    """-log N(target; mean, exp(log_var)), elementwise."""
    return 0.5 * ((target - mean).square() * torch.exp(-log_var) + log_var + math.log(2.0 * math.pi))


def explained_variance(values: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns): 1 if the critic predicts the returns, 0 if it is no better than their
    mean, as Stable-Baselines3 logs it."""
    mean = weighted_mean(returns, weights)
    rest = returns - values
    left = weighted_mean((rest - weighted_mean(rest, weights)) ** 2, weights)
    return 1.0 - left / weighted_mean((returns - mean) ** 2, weights).clamp(min=1e-12)
