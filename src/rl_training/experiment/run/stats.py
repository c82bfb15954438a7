"""Statistics of scores over seeds, as Agarwal et al. (2021, arXiv:2108.13264) recommend: IQM, stratified bootstrap.

summary.json, `report`, `leaderboard`, `compare` and the docs all use this module.

Intervals: the usual percentile bootstrap is too narrow for the five or ten seeds of a study; with five seeds it covers
the mean in 84 % of cases instead of 95 %. rliable has no other method and SciPy's BCa is no better for so few seeds.
The resampling is therefore done here, and corrected with the quantiles of Student's t (Hesterberg 2015, The American
Statistician 69). For order statistics (IQM, median) the percentiles are taken at Phi(-t) and Phi(t) instead of
Phi(-1.96) and Phi(1.96), which keeps the interval within the scores. For means, and for fewer than five seeds, the
interval is estimate -/+ t x standard error. It is cut off at the bounds of the scores where these are known: a value
outside is impossible, so the coverage stays the same. docs/reports.md has the measured coverage.

Scores are arrays [..., n] with the seeds last; leading axes (points of a curve, studies) are handled at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Statistic = Callable[..., Any]
LEVEL = 0.95
FEW = 5  # with fewer seeds, plots show the seeds themselves: an interval would be wide and look like knowledge
Bounds = tuple[float, float]
UNBOUNDED: Bounds = (-np.inf, np.inf)
RESAMPLES = 5000
_BLOCK = 1 << 21  # resampled values in memory at once
_FEWEST = 4  # degrees of freedom: the range of four scores contains the median in only 87.5 % of cases, of five in 94 %


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


def optimality_gap(scores: ArrayLike, axis: int | None = None) -> Any:
    """How far normalised scores are below 1 on average; scores above 1 count as 1."""
    return np.maximum(1.0 - np.asarray(scores, dtype=np.float64), 0.0).mean(axis=axis)


STATISTICS: dict[str, Statistic] = {"mean": np.mean, "median": np.median, "iqm": iqm, "optimality_gap": optimality_gap}
_MEANS = (np.mean, optimality_gap)  # linear in the scores: Student's t is the better approximation


class _Bootstrap(NamedTuple):
    estimate: Array  # [...]
    draws: Array  # [..., resamples]
    variance: Array  # [...], of the estimate, without the small-sample bias of the draws
    freedom: Array  # [...], degrees of freedom of that variance
    widen: Array  # [...], factor by which the draws of an order statistic are too narrow


def interval(
    strata: Sequence[ArrayLike], statistic: Statistic = iqm, *, resamples: int = RESAMPLES, seed: int = 0,
    bounds: Bounds = UNBOUNDED,
) -> tuple[Any, Any]:  # fmt: skip
    """Low and high end [...] of the statistic over all scores. A stratum [..., n_i] has the scores of one task.

    Each stratum is resampled separately, so that every resample has the same tasks. The random numbers are seeded: the
    same scores always give the same interval. `bounds` are those of a score; scores that lie outside widen them.
    """
    low, high = _ends(_bootstrap(strata, statistic, resamples, seed), statistic in _MEANS)
    least, most = _bounds(strata, bounds)
    return np.clip(low, least, most)[()], np.clip(high, least, most)[()]


def _bounds(strata: Sequence[ArrayLike], bounds: Bounds) -> Bounds:
    """The bounds, widened to include all scores."""
    return min(bounds[0], *(float(np.min(x)) for x in strata)), max(bounds[1], *(float(np.max(x)) for x in strata))


def difference(
    strata_a: Sequence[ArrayLike], strata_b: Sequence[ArrayLike], statistic: Statistic = iqm, *,
    resamples: int = RESAMPLES, bounds: Bounds = UNBOUNDED,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """statistic(B) - statistic(A) of two independent sets of runs: estimate, low and high end [...]."""
    a = _bootstrap(strata_a, statistic, resamples, 0)
    b = _bootstrap(strata_b, statistic, resamples, 1)  # other draws, or the two spreads would cancel
    freedom = _satterthwaite([(a.variance, a.freedom), (b.variance, b.freedom)])
    variance = a.variance + b.variance
    shares = a.variance * a.widen**2 + b.variance * b.widen**2
    widen = np.sqrt(np.where(variance > 0, shares / np.where(variance > 0, variance, 1.0), 1.0))
    both = _Bootstrap(b.estimate - a.estimate, b.draws - a.draws, variance, freedom, widen)
    low, high = _ends(both, statistic in _MEANS)
    least, most = _bounds([*strata_a, *strata_b], bounds)
    return both.estimate, np.clip(low, least - most, most - least)[()], np.clip(high, least - most, most - least)[()]


def _bootstrap(strata: Sequence[ArrayLike], statistic: Statistic, resamples: int, seed: int) -> _Bootstrap:
    groups = [np.asarray(group, dtype=np.float64) for group in strata]
    sizes = [group.shape[-1] for group in groups]
    if not groups or 0 in sizes:
        raise ValueError("every task needs at least one score")
    if len(groups) > 1 and 1 in sizes:
        raise ValueError("an interval over several tasks needs at least two scores of each")
    estimate = np.asarray(statistic(np.concatenate(groups, axis=-1), axis=-1), dtype=np.float64)
    draws = _resample(groups, range(len(groups)), statistic, resamples, seed)
    if len(groups) == 1:
        n, ones = sizes[0], np.ones(estimate.shape)
        # Trimming few scores widens the draws of an IQM about as much as n / (n - 1) would: no correction is needed.
        return _Bootstrap(estimate, draws, draws.var(-1) * n / max(n - 1, 1), ones * max(n - 1, 1), ones)
    # The variance that each task contributes: its share of the correction n / (n - 1) and of the degrees of freedom.
    alone = [_resample(groups, [i], statistic, resamples // 5, seed).var(-1) for i in range(len(groups))]
    corrected = [v * n / (n - 1) for v, n in zip(alone, sizes)]
    total = np.maximum(sum(alone), np.finfo(float).tiny)
    bias = np.where(total > np.finfo(float).tiny, sum(corrected) / total, 1.0)
    freedom = _satterthwaite([(v, n - 1.0) for v, n in zip(corrected, sizes)])
    return _Bootstrap(estimate, draws, draws.var(-1) * bias, freedom, np.sqrt(bias))


def _resample(groups: list[Array], which: Sequence[int], statistic: Statistic, resamples: int, seed: int) -> Array:
    """The statistic of `resamples` resamples [..., resamples]; strata that are not in `which` are not resampled."""
    rng = np.random.default_rng(seed)
    values = sum(group.size for group in groups)
    estimates = []
    for rows in _blocks(resamples, max(1, _BLOCK // values)):
        parts = []
        for i, group in enumerate(groups):
            n = group.shape[-1]
            chosen = rng.integers(0, n, (rows, n)) if i in which else np.broadcast_to(np.arange(n), (rows, n))
            parts.append(group[..., chosen])  # [..., rows, n]
        estimates.append(np.asarray(statistic(np.concatenate(parts, axis=-1), axis=-1)))
    return np.concatenate(estimates, axis=-1)


def _blocks(total: int, size: int) -> Iterator[int]:
    while total > 0:
        yield min(total, size)
        total -= size


def _satterthwaite(parts: Sequence[tuple[Any, Any]]) -> Array:
    """Degrees of freedom of a sum of independent variances (Welch-Satterthwaite)."""
    total = sum(variance for variance, _ in parts)
    spread = sum(variance**2 / freedom for variance, freedom in parts)
    fewest = np.min([np.min(freedom) for _, freedom in parts])
    return np.asarray(np.where(spread > 0, total**2 / np.where(spread > 0, spread, 1.0), fewest))


def _ends(boot: _Bootstrap, linear: bool) -> tuple[Any, Any]:
    from scipy.special import ndtr, stdtrit

    t = stdtrit(boot.freedom, (1 + LEVEL) / 2)
    reach = t * np.sqrt(boot.variance)
    low, high = boot.estimate - reach, boot.estimate + reach
    if not linear:
        tail = ndtr(-t * boot.widen)
        ordered = np.sort(boot.draws, axis=-1)
        enough = boot.freedom >= _FEWEST
        low = np.where(enough, _quantile(ordered, tail), low)
        high = np.where(enough, _quantile(ordered, 1 - tail), high)
    return low[()], high[()]


def _quantile(ordered: Array, p: Array) -> Array:
    """NumPy's linear quantile, with a probability for each row."""
    position = p * (ordered.shape[-1] - 1)
    below = np.floor(position).astype(np.intp)
    above = np.minimum(below + 1, ordered.shape[-1] - 1)
    low = np.take_along_axis(ordered, below[..., None], -1)[..., 0]
    high = np.take_along_axis(ordered, above[..., None], -1)[..., 0]
    return np.asarray(low + (position - below) * (high - low), dtype=np.float64)


# --- fractions: probability of improvement, performance profiles ------------------------------------------------------


def improvement(strata_a: Sequence[ArrayLike], strata_b: Sequence[ArrayLike]) -> tuple[Any, Any, Any]:
    """P(a run of B beats a run of A), ties counting half, as the mean over tasks: estimate, low and high end [...].

    The interval is Newcombe's (2006, Statistics in Medicine 25, method 5): all probabilities that are compatible with
    the estimate. A bootstrap interval would have no width when every run of B beats every run of A.
    """
    if len(strata_a) != len(strata_b):
        raise ValueError("A and B must have the same tasks")
    parts = []
    for scores_a, scores_b in zip(strata_a, strata_b):
        a, b = np.asarray(scores_a, dtype=np.float64), np.asarray(scores_b, dtype=np.float64)
        above = np.sign(b[..., :, None] - a[..., None, :])  # [..., n_b, n_a]
        parts.append((np.asarray((1 + above.mean((-1, -2))) / 2), a.shape[-1], b.shape[-1]))
    return _average([_solve(p, partial(_newcombe_variance, m=m, n=n)) for p, m, n in parts])


def profile(strata: Sequence[ArrayLike], thresholds: ArrayLike) -> tuple[Any, Any, Any]:
    """Performance profile: the fraction of runs that reach each threshold [T], as the mean over tasks: estimate, low
    and high end. The interval at each threshold is Wilson's, which also works for fractions of 0 and 1."""
    parts = []
    for scores in strata:
        values = np.asarray(scores, dtype=np.float64)
        n = values.shape[-1]
        fraction = (values[..., None, :] >= np.asarray(thresholds, dtype=np.float64)[:, None]).mean(-1)  # [..., T]
        parts.append(_solve(fraction, partial(_binomial_variance, n=n)))
    return _average(parts)


def _binomial_variance(theta: Array, n: int) -> Array:
    return theta * (1 - theta) / n


def _newcombe_variance(theta: Array, m: int, n: int) -> Array:
    half = (m + n) / 2 - 1
    return theta * (1 - theta) * (1 + half * (1 - theta) / (2 - theta) + half * theta / (1 + theta)) / (m * n)


def _solve(estimate: Array, variance: Callable[[Array], Array]) -> tuple[Array, Array, Array]:
    """The estimate and the range of values v with |v - estimate| <= z sqrt(variance(v)), by bisection."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    ends = []
    for far in (0.0, 1.0):
        inside, outside = np.array(estimate, dtype=np.float64), np.full_like(estimate, far)
        for _ in range(50):
            middle = (inside + outside) / 2
            fits = np.abs(middle - estimate) <= z * np.sqrt(np.maximum(variance(middle), 0.0))
            inside, outside = np.where(fits, middle, inside), np.where(fits, outside, middle)
        ends.append(inside)
    return estimate, ends[0], ends[1]


def _average(parts: Sequence[tuple[Array, Array, Array]]) -> tuple[Any, Any, Any]:
    """Mean of independent estimates, their intervals combined as in Zou and Donner (2008)."""
    estimates, lows, highs = (np.stack(values) for values in zip(*parts))
    mean, k = estimates.mean(0), len(parts)
    low = mean - np.sqrt(((estimates - lows) ** 2).sum(0)) / k
    high = mean + np.sqrt(((highs - estimates) ** 2).sum(0)) / k
    return mean[()], low[()], high[()]


# --- evaluations ------------------------------------------------------------------------------------------------------


def summarise(per_seed_scores: Sequence[Sequence[float]], bounds: Bounds = UNBOUNDED) -> dict[str, Any]:
    """`mean`, `iqm` and `ci95`, the interval of the IQM.

    With several seeds, IQM and interval are taken over the mean scores of the seeds, because the episodes of one agent
    say nothing about another agent. With one seed they are taken over its episodes and describe only that agent.
    """
    if not per_seed_scores or any(len(scores) == 0 for scores in per_seed_scores):
        raise ValueError("every seed needs at least one score")
    means = [float(np.mean(scores)) for scores in per_seed_scores]
    units = means if len(means) > 1 else list(per_seed_scores[0])
    low, high = interval([units], bounds=bounds)
    return {"mean": float(np.mean(means)), "iqm": float(iqm(units)), "ci95": [float(low), float(high)]}


def eval_summary(
    seeds: Sequence[int], returns: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]],
    successes: Sequence[Sequence[float | None]] = (), bounds: Bounds = UNBOUNDED,
) -> dict[str, Any]:  # fmt: skip
    """An evaluation as in summary.json; `returns[i]` and `lengths[i]` are those of the episodes of `seeds[i]`.

    `success_rate` is included if the environment reports for every episode whether it succeeded.
    """
    if not len(seeds) == len(returns) == len(lengths):
        raise ValueError("seeds, returns and lengths must have one entry for each seed")
    scores = summarise(returns, bounds)
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
