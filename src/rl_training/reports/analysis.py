"""The numbers of a report, as a plain dictionary from which JSON, tables and the HTML page are made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
import yaml

from rl_training.envs.score_bounds import score_bounds
from rl_training.errors import UserError, did_you_mean
from rl_training.experiment.run import stats
from rl_training.experiment.run.stats import Array
from rl_training.reports.runs import METRIC, Group, Series, group_runs, load_runs

_POINTS = 100  # of a curve whose seeds were not evaluated at the same steps
_THRESHOLDS = 121  # of a performance profile
Bounds = Mapping[str, tuple[float, float]]
_Warn = Callable[[str], None]


def known_bounds(extra: Iterable[str] = ()) -> dict[str, tuple[float, float]]:
    """The scores that are normalised to 0 and 1, by environment: the packaged table and the user's `ENV=LOW:HIGH`."""
    text = (resources.files("rl_training") / "assets" / "reference_scores.yaml").read_text(encoding="utf-8")
    table = {env: (float(row["random"]), float(row["reference"])) for env, row in yaml.safe_load(text).items()}
    for word in extra:
        env, _, limits = word.rpartition("=")
        try:
            low, high = map(float, limits.split(":"))
            if not env or not low < high or not np.isfinite([low, high]).all():
                raise ValueError
        except ValueError:
            raise UserError(
                f"--bounds '{word}' cannot be read; write ENV=LOW:HIGH, such as CartPole-v1=22:500"
            ) from None
        table[env] = (low, high)
    return table


def report(
    paths: Sequence[Any], metric: str = METRIC, *, at: int | None = None, normalize: bool = False,
    bounds: Bounds | None = None, partial: bool = False, mixed: bool = False, warn: _Warn = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """All results of the runs. Several environments need `normalize`, or `mixed` to keep them apart (leaderboard)."""
    groups = group_runs(load_runs(paths, partial=partial, warn=warn), metric, at=at, warn=warn)
    envs = sorted({group.env_id for group in groups})
    if len(envs) > 1 and not normalize and not mixed:
        raise UserError(
            f"the runs use {len(envs)} environments ({', '.join(envs)}), whose scores cannot be averaged:"
            " add --normalize, or use `rl-training leaderboard`, which keeps them apart"
        )
    table = bounds if bounds is not None else known_bounds()
    if normalize:
        _check_bounds(envs, table)
    return {
        "metric": metric,
        "at": at,
        "level": stats.LEVEL,
        "environments": [
            _environment(env, [g for g in groups if g.env_id == env], table.get(env), metric) for env in envs
        ],
        "overall": _overall(groups, envs, table, metric) if normalize and len(envs) > 1 else None,
    }


def compare(
    a: Any, b: Any, metric: str = METRIC, *, statistic: str = "iqm", tolerance: float = 0.0, at: int | None = None,
    normalize: bool = False, bounds: Bounds | None = None, partial: bool = False,
    warn: _Warn = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Compare B with A. B is worse if the whole interval of statistic(B) - statistic(A) is below -tolerance."""
    if statistic not in ("iqm", "mean", "median"):
        raise UserError(f"unknown statistic '{statistic}'; write iqm, mean or median")
    sides = [_side(label, path, metric, at, partial, warn) for label, path in (("A", a), ("B", b))]
    envs = sorted(sides[0])
    if envs != sorted(sides[1]):
        others = ", ".join(sorted(sides[1]))
        raise UserError(f"A and B must use the same environments; A uses {', '.join(envs)}, B uses {others}")
    if len(envs) > 1 and not normalize:
        raise UserError(f"the runs use {len(envs)} environments ({', '.join(envs)}): add --normalize to compare them")
    table = bounds if bounds is not None else known_bounds()
    if normalize:
        _check_bounds(envs, table)
    for label, side in zip("AB", sides):
        for env in envs:
            if len(side[env].seeds) < 2:
                raise UserError(f"{label} has only one seed on {env}; a comparison needs at least two on each side")
    strata = [
        [_scaled(side[env].scores, table[env]) if normalize else side[env].scores for env in envs] for side in sides
    ]
    function = stats.STATISTICS[statistic]
    limits = _limits(envs, metric, table if normalize else None)
    value, low, high = stats.difference(strata[0], strata[1], function, bounds=limits)
    verdict = "worse" if high < -tolerance else "better" if low > tolerance else "not significantly different"
    return {
        "metric": metric, "statistic": statistic, "normalized": normalize, "tolerance": tolerance, "at": at,
        "environments": envs,
        "a": _brief(sides[0], strata[0], function, limits), "b": _brief(sides[1], strata[1], function, limits),
        "difference": {"value": float(value), "ci95": [float(low), float(high)]},
        "improvement": _improvement(strata[0], strata[1]),
        "verdict": verdict,
    }  # fmt: skip


def _side(label: str, path: Any, metric: str, at: int | None, partial: bool, warn: _Warn) -> dict[str, Group]:
    groups = group_runs(load_runs([path], partial=partial, warn=warn), metric, at=at, warn=warn)
    side = {group.env_id: group for group in groups}
    if len(side) < len(groups) or len({group.algo for group in groups}) > 1:
        names = ", ".join(sorted({f"{group.name} on {group.env_id}" for group in groups}))
        raise UserError(f"{label} must have one algorithm with one set of settings; {path} has {names}")
    return side


def _brief(
    side: Mapping[str, Group], strata: Sequence[Array], function: stats.Statistic, limits: stats.Bounds
) -> dict[str, Any]:
    groups = list(side.values())
    return {
        "name": groups[0].name,
        "runs": [str(path) for group in groups for path in group.runs],
        "seeds": {group.env_id: group.seeds for group in groups},
        "steps": {group.env_id: group.steps for group in groups},
        "value": float(function(np.concatenate(strata), axis=-1)),
        "ci95": _interval(strata, function, limits),
    }


def _limits(envs: Sequence[str], metric: str, table: Bounds | None) -> stats.Bounds:
    """Bounds of the metric in all of these environments, where they are known; normalised if `table` is given."""
    if not metric.endswith(("mean_reward", "ep_rew_mean")):
        return stats.UNBOUNDED
    rows = [np.array(score_bounds(env)) for env in envs]
    if table is not None:
        rows = [_scaled(row, table[env]) for env, row in zip(envs, rows)]
    return min(float(low) for low, _ in rows), max(float(high) for _, high in rows)


def _check_bounds(envs: Sequence[str], table: Bounds) -> None:
    for env in envs:
        if env not in table:
            near = did_you_mean(env, table)
            raise UserError(f"there are no reference scores for {env}.{near} Set them with --bounds {env}=LOW:HIGH")


def _scaled(scores: Array, bounds: tuple[float, float]) -> Array:
    low, high = bounds
    return (scores - low) / (high - low)


# --- one environment --------------------------------------------------------------------------------------------------


def _environment(
    env_id: str, groups: Sequence[Group], bounds: tuple[float, float] | None, metric: str
) -> dict[str, Any]:
    limits = _limits([env_id], metric, None)
    rows = [_group(group, bounds, limits) for group in groups]
    rows.sort(key=lambda row: -row["iqm"]["value"])
    by_name = {group.name: [group.scores] for group in groups}
    everything = np.concatenate([group.scores for group in groups])
    thresholds = _thresholds(everything)
    for row in rows:
        row["profile"] = _profile(by_name[row["name"]], thresholds)
    return {
        "env_id": env_id,
        "bounds": None if bounds is None else {"random": bounds[0], "reference": bounds[1]},
        "groups": rows,
        "improvement": _pairs([row["name"] for row in rows], by_name),
        "thresholds": thresholds.tolist(),
    }


def _group(group: Group, bounds: tuple[float, float] | None, limits: stats.Bounds) -> dict[str, Any]:
    scores = group.scores
    return {
        "name": group.name,
        "algo": group.algo,
        "runs": [str(path) for path in group.runs],
        "steps": group.steps,
        "wall_time_s": round(group.seconds, 3),
        "scores": [{"seed": seed, "value": float(value)} for seed, value in zip(group.seeds, scores)],
        **_statistics([scores], None if bounds is None else [_scaled(scores, bounds)], limits),
        "curve": {"metric": group.curve_metric, **_curve(list(group.curves.values()), "steps", limits)},
        "clock": {"metric": group.curve_metric, **_curve(list(group.curves.values()), "seconds", limits)},
    }


def _statistics(strata: Sequence[Array], normalised: Sequence[Array] | None, limits: stats.Bounds) -> dict[str, Any]:
    """Each statistic with its interval; the optimality gap only for normalised scores."""
    out: dict[str, Any] = {}
    for name, function in stats.STATISTICS.items():
        values = normalised if name == "optimality_gap" else strata
        out[name] = None if values is None else {
            "value": float(function(np.concatenate(values), axis=-1)),
            "ci95": _interval(values, function, (0.0, np.inf) if name == "optimality_gap" else limits),
        }  # fmt: skip
    return out


def _interval(strata: Sequence[Array], function: stats.Statistic, limits: stats.Bounds) -> list[float] | None:
    """None for a single seed, which says nothing about other seeds."""
    if min(len(scores) for scores in strata) < 2:
        return None
    low, high = stats.interval(strata, function, bounds=limits)
    return [float(low), float(high)]


def _curve(series: Sequence[Series], axis: str, limits: stats.Bounds) -> dict[str, Any]:
    """IQM over the seeds with its interval, where all seeds have values; at the logged points if all seeds share them.
    Few seeds have no interval: they are shown themselves.

    On the time axis a seed that has ended keeps its last value, because seeds may take different times.
    """
    places = [getattr(one, axis) for one in series]
    first = max(place[0] for place in places)
    last = (min if axis == "steps" else max)(place[-1] for place in places)
    shared = all(len(p) == len(places[0]) and np.array_equal(p, places[0]) for p in places)
    grid = places[0] if shared and len(places[0]) <= 5 * _POINTS else np.linspace(first, max(first, last), _POINTS)
    values = np.stack([np.interp(grid, place, one.values) for place, one in zip(places, series)], axis=-1)  # [T, n]
    enough = len(series) >= stats.FEW
    low, high = stats.interval([values], resamples=1000, bounds=limits) if enough else (None, None)
    return {
        axis: grid.tolist(),
        "iqm": stats.iqm(values, axis=-1).tolist(),
        "low": None if low is None else low.tolist(),
        "high": None if high is None else high.tolist(),
        "per_seed": values.T.tolist(),
    }


def _thresholds(scores: Array) -> Array:
    low, high = float(scores.min()), float(scores.max())
    room = 0.04 * (high - low) or max(1.0, abs(high)) * 0.04
    return np.linspace(low - room, high + room, _THRESHOLDS)


def _profile(strata: Sequence[Array], thresholds: Array) -> dict[str, Any]:
    fraction, low, high = stats.profile(strata, thresholds)
    return {"fraction": fraction.tolist(), "low": low.tolist(), "high": high.tolist()}


def _improvement(strata_a: Sequence[Array], strata_b: Sequence[Array]) -> dict[str, Any]:
    """The probability that a run of B beats a run of A."""
    value, low, high = stats.improvement(strata_a, strata_b)
    return {"value": float(value), "ci95": [float(low), float(high)]}


def _pairs(names: Sequence[str], strata: Mapping[str, Sequence[Array]]) -> list[dict[str, Any]]:
    """P(first beats second), for all pairs."""
    return [
        {"first": first, "second": second, **_improvement(strata[second], strata[first])}
        for first, second in itertools.permutations(names, 2)
    ]


# --- all environments together ----------------------------------------------------------------------------------------


def _overall(groups: Sequence[Group], envs: Sequence[str], table: Bounds, metric: str) -> dict[str, Any]:
    """Normalised scores over all environments, for the groups that have runs on each of them."""
    limits = _limits(envs, metric, table)
    found: dict[str, dict[str, Array]] = {}
    for group in groups:
        found.setdefault(group.name, {})[group.env_id] = _scaled(group.scores, table[group.env_id])
    complete = {name: [by_env[env] for env in envs] for name, by_env in found.items() if len(by_env) == len(envs)}
    rows = [
        {"name": name, "seeds": [len(scores) for scores in strata], **_statistics(strata, strata, limits)}
        for name, strata in complete.items()
    ]
    rows.sort(key=lambda row: -row["iqm"]["value"])
    thresholds = _thresholds(np.concatenate([np.concatenate(strata) for strata in complete.values()] or [np.zeros(1)]))
    for row in rows:
        row["profile"] = _profile(complete[row["name"]], thresholds)
    return {
        "environments": list(envs),
        "groups": rows,
        "left_out": sorted(name for name in found if name not in complete),
        "improvement": _pairs([row["name"] for row in rows], complete),
        "thresholds": thresholds.tolist(),
    }
