"""The results page: for each suite a table of its studies beside the published scores, and a learning curve of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.experiment.run.atomic import read_json_object
from rl_training.experiment.run.stats import interval, iqm
from rl_training.experiment.studies.bench import stale
from rl_training.experiment.studies.suite import Study, Suite, load_suite
from rl_training.reports import svg, text

WIDTH = 310  # of a learning curve on the page: three or four beside each other, one on a phone
ENOUGH = 5  # seeds from which on a band is drawn; the points of fewer say more
_HEAD = ("algorithm", "environment", "mean", "IQM [95 % interval]", "best", "published", "reached", "steps", "seeds",
         "steps/s", "hours", "source")  # fmt: skip
PUBLISHED = ("classic", "mujoco-1m", "dmc-500k", "atari-100k", "atari-10m-frames", "offline-mujoco")
Row = Mapping[str, Any]


def suites() -> list[Suite]:
    """The packaged suites that are compared with published scores, in the order of the page."""
    return [load_suite(name) for name in PUBLISHED]


def measured(suite: Suite, results: Path) -> dict[str, Row]:
    """The results of a suite by the name of the study, in the suite's order. Old settings are marked `stale`."""
    found: dict[str, Row] = {}
    for study in suite.studies:
        row = read_json_object(results / suite.name / f"{study.name}.json")
        if row:
            found[study.name] = {**row, "stale": stale(row, study.config())}
    return found


def overview(results: Path) -> list[list[str]]:
    """One row for each suite: how many of its studies are run, and how many reach their bar."""
    rows = []
    for suite in suites():
        found = measured(suite, results)
        verdicts = [study.passes(found[study.name]["score"], found[study.name]["completed"])
                    for study in suite.studies if study.name in found]  # fmt: skip
        count = [len(suite.studies), len(found), verdicts.count(True), verdicts.count(False), verdicts.count(None)]
        rows.append([f"[{suite.name}](#{suite.name})", suite.title, *map(str, count)])
    return rows


def section(suite: Suite, results: Path, pictures: str) -> str:
    """The part of the page about a suite. `pictures` is the directory of its curves, as linked from the page."""
    found = measured(suite, results)
    parts = [f"## {suite.name}", f"{suite.title}. {suite.about}".strip()]
    parts.append(f"```bash\nrl-training bench {suite.name}\n```")
    run = [study for study in suite.studies if study.name in found]
    if run:
        parts.append(text.table([_HEAD, ["---"] * len(_HEAD), *(_cells(study, found[study.name]) for study in run)]))
        parts.append(_versions(list(found.values())))
        if missed := [s for s in run if s.passes(found[s.name]["score"], found[s.name]["completed"]) is False]:
            parts.append(
                "Missed, or not complete:\n\n" + "\n".join(_miss(study, found[study.name]) for study in missed)
            )
        drawn = [study for study in run if _drawable(found[study.name])]
        parts.append("\n".join(f"![{_title(study)}]({pictures}/{picture_name(suite, study)})" for study in drawn))
    if missing := [study for study in suite.studies if study.name not in found]:
        parts.append(f"Not run ({len(missing)}; in brackets the published score):\n\n" + "\n".join(_not_run(missing)))
    return "\n\n".join(filter(None, parts))


def pictures(results: Path) -> Iterator[tuple[str, str]]:
    """File name and content of each learning curve."""
    for suite in suites():
        found = measured(suite, results)
        for study in suite.studies:
            if study.name in found and _drawable(found[study.name]):
                yield picture_name(suite, study), picture(study, found[study.name])


def picture_name(suite: Suite, study: Study) -> str:
    return f"{suite.name}__{study.name}.svg"


def picture(study: Study, row: Row) -> str:
    """The learning curve of a study: the mean over its seeds, with a band or the points of every seed, and the
    published score as a line."""
    curve = row["curve"]
    steps = curve["step"]
    seeds = np.array([list(map(study.score_of, one)) for one in curve["per_seed"].values()], dtype=float)  # [n, T]
    whole = seeds.ndim == 2 and seeds.shape[1] == len(steps)
    mean = list(map(study.score_of, curve["mean_return"]))
    band = None
    if whole and len(seeds) >= ENOUGH:
        band = [ends.tolist() for ends in interval([seeds.T], np.mean, resamples=2000)]
    values = [*mean, *(seeds.ravel() if whole else ()), *(value for ends in band or () for value in ends)]
    if study.bar is not None:
        values.append(study.bar.mean)
    label = "mean return" if study.score == "return" else "normalised score"
    plot = svg.Plot((0, row["total_timesteps"]), svg.padded(values), "steps", label, _title(study))
    if study.bar is not None:
        plot.level(study.bar.mean, f"published {study.bar.mean:,.6g}")
    if whole and band is None:
        plot.dots(0, steps, seeds.tolist())
    plot.curve(0, steps, mean, band)
    return svg.figure(_title(study), [(_title(study), plot)], [], shown=WIDTH)


def _drawable(row: Row) -> bool:
    return len(row["curve"]["step"]) > 1


def _title(study: Study) -> str:
    return f"{study.algo} on {study.env_id}" + (f", {study.variant}" if study.variant else "")


def _cells(study: Study, row: Row) -> list[str]:
    scores = [study.score_of(seed["mean_return"]) for seed in row["final_eval"]["per_seed"]]
    low, high = interval([scores]) if len(scores) > 1 else (scores[0], scores[0])
    verdict = {True: "yes", False: "**no**", None: "-"}[study.passes(row["score"], row["completed"])]
    steps = f"{row['env_steps']:,}" + ("" if row["completed"] else f" of {row['total_timesteps']:,}")
    return [
        f"`{study.algo}`",
        study.env_id + (f" ({study.variant})" if study.variant else "") + (" (older settings)" if row["stale"] else ""),
        _number(float(np.mean(scores))),
        f"{_number(float(iqm(scores)))} [{_number(low)}, {_number(high)}]",
        _number(_best(study, row)),
        _published(study),
        verdict,
        steps,
        str(len(scores)),
        f"{row['steps_per_second']:,.0f}",
        f"{row['wall_time_s'] / 3600:.2f}",
        study.bar.source if study.bar is not None else "-",
    ]


def _best(study: Study, row: Row) -> float:
    """The mean over seeds of each one's best evaluation, the statistic of some published tables."""
    return float(np.mean([max(map(study.score_of, seed)) for seed in row["curve"]["per_seed"].values()]))


def _published(study: Study) -> str:
    if study.bar is None:
        return "-"
    return _number(study.bar.mean) + (f" ± {_number(study.bar.std)}" if study.bar.std else "")


def _miss(study: Study, row: Row) -> str:
    assert study.bar is not None
    reason = study.reason or "The reason has not been found yet."
    if not row["completed"]:
        reason = f"Cut at {row['env_steps']:,} of {row['total_timesteps']:,} steps."
    return f"- {_title(study)}: {_number(row['score'])} instead of {_number(study.bar.threshold)}. {reason}"


def _not_run(studies: Sequence[Study]) -> list[str]:
    by_algo: dict[str, list[str]] = {}
    for study in studies:
        name = study.env_id + (f" {study.variant}" if study.variant else "")
        by_algo.setdefault(study.algo, []).append(name + (f" ({_number(study.bar.mean)})" if study.bar else ""))
    return [f"- `{algo}`: {', '.join(names)}" for algo, names in by_algo.items()]


def _versions(rows: Sequence[Row]) -> str:
    libraries = ("python", "rl_training", "torch", "gymnasium")
    found = {", ".join(f"{name} {row['versions'][name]}" for name in libraries) for row in rows}
    where = {row.get("gpu") or f"{row['device']}" for row in rows}
    return f"Measured with {'; '.join(sorted(found))}, on {', '.join(sorted(where))}."


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}"
