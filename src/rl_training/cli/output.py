"""Printing of results: one JSON object on stdout, or lines for people."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.cli.boundary import PROGRAM, answer, tell
from rl_training.errors import printable
from rl_training.imports import HERE, allowed_imports

if TYPE_CHECKING:
    from rl_training.experiment.run.result import TrainResult


def print_json(value: Mapping[str, Any]) -> None:
    """Print exactly one object. JSON has no NaN or infinity, so they become null."""
    answer(json.dumps(as_plain(value), indent=2, allow_nan=False))


def show(value: dict[str, Any], as_json: bool, as_text: Callable[[dict[str, Any]], object]) -> None:
    """Print a result as JSON or in its own way for people."""
    (print_json if as_json else as_text)(value)


def as_plain(value: Any) -> Any:
    """The value with NumPy arrays and paths converted to JSON types."""
    from rl_training.experiment.run.atomic import map_json

    return map_json(value, lambda x: None)


def lines(rows: Sequence[tuple[str, str]]) -> str:
    """One line `name   value` per row, aligned."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {printable(name):<{width}}  {printable(value)}" for name, value in rows)


def say(text: str) -> None:
    """Print one line to stdout. Names from files may contain line breaks and terminal codes, which are escaped."""
    print(printable(text))


def score(evaluation: Mapping[str, Any]) -> str:
    """`487.3  (IQM 492.0, 95% interval [471.0, 499.2], 20 episodes)`. The interval is for the IQM."""
    low, high = evaluation["ci95"]
    seeds, episodes = len(evaluation["per_seed"]), evaluation["episodes"]
    over = f"{episodes} episode{'s' * (episodes != 1)}" + (f" of {seeds} seeds" if seeds > 1 else "")
    iqm = f"IQM {evaluation['iqm']:,.1f}, 95% interval [{low:,.1f}, {high:,.1f}], " if episodes > 1 else ""
    success = f", {evaluation['success_rate']:.0%} success" if "success_rate" in evaluation else ""
    return f"{evaluation['mean_return']:,.1f}  ({iqm}{over}{success})"


def command(*words: str | Path) -> str:
    """A command line to copy and paste."""
    return f"{PROGRAM} {shlex.join(map(str, words))}"


def show_result(result: TrainResult, as_json: bool) -> int:
    """Show how a run ended and return the exit status: the signal's if a signal ended the run."""
    summary, run = result.summary, _short(result.run_dir)
    if as_json:
        print_json({**summary, "run_dir": str(result.run_dir)})
    rows = [("status", result.status)]
    if result.final_eval:
        step = result.final_eval.get("step")
        late = "" if step == summary["env_steps"] else f" (at step {step:,})"
        rows.append(("final return", score(result.final_eval) + late))
    if result.best_eval and result.best_eval != result.final_eval:
        rows.append(("best return", f"{score(result.best_eval)} (at step {result.best_eval['step']:,})"))
    pace = f"{summary['env_steps']:,} in {summary['wall_time_s']:,.1f} s ({summary['steps_per_second']:,.0f}/s)"
    rows += [("steps", pace), ("run directory", run)]
    named = named_modules(summary["env_id"])
    resume = command("resume", "--checkpoint", run, *named, *_address(summary))
    if result.signal is None:
        rows.append(("evaluate", command("eval", "--checkpoint", run, "--num-episodes", "20", *named)))
        rows.append(("train longer", f"{resume} --total-timesteps N" if result.status == "completed" else resume))
    tell(lines(rows))
    if result.signal is None:
        return 0
    tell(f"interrupted at step {summary['env_steps']:,}; everything is saved. Continue with: {resume}")
    return 128 + result.signal


def named_modules(env_id: str) -> list[str]:
    """Options for the next command: the run names modules that only the person may name (`rl_training.imports`)."""
    module = env_id.rpartition(":")[0]
    others = [name for name in allowed_imports() if name != module]
    return [*(["--env", env_id] if module else []), *(word for name in others for word in ("--allow-import", name))]


def _address(summary: dict[str, Any]) -> list[str]:
    """Options for the next command: a cluster that only the checkpoint names is not joined."""
    address = summary.get("cluster", "local")
    return [] if address in HERE else ["--cluster", address]


def _short(path: Path) -> str:
    """The path relative to the working directory, if it is inside it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
