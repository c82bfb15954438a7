"""Each method beside the one that it should beat: a table of verification.md, from results/ and measured costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl_training import registry

Results = Mapping[tuple[str, str, str], Mapping[str, Any]]  # (algorithm, environment, variant) -> result

HEAD = ["algorithm", "base", "environment", "steps", "mean return [95 %]", "base [95 %]", "higher", "cost of an update"]


class Pair(NamedTuple):
    algo: str
    base: str
    env_id: str
    variant: str = ""  # of the base's result


DEEP_SEA, DOUBLE_PENDULUM = "rl_training/DeepSea-v0", "InvertedDoublePendulum-v5"
PAIRS = (
    Pair("simba", "sac", "Pendulum-v1"), Pair("bro", "sac", "Pendulum-v1"),
    Pair("td_mpc2", "sac", "Pendulum-v1", "curve"),
    Pair("bbf", "rainbow_dqn", "CartPole-v1"), Pair("acer", "a2c", "CartPole-v1"), Pair("acer", "a2c", "Acrobot-v1"),
    Pair("acktr", "a2c", "Acrobot-v1"), Pair("fql", "td3_bc", "Pendulum-v1"),
    Pair("fql", "td3_bc", "HalfCheetah-v5", "medium-replay"), Pair("fql", "rebrac", "HalfCheetah-v5", "medium-replay"),
    Pair("dac", "gail", DOUBLE_PENDULUM), Pair("discrete_sqil", "gail", "CartPole-v1"),
    Pair("discrete_iq_learn", "gail", "CartPole-v1"), Pair("bootstrapped_dqn", "dqn", DEEP_SEA),
    Pair("rnd_dqn", "dqn", DEEP_SEA, "small"), Pair("icm_dqn", "dqn", DEEP_SEA, "small"),
    Pair("rnd", "ppo", DEEP_SEA), Pair("icm", "ppo", DEEP_SEA),
)  # fmt: skip


def by_key(results: Mapping[str, list[dict[str, Any]]]) -> Results:
    return {(row["algo"], row["env_id"], row.get("variant", "")): row for rows in results.values() for row in rows}


def at(row: Mapping[str, Any], steps: int) -> tuple[int, float, float, float] | None:
    """(step, mean return, its 95 % interval) of the last evaluation not after `steps`; None if there is none."""
    curve = row["curve"]
    columns = (curve[name] for name in ("step", "mean_return", "ci95_low", "ci95_high"))
    return next((found for found in reversed([*zip(*columns)]) if found[0] <= steps), None)


def rows(results: Results, costs: Path) -> list[list[str]]:
    """One row for each pair of which both have been run."""
    ratios = {(row["algo"], row["base"]): row["ratio"] for row in json.loads(costs.read_text("utf-8"))["costs"]}
    out = []
    for pair in PAIRS:
        own_variant = pair.variant if registry.entry(pair.algo).loop == "offline" else ""  # a dataset
        own = results.get((pair.algo, pair.env_id, own_variant))
        base = results.get((pair.base, pair.env_id, pair.variant))
        if own is None or base is None or not own.get("completed", True):
            continue
        steps = own["env_steps"]
        score, interval = own["final_eval"]["mean_return"], own["final_eval"]["ci95"]
        found = at(base, steps)
        if found is None or found[0] < 0.8 * steps:  # too early to be compared
            continue
        reached, other, *beside = found
        note = f", at {reached:,}" if reached != steps else ""
        higher = "equal" if score == other else "yes" if score > other else "**no**"
        ratio = ratios.get((pair.algo, pair.base))
        where = pair.env_id + (f" ({pair.variant})" if own_variant else "")
        out.append([
            f"`{pair.algo}`", f"`{pair.base}`", where, f"{steps:,}", _range(score, interval),
            _range(other, beside) + note, higher, "-" if ratio is None else f"{ratio:.1f} x",
        ])  # fmt: skip
    return out


def _range(mean: float, interval: Sequence[float]) -> str:
    digits = 2 if max(abs(mean), *map(abs, interval)) < 10 else 1
    text, low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in (mean, *interval))  # no -0.00
    return f"{text} [{low}, {high}]"
