"""`rl-training list`"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.output import print_json
from rl_training.errors import UserError, did_you_mean


def list_algorithms(
    family: Annotated[str | None, typer.Option("--family", metavar="NAME", help="List only this family.")] = None,
    as_json: o.Json = False,
) -> None:
    """List the algorithms by family, one line each: action spaces, presets, verified results that reach their bar.

    With --family, the presets and results are shown one by one.
    """
    from rl_training import registry

    table = registry.entries()
    families = sorted({entry.family for entry in table.values()})
    if family is not None and family not in families:
        raise UserError(f"unknown family '{family}'.{did_you_mean(family, families)} Families: {', '.join(families)}")
    keys = ("env_id", "score", "threshold", "at_most", "passed", "total_timesteps", "seeds")
    verified = registry.results()
    rows = [
        {
            "name": entry.name,
            "family": entry.family,
            "actions": list(entry.actions),
            "presets": registry.presets(entry.name),
            "verified": [{key: row.get(key) for key in keys} for row in verified.get(entry.name, [])],
            "summary": entry.summary,
        }
        for entry in table.values()
        if family in (None, entry.family)
    ]
    if as_json:
        print_json({"algorithms": rows})
        return
    print(_overview(rows) if family is None else _table(rows))
    print("\nTrain one with: rl-training train --config ALGORITHM/PRESET, or --algo ALGORITHM --env ID -n STEPS")


def _overview(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each algorithm, below the name of its family. Summaries are cut to the width of the terminal."""
    head = ("", "actions", "presets", "bars", "")
    by_family: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        results = row["verified"]
        reached = f"{sum(bool(result['passed']) for result in results)} of {len(results)}" if results else "-"
        cells = (f"  {row['name']}", _actions(row), str(len(row["presets"]) or "-"), reached, row["summary"])
        by_family.setdefault(row["family"], []).append(cells)
    lines = [head, *(cells for group in by_family.values() for cells in group)]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    widths.append(max(30, shutil.get_terminal_size((120, 24)).columns - sum(widths) - 8))

    def line(cells: Sequence[str]) -> str:
        summary = cells[-1] if len(cells[-1]) <= widths[-1] else cells[-1][: widths[-1] - 3] + "..."
        return "  ".join(f"{text:<{width}}" for text, width in zip((*cells[:-1], summary), widths)).rstrip()

    out = [line(head)]
    for name, group in by_family.items():
        out += [name, *map(line, group)]
    return "\n".join(out)


def _actions(row: Mapping[str, Any]) -> str:
    return "any" if len(row["actions"]) == 4 else ", ".join(row["actions"])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """An aligned table. The last two columns are wrapped to the width of the terminal."""
    head = ("name", "actions", "presets", "verified (mean return, bar)")
    cells = [
        (
            row["name"],
            _actions(row),
            ", ".join(preset.partition("/")[2] for preset in row["presets"]) or "-",
            ", ".join(map(_result, row["verified"])) or "-",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(4)]
    room = max(40, shutil.get_terminal_size((120, 24)).columns - sum(widths[:2]) - 6)
    widths[3] = min(widths[3], max(24, room * 2 // 3))
    widths[2] = min(widths[2], max(14, room - widths[3]))
    out = []
    for line in (head, *cells):
        columns = [textwrap.wrap(text, width) for text, width in zip(line, widths)]
        for i in range(max(map(len, columns))):
            parts = [column[i] if i < len(column) else "" for column in columns]
            out.append("  ".join(f"{part:<{width}}" for part, width in zip(parts, widths)).rstrip())
    out.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(out)


def _result(row: Mapping[str, Any]) -> str:
    try:
        mark = ">=" if row["passed"] else "misses"
        if row.get("at_most"):
            mark = "<=" if row["passed"] else "exceeds"
        score = f"{row['score']:.0f}" if abs(row["score"]) > 10 else f"{row['score']:.2f}"
        return f"{row['env_id']} {score} {mark} {row['threshold']:g}"
    except (KeyError, TypeError, ValueError):  # a file from another version
        return str(row.get("env_id", "?"))
