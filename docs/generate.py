"""Writes the parts of README.md and docs/ whose source is elsewhere: between `<!-- x:start -->` and `<!-- x:end -->`.

    python docs/generate.py          # write (also: make docs)
    python docs/generate.py --check  # exit 1 when a file is not up to date

Sources: the registry (algorithms), results/*.json and the ledger (results), TrainConfig and each Hyper (configuration).
A test holds the files to it, so a table can neither go stale nor claim a number that no committed file has.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl_training.experiment import registry
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.verify import ledger, results

ROOT = Path(__file__).resolve().parent.parent


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def algorithms() -> str:
    """One row for each algorithm of the registry."""
    rows = []
    for entry in registry.entries().values():
        actions = "any" if len(entry.actions) == len(registry.ANY) else ", ".join(entry.actions)
        presets = ", ".join(f"`{preset}`" for preset in registry.presets(entry.name)) or "-"
        rows.append([f"`{entry.name}`", f"`{entry.class_name}`", entry.summary, actions, presets])
    return table(["name", "class", "what it is", "actions", "presets"], rows)


def measured(directory: Path | None = None) -> str:
    """One row for each entry of the ledger, with its committed result; then results that the ledger does not name."""
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
    of_return = row.get("statistic", "mean_return") == "mean_return"
    return [
        f"`{row['algo']}`",
        row["env_id"],
        f"{row['env_steps']:,}",
        str(len(row["seeds"])),
        f"{final['mean_return']:.1f}" if of_return else f"{row['score']:.2f} ({row['statistic']})",
        f"{final['iqm']:.1f} [{low:.1f}, {high:.1f}]" if of_return else "-",
        _bar(row["threshold"], row.get("at_most", False)),
        "yes" if row["passed"] else "**no**",
        row["source"],
    ]


def _not_run(entry: Any) -> list[str]:
    steps, bar = f"{entry.total_timesteps:,}", _bar(entry.threshold, entry.at_most)
    return [f"`{entry.algo}`", entry.env_id, steps, "-", "not run yet", "-", bar, "-", entry.source]


def _bar(threshold: float, at_most: bool) -> str:
    return f"at most {threshold:g}" if at_most else f"{threshold:g}"


def train_fields() -> str:
    return table(["field", "default", "meaning"], _fields(TrainConfig))


def hyper_fields() -> str:
    """Settings of each algorithm class. Variants share their class and are listed by what they change."""
    parts = []
    classes: dict[str, list[registry.Entry]] = {}
    for entry in registry.entries().values():
        classes.setdefault(entry.target, []).append(entry)
    for group in classes.values():
        entry = min(group, key=lambda e: len(e.defaults))  # the class as it is; the others change its defaults
        changes = [
            f"`{e.name}` is `{entry.name}` with " + ", ".join(f"`{k}: {json.dumps(v)}`" for k, v in e.defaults.items())
            for e in group
            if e is not entry
        ]
        text = f"### {entry.name}\n\n" + ("; ".join(changes) + ".\n\n" if changes else "")
        parts.append(text + table(["field", "default", "meaning"], _fields(entry.load().Hyper)))
    return "\n\n".join(parts)


def _fields(model: type[BaseModel]) -> Iterable[list[str]]:
    for name, field in model.model_fields.items():
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            value = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
            default = f"`{json.dumps(value)}`" if value is not None else "-"
        yield [f"`{name}`", default, field.description or ""]


BLOCKS = {
    "README.md": {"algorithms": algorithms, "results": measured},
    "docs/configuration.md": {"fields": train_fields, "hyper": hyper_fields},
    "docs/verification.md": {"results": measured},
}


def generated(path: str) -> str:
    """The text that the file should have."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for name, make in BLOCKS[path].items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise SystemExit(f"{path} must have exactly one '{start}' and one '{end}'")
        block = f"{start}\n\n{make()}\n\n{end}"
        text = re.sub(re.escape(start) + ".*?" + re.escape(end), lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def main(arguments: Sequence[str]) -> int:
    stale = [path for path in BLOCKS if (ROOT / path).read_text(encoding="utf-8") != generated(path)]
    for path in stale:
        if "--check" not in arguments:
            (ROOT / path).write_text(generated(path), encoding="utf-8")
        print(f"{path}: {'not up to date' if '--check' in arguments else 'written'}")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
