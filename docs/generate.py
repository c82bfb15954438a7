"""Write the generated parts of docs/ and the README, between `<!-- x:start -->` and `<!-- x:end -->`.

    python docs/generate.py          # write (also: make docs)
    python docs/generate.py --check  # exit 1 if a file is out of date

Sources: the registry (algorithms), results/*.json and the ledger (results), results/*.json and the costs measured by
benchmarks/costs.py (side by side), results/SUITE/*.json and the suites (results.md, curves/, learning_curves.svg, the
README), TrainConfig and each Hyper (configuration), sourcebook.yaml and the registry (sourcebook), docstrings and tests
(fidelity).
A test compares the files with this output, so every number in a table comes from a committed file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fidelity
import side_by_side

from rl_training import registry
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.stats import interval
from rl_training.experiment.studies.suite import load_suite
from rl_training.experiment.tools.verify import ledger, steps_to
from rl_training.registry import results
from rl_training.reports import suites, svg

ROOT = Path(__file__).resolve().parent.parent


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Every row becomes one line: a line break inside a cell would end the table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def algorithms() -> str:
    """One row per algorithm in the registry."""
    rows = []
    for entry in registry.entries().values():
        actions = "any" if len(entry.actions) == len(registry.ANY) else ", ".join(entry.actions)
        presets = ", ".join(f"`{preset}`" for preset in registry.presets(entry.name)) or "-"
        rows.append([f"`{entry.name}`", f"`{entry.class_name}`", entry.summary, actions, presets])
    return table(["name", "class", "what it is", "actions", "presets"], rows)


def overview(directory: Path | None = None) -> str:
    """One row per algorithm, with its ledger scores, their bars and whether they were reached."""
    found = results(directory or ROOT / "results")
    rows = []
    for entry in registry.entries().values():
        actions = "any" if len(entry.actions) == len(registry.ANY) else ", ".join(entry.actions)
        scores = [_short(row) for row in found.get(entry.name, []) if _leading(row)]
        rows.append([f"`{entry.name}`", entry.summary, actions, "<br>".join(scores) or "-"])
    return table(["name", "what it is", "actions", "measured (bar)"], rows)


def _leading(row: dict[str, Any]) -> bool:
    """True unless the row is a control that must fail or a comparison of settings. (Offline variants are datasets.)"""
    return not row.get("at_most") and row.get("variant", "").partition("-")[0] in ("", "medium")


def _short(row: dict[str, Any]) -> str:
    """For example `CartPole 498 (475)`, with a note for a missed bar or a run that was cut short."""
    task = " ".join([row["env_id"].split("/")[-1].rsplit("-v", 1)[0], row.get("variant", "")]).strip()
    score, bar = (f"{x:.0f}" if abs(x) >= 10 else f"{x:.3g}" for x in (row["score"], row["threshold"]))
    notes = [bar] + ["**missed**"] * (not row["passed"])
    if not row.get("completed", True):
        notes.append(f"cut at {row['env_steps']:,} of {row['total_timesteps']:,} steps")
    return f"{task} {score} ({', '.join(notes)})"


def measured(directory: Path | None = None) -> str:
    """One row per ledger entry, with its committed result; then the results without a ledger entry."""
    found = {
        (row["algo"], row["env_id"], row.get("variant", "")): row
        for rows in results(directory or ROOT / "results").values()
        for row in rows
    }
    lines = []
    for entry in ledger():
        row = found.pop((entry.algo, entry.env_id, entry.variant), None)
        lines.append(_result(row) if row else _not_run(entry))
    lines += [_result(row) for row in found.values()]
    head = [
        "algorithm",
        "environment",
        "steps",
        "seeds",
        "mean return",
        "IQM [95 % interval]",
        "bar",
        "reached",
        "source",
    ]
    return table(head, lines)


def _result(row: dict[str, Any]) -> list[str]:
    final = row["final_eval"]
    low, high = final["ci95"]
    scores = [seed["mean_return"] for seed in final.get("per_seed", ())]
    if len(scores) > 1:  # recomputed, because older files used another method
        low, high = interval([scores])
    of_return = row.get("statistic", "mean_return") == "mean_return"
    return [
        f"`{row['algo']}`",
        _where(row["env_id"], row.get("variant", "")),
        f"{row['env_steps']:,}",
        str(len(row["seeds"])),
        f"{final['mean_return']:.1f}" if of_return else f"{row['score']:.2f} ({row['statistic']})",
        f"{final['iqm']:.1f} [{low:.1f}, {high:.1f}]" if of_return else "-",
        _bar(row["threshold"], row.get("at_most", False), row.get("ceiling")),
        "yes" if row["passed"] else "**no**",
        row["source"],
    ]


def compared(directory: Path | None = None) -> str:
    """Methods beside those that they should beat, at the same number of steps."""
    found = side_by_side.by_key(results(directory or ROOT / "results"))
    return table(side_by_side.HEAD, side_by_side.rows(found, ROOT / "benchmarks" / "results" / "costs_cpu.json"))


MODEL_BASED = (  # ledger entries that docs/model_based.md compares: with and without a model
    ("mbpo", "Pendulum-v1", ""), ("pets", "Pendulum-v1", ""), ("sac", "Pendulum-v1", "curve"),
    ("sac", "Pendulum-v1", "many_updates"), ("mbpo", "Hopper-v5", ""), ("sac", "Hopper-v5", "early"),
    ("mopo", "Pendulum-v1", "small"), ("edac", "Pendulum-v1", "small"), ("bc", "Pendulum-v1", "small"),
    ("mopo", "Pendulum-v1", ""), ("edac", "Pendulum-v1", "sac"), ("combo", "Pendulum-v1", ""),
)  # fmt: skip


def model_based(directory: Path | None = None) -> str:
    """Scores with and without a model, and the steps at which two scores are first reached and kept from then on:
    -250, the bar of mbpo, and -157, the score of sac in rl-baselines3-zoo."""
    found = {
        (row["algo"], row["env_id"], row.get("variant", "")): row
        for rows in results(directory or ROOT / "results").values()
        for row in rows
    }
    lines = []
    for entry in ledger():
        key = (entry.algo, entry.env_id, entry.variant)
        if key not in MODEL_BASED:
            continue
        row, name = (
            found.get(key),
            f"`{entry.algo}`" + (f" ({entry.variant.replace('_', ' ')})" if entry.variant else ""),
        )
        offline = registry.entry(entry.algo).loop == "offline"
        trained = entry.total_timesteps if row is None else row["env_steps"]
        steps = f"{trained:,} " + ("updates on data" if offline else "steps")
        if row is not None and not row.get("completed", True):
            steps += f" of {row['total_timesteps']:,}"
        score, reached = "not run yet", ["-"] * 4
        if row is not None:
            score = f"{row['final_eval']['mean_return']:.1f}"
            if not offline and entry.env_id == "Pendulum-v1":
                curve = row["curve"]
                reached = [_step(steps_to(curve, bar, stay)) for bar in (-250.0, -157.0) for stay in (False, True)]
        lines.append((MODEL_BASED.index(key), [name, entry.env_id, f"`{entry.preset}`", steps, score, *reached]))
    bars = ["reaches -250 at", "stays from", "reaches -157 at", "stays from"]
    head = ["algorithm", "environment", "preset", "trained for", "mean return", *bars]
    return table(head, [line for _, line in sorted(lines)])


def _step(step: int | None) -> str:
    return "never" if step is None else f"{step:,}"


def _not_run(entry: Any) -> list[str]:
    steps = f"{entry.total_timesteps:,}"
    bar = _bar(entry.threshold, entry.at_most)
    if entry.above:
        bar = f"{entry.above} {entry.threshold:+g}"
    elif entry.like_data:
        bar = "like its data"
    elif entry.like_agent:
        bar = "like the agent of its data"
    elif entry.of_data:
        bar = f"{entry.threshold:g} x the return of its data"
    return [
        f"`{entry.algo}`",
        _where(entry.env_id, entry.variant),
        steps,
        "-",
        "not run yet",
        "-",
        bar,
        "-",
        entry.source,
    ]


def _where(env_id: str, variant: str) -> str:
    return f"{env_id} ({variant})" if variant else env_id


def _bar(threshold: float, at_most: bool, ceiling: float | None = None) -> str:
    if ceiling is not None:
        return f"{threshold:.0f} to {ceiling:.0f}"
    return f"at most {threshold:g}" if at_most else f"{threshold:g}"


def picture() -> str:
    """The MuJoCo suite: a panel for each task, with the mean of every algorithm and the points of its seeds."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in suites.measured(load_suite("mujoco-1m"), ROOT / "results").values():
        panels.setdefault(row["env_id"], []).append(row)
    algos = list(dict.fromkeys(row["algo"] for rows in panels.values() for row in rows))
    plots = [(env_id, _panel(env_id, rows, algos)) for env_id, rows in panels.items()]
    return svg.figure("MuJoCo, a million steps, three seeds", plots, algos)


def _panel(env_id: str, rows: Sequence[Mapping[str, Any]], algos: Sequence[str]) -> svg.Plot:
    curves = [(algos.index(row["algo"]), row["curve"]) for row in rows]
    values = [value for _, curve in curves for seed in curve["per_seed"].values() for value in seed]
    plot = svg.Plot(
        (0, max(curve["step"][-1] for _, curve in curves)), svg.padded(values), "steps", "mean return", env_id
    )
    for index, curve in curves:
        plot.dots(index, curve["step"], list(curve["per_seed"].values()))
        plot.curve(index, curve["step"], curve["mean_return"], None)
    return plot


def suite_table() -> str:
    head = ["suite", "what it is", "studies", "run", "reached", "missed or cut", "not judged"]
    return table(head, suites.overview(ROOT / "results"))


def suite_sections() -> str:
    return "\n\n".join(suites.section(suite, ROOT / "results", "curves") for suite in suites.suites())


def mujoco() -> str:
    """The complete studies of the MuJoCo suite: one row per algorithm, the published score in brackets."""
    suite = load_suite("mujoco-1m")
    done = {name: row for name, row in suites.measured(suite, ROOT / "results").items() if row["completed"]}
    cells: dict[str, dict[str, str]] = {}
    for study in suite.studies:
        if study.name in done and study.bar is not None and not study.variant:
            text = f"{done[study.name]['score']:,.0f} ({study.bar.mean:,.0f})"
            cells.setdefault(study.algo, {})[study.env_id] = text
    tasks = list(dict.fromkeys(task for row in cells.values() for task in row))
    rows = [[f"`{algo}`", *(row.get(task, "-") for task in tasks)] for algo, row in cells.items()]
    return table(["MuJoCo, a million steps, three seeds", *tasks], rows)


def train_fields() -> str:
    return table(["field", "default", "meaning"], _fields(TrainConfig))


KINDS = {"images": "Defaults on images", "continuous": "Defaults with Box actions and a vector as observation"}


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{k}: {json.dumps(v)}`" for k, v in values.items())


def hyper_fields() -> str:
    """Settings of each algorithm class. Variants share a class and are described by the defaults they change."""
    parts = []
    classes: dict[str, list[registry.Entry]] = {}
    for entry in registry.entries().values():
        classes.setdefault(entry.target, []).append(entry)
    for group in classes.values():
        entry = min(group, key=lambda e: len(e.defaults))  # the others change its defaults
        changes = [f"`{e.name}` is `{entry.name}` with {_settings(e.defaults)}" for e in group if e is not entry]
        changes += [f"{KINDS[k]}: {_settings(v)}" for k, v in entry.load().kind_defaults.items()]
        text = f"### {entry.name}\n\n" + ("; ".join(changes) + ".\n\n" if changes else "")
        parts.append(text + table(["field", "default", "meaning"], _fields(entry.load().Hyper)))
    return "\n\n".join(parts)


def _fields(model: type[BaseModel]) -> Iterable[list[str]]:
    for name, field in model.model_fields.items():
        if name in getattr(model, "unused", ()):
            continue
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            value = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
            default = f"`{json.dumps(value)}`" if value is not None else "-"
        yield [f"`{name}`", default, field.description or ""]


def sourcebook(names: Mapping[str, str] | None = None) -> str:
    """The tables by year. `names` maps registry names to summaries and decides what counts as implemented."""
    if names is None:
        names = {entry.name: entry.summary for entry in registry.entries().values()}
    book: dict[int, list[dict[str, Any]]] = yaml.safe_load((ROOT / "docs" / "sourcebook.yaml").read_text("utf-8"))
    keys = {"name", "by", "in", "idea", "algo", "deferred", "watchlist"}
    if strange := [row["name"] for rows in book.values() for row in rows if not keys >= row.keys()]:
        raise SystemExit(f"docs/sourcebook.yaml: unknown keys (a comma outside quotes?) in {', '.join(strange)}")
    listed = {name for rows in book.values() for row in rows for name in _names(row)}
    for name, summary in names.items():
        if name not in listed:  # not in the book: use its summary, "... (Author et al. 2020)"
            match = re.search(r"\(([^()]*?),? (\d{4})[a-z]?\)", summary)
            row = {"name": f"`{name}`", "by": match[1] if match else "-", "in": "-", "idea": summary, "algo": name}
            book.setdefault(int(match[2]) if match else max(book), []).append(row)
    parts = []
    for year in sorted(book):
        rows = [[row["name"], row["by"], _reference(row["in"]), row["idea"], _mark(row, names)] for row in book[year]]
        parts.append(f"## {year}\n\n" + table(["algorithm", "by", "in", "idea", "here"], rows))
    return "\n\n".join(parts)


def _names(row: Mapping[str, Any]) -> list[str]:
    names = row.get("algo", [])
    return [names] if isinstance(names, str) else list(names)


def _mark(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    here = [name for name in _names(row) if name in names]
    if here:
        return "**implemented**: " + ", ".join(f"`{name}`" for name in here)
    kind = next((kind for kind in ("deferred", "watchlist") if kind in row), None)
    if kind is None:
        return "in progress"
    return f"{kind}: {row[kind]}"


def _reference(text: str) -> str:
    """Turn arXiv numbers into links."""
    return re.sub(r"\b(\d{4}\.\d{4,5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def sources_and_deviations() -> str:
    """One row per module of algorithms. Test files that use it in passing only are left out."""
    lines = []
    for row in fidelity.rows():
        most = max(row.checks.values(), default=0)
        tests = ", ".join(f"`{name}`" for name, count in row.checks.items() if 3 * count >= most)
        lines.append([", ".join(f"`{name}`" for name in row.names), "; ".join(row.sources), row.deviations, tests])
    return table(["algorithm", "source", "deviations", "checked by"], lines)


BLOCKS = {
    "README.md": {"mujoco": mujoco},
    "docs/overview.md": {"algorithms": overview},
    "docs/configuration.md": {"fields": train_fields, "hyper": hyper_fields},
    "docs/verification.md": {"results": measured, "compared": compared},
    "docs/sourcebook.md": {"book": sourcebook},
    "docs/fidelity.md": {"fidelity": sources_and_deviations},
    "docs/model_based.md": {"compared": model_based},
    "docs/results.md": {"suites": suite_table, "studies": suite_sections},
}


PICTURES = {
    "docs/learning_curves.svg": picture,
    **{f"docs/curves/{name}": lambda text=text: text for name, text in suites.pictures(ROOT / "results")},
}


def generated(path: str) -> str:
    """The up-to-date text of the file."""
    if path in PICTURES:
        return PICTURES[path]()
    text = (ROOT / path).read_text(encoding="utf-8")
    for name, make in BLOCKS[path].items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise SystemExit(f"{path} must have exactly one '{start}' and one '{end}'")
        block = f"{start}\n\n{make()}\n\n{end}"
        text = re.sub(re.escape(start) + ".*?" + re.escape(end), lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""


def main(arguments: Sequence[str]) -> int:
    stale = [path for path in (*BLOCKS, *PICTURES) if _text(path) != generated(path)]
    for path in stale:
        if "--check" not in arguments:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(generated(path), encoding="utf-8")
        print(f"{path}: {'out of date' if '--check' in arguments else 'written'}")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
