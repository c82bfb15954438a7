"""Scores over seeds, reported as Agarwal et al. (2021, arXiv:2108.13264) advise: IQM with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
_BLOCK = 1 << 21  # resampled values in memory at once


def iqm(scores: ArrayLike, axis: int | None = None) -> Any:
    """Interquartile mean: the mean without the lowest and highest floor(n / 4) scores (SciPy: `trim_mean(x, 0.25)`)."""
    values = np.asarray(scores, dtype=np.float64)
    if axis is None:
        values, axis = values.reshape(-1), 0
    n = values.shape[axis]
    if n == 0:
        raise ValueError("the IQM of no scores is undefined")
    values = np.sort(values, axis=axis)
    return values.take(np.arange(n // 4, n - n // 4), axis=axis).mean(axis=axis)


def bootstrap_interval(
    strata: Sequence[ArrayLike],
    statistic: Callable[..., Any] = iqm,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Stratified percentile bootstrap of `statistic` over all scores.

    A stratum is the scores of one task; each is resampled on its own, so that every resample has the same tasks.
    The generator is seeded: the same scores always give the same interval.
    """
    groups = [np.asarray(group, dtype=np.float64).reshape(-1) for group in strata]
    total = sum(map(len, groups))
    if total == 0:
        raise ValueError("a bootstrap needs at least one score")
    rng = np.random.default_rng(seed)
    estimates: list[Array] = []
    left = resamples
    while left:
        rows = min(left, max(1, _BLOCK // total))
        samples = [group[rng.integers(0, len(group), (rows, len(group)))] for group in groups if len(group)]
        estimates.append(np.asarray(statistic(np.concatenate(samples, axis=1), axis=1)))  # [rows]
        left -= rows
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(estimates), [tail, 1 - tail])
    return float(low), float(high)


def summarise(per_seed_scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    """`mean`, `iqm` and `ci95`, the interval of the IQM.

    The unit is the seed: with several seeds, IQM and bootstrap are over the seeds' mean scores, because episodes of one
    agent say nothing about the next agent. With one seed they are over its episodes: luck within that agent only.
    """
    if not per_seed_scores or any(len(scores) == 0 for scores in per_seed_scores):
        raise ValueError("every seed needs at least one score")
    means = [float(np.mean(scores)) for scores in per_seed_scores]
    units = means if len(means) > 1 else list(per_seed_scores[0])
    return {"mean": float(np.mean(means)), "iqm": float(iqm(units)), "ci95": list(bootstrap_interval([units]))}


def eval_summary(
    seeds: Sequence[int], returns: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]],
    successes: Sequence[Sequence[float | None]] = (),
) -> dict[str, Any]:  # fmt: skip
    """An evaluation as summary.json shows it; `returns[i]` and `lengths[i]` are the episodes of `seeds[i]`.

    `success_rate` is there when the environment says of every episode whether it succeeded.
    """
    if not len(seeds) == len(returns) == len(lengths):
        raise ValueError("seeds, returns and lengths must have one entry a seed")
    scores = summarise(returns)
    summary: dict[str, Any] = {
        "mean_return": scores["mean"],
        "iqm": scores["iqm"],
        "ci95": scores["ci95"],
        "episodes": sum(map(len, returns)),
        "per_seed": [
            {
                "seed": int(seed),
                "mean_return": float(np.mean(episode_returns)),
                "std_return": float(np.std(episode_returns)),
                "mean_length": float(np.mean(episode_lengths)),
            }
            for seed, episode_returns, episode_lengths in zip(seeds, returns, lengths)
        ],
    }
    known = [[float(s) for s in episodes if s is not None] for episodes in successes]
    if known and all(len(a) == len(b) for a, b in zip(known, returns)):
        rates = [float(np.mean(episodes)) for episodes in known]
        summary["success_rate"] = float(np.mean(rates))
        for row, rate in zip(summary["per_seed"], rates):
            row["success_rate"] = rate
    return summary
