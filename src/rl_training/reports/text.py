"""A report as a table for the terminal and as Markdown."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rl_training.errors import printable

_HEAD = ["#", "algorithm", "IQM [95 % interval]", "mean", "median", "gap", "beats next", "seeds", "steps", "time"]

TERMS = {
    "IQM": "mean without the lowest and highest quarter of the scores",
    "Gap": "how far normalised scores are below the reference on average",
    "Beats next": "probability that a run of this row beats a run of the next row",
}


def number(value: float) -> str:
    """A score with a suitable number of digits: 7980, -139.0, 0.87."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def ranged(entry: Mapping[str, Any] | None, digits: Any = number) -> str:
    """`487.3 [471.0, 499.2]`"""
    if entry is None:
        return "-"
    ends = f" [{digits(entry['ci95'][0])}, {digits(entry['ci95'][1])}]" if entry["ci95"] else ""
    return f"{digits(entry['value'])}{ends}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def tables(data: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, rows) of every table; the first is for all environments together, if scores are normalised."""
    out = []
    overall = data["overall"]
    if overall is not None:
        head = [word for word in _HEAD if word not in ("steps", "time")]
        title = f"All {len(overall['environments'])} environments, normalised (random policy 0, reference 1)"
        out.append((title, head, _rows(overall, head)))
    for environment in data["environments"]:
        head = [word for word in _HEAD if word != "gap" or environment["bounds"] is not None]
        out.append((printable(environment["env_id"]), head, _rows(environment, head)))
    return out


def _rows(section: Mapping[str, Any], head: Sequence[str]) -> list[list[str]]:
    wins = {(pair["first"], pair["second"]): pair["value"] for pair in section["improvement"]}
    groups = section["groups"]
    rows = []
    for rank, (group, after) in enumerate(zip(groups, [*groups[1:], None]), start=1):
        seeds = group["seeds"] if "seeds" in group else [len(group["scores"])]
        cells = {
            "#": str(rank),
            "algorithm": printable(group["name"]),
            "seeds": str(seeds[0]) if len(set(seeds)) == 1 else f"{min(seeds)}-{max(seeds)}",
            "steps": f"{group.get('steps', 0):,}",
            "IQM [95 % interval]": ranged(group["iqm"]),
            "mean": number(group["mean"]["value"]),
            "median": number(group["median"]["value"]),
            "gap": f"{group['optimality_gap']['value']:.2f}" if group["optimality_gap"] else "-",
            "beats next": percent(wins[group["name"], after["name"]]) if after is not None else "-",
            "time": duration(group.get("wall_time_s", 0.0)),
        }
        rows.append([cells[word] for word in head])
    return rows


def notes(data: Mapping[str, Any]) -> list[str]:
    at = f" up to step {data['at']:,}" if data["at"] is not None else ""
    lines = [f"Score: the last '{printable(data['metric'])}' of each seed{at}; higher is better."]
    if any(len(group["scores"]) == 1 for env in data["environments"] for group in env["groups"]):
        lines.append("A single seed has no interval: it says nothing about other seeds.")
    if data["overall"] is not None and data["overall"]["left_out"]:
        lines.append(
            f"Left out, because not run on all environments: {printable(', '.join(data['overall']['left_out']))}."
        )
    return lines


def print_tables(data: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 140
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    for title, head, rows in tables(data):
        table = Table(title=title, title_justify="left", title_style="bold")
        for word in head:
            table.add_column(word, justify="left" if word == "algorithm" else "right", no_wrap=word != "algorithm")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in notes(data):
        console.print(note, style="dim")


def _escape(text: str) -> str:
    """Text as Markdown shows it: no HTML, no link, no end of a table cell."""
    return re.sub(r"([\\`*|]|\](?=[\[(:]))", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


def table(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the second line has the alignment of the columns."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(data: Mapping[str, Any], title: str) -> str:
    parts = [f"# {title}"]
    for name, head, rows in tables(data):
        lines = [head, ["---" if word == "algorithm" else "---:" for word in head], *rows]
        parts.append(f"## {_escape(name)}\n\n{table([list(map(_escape, line)) for line in lines])}")
    parts.append("\n".join(map(_escape, notes(data))))
    parts.append(" ".join(f"{term}: {meaning}." for term, meaning in TERMS.items()))
    return "\n\n".join(parts) + "\n"
