"""`rl-training sweep`"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import lines, print_json
from rl_training.errors import UserError, printable

if TYPE_CHECKING:
    from rl_training.experiment.run.config import TrainConfig
    from rl_training.experiment.studies.pool import Event
    from rl_training.experiment.studies.sweep import Sweep

Workers = Annotated[
    int, typer.Option("--workers", "-w", metavar="N", min=1, max=1024, help="Number of trials to train in parallel.")
]
_OWN_OPTIONS = {
    "seed": "--seeds",
    "seeds": "--seeds",
    "output_dir": "--output-dir",
    "env_id": "--env",
    "algo": "--algo",
}


def sweep(
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="FILE|PRESET", help="YAML file or preset; can be repeated."),
    ] = None,
    algo: Annotated[
        list[str] | None, typer.Option("--algo", "-a", metavar="NAME", help="Algorithm; can be repeated.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="ID", callback=o.typed, help="Environment; can be repeated."),
    ] = None,
    total_timesteps: o.Steps = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="LIST", help="One trial per seed: 0,1,2 or 0-4.  [default: 0]")
    ] = None,
    study: Annotated[
        bool, typer.Option("--study", help="Train all seeds of a combination together, in one trial.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=A,B,C", help="One trial per value: gamma=0.98,0.99."),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Sweep directory.  [default: sweeps/<algo>-<hash>]"),
    ] = None,
    workers: Workers = 1,
    retries: Annotated[
        int,
        typer.Option("--retries", metavar="N", min=0, help="Restarts of a trial whose worker dies without progress."),
    ] = 3,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry trials that failed before.")] = False,
    device: o.Device = None,
    execution: o.Execution = None,
    cluster: o.Cluster = None,
    gpus: o.GpusPerTrial = 0.0,
    no_progress: o.NoProgress = False,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Train every combination of configs, environments, seeds and settings. Each is a trial that can be resumed.

    rl-training sweep --config dqn/cartpole --seeds 0-3 --set learning_rate=1e-3,3e-4 --workers 4

    With --cluster, trials are tasks of a Ray cluster, whose machines must share the disk of --output-dir.

    To continue a sweep that was interrupted or killed, run the same command again. Exit status 1: a trial failed.
    """
    configs, varied = grid(
        config, algo, env, seeds, study, settings,
        {"total_timesteps": total_timesteps, "device": device, "execution": execution},
    )  # fmt: skip
    from rl_training.experiment.studies.sweep import Sweep, identity

    if output_dir is None:
        text = json.dumps([identity(item) for item in configs], sort_keys=True)
        output_dir = f"sweeps/{configs[0].algo}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    chosen = Sweep(output_dir, configs, varied)
    with display(chosen, not no_progress) as show:
        table = chosen.run(
            workers, retries=retries, retry_failed=retry_failed, on_event=show, cluster=cluster, gpus=gpus
        )
    if as_json:
        print_json(table)
    elif table["ranking"]:
        print("\n".join(ranking(table["ranking"])))
    _report(table)
    raise typer.Exit(0 if table["done"] == table["total"] else 1)


def grid(
    configs: list[str] | None, algos: list[str] | None, envs: list[str] | None, seeds: str | None, study: bool,
    settings: list[str] | None, fields: dict[str, Any],
) -> tuple[list[TrainConfig], list[dict[str, str]]]:  # fmt: skip
    """Every combination as a config, and the settings that vary in it. All are checked before the first is trained."""
    if configs and algos:
        raise UserError("--config and --algo cannot be combined: the config already names its algorithm")
    axes: list[list[str]] = []
    for pair in settings or ():
        key, equals, text = pair.partition("=")
        if key.strip() in _OWN_OPTIONS:
            raise UserError(f"--set {key.strip()}: use {_OWN_OPTIONS[key.strip()]} instead")
        axes.append([f"{key}={value}" for value in split_values(text)] if equals else [pair])
    numbers = o.parse_seeds(seeds) if seeds is not None else None
    each: list[dict[str, Any]] = [{}]
    if numbers is not None:
        each = [{"seeds": seeds}] if study and len(numbers) > 1 else [{"seed": seed} for seed in numbers]
    from rl_training.experiment.studies.sweep import MAX_TRIALS

    count = len(configs or [1]) * len(algos or [1]) * len(envs or [1]) * len(each)
    for axis in axes:
        count *= len(axis)
    if count > MAX_TRIALS:
        raise UserError(f"this grid has {count:,} trials; at most {MAX_TRIALS:,} are allowed")
    built: list[TrainConfig] = []
    varied: list[dict[str, str]] = []
    for source, algo, env in itertools.product(configs or [None], algos or [None], envs or [None]):  # type: ignore[list-item]
        for combination in itertools.product(*axes):
            for seed in each:
                made = o.build_config(source, settings=combination, algo=algo, env_id=env, **seed, **fields)
                made.hyper()  # invalid settings raise now, not after hours
                built.append(made)
                varying = (pair.split("=", 1) for pair, axis in zip(combination, axes) if len(axis) > 1)
                varied.append({key.strip(): value.strip() for key, value in varying})
    return built, varied


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets and quotes: hidden_sizes=[64,64],[32] has two values."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += c
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise UserError(f"--set: '{text[:80]}' has an empty value between its commas")
    return parts


@contextlib.contextmanager
def display(sweep: Sweep, enabled: bool) -> Iterator[Any]:
    """Show the events of a sweep on stderr: as a live bar on a terminal, as one line per event elsewhere."""
    texts = {trial.name: trial.describe() for trial in sweep.trials}
    width = len(str(len(texts)))
    over = 0

    def line(event: Event) -> str:
        nonlocal over
        over += event.kind in ("done", "failed")
        name, state = event.job.name, event.state
        at = f" at step {state.step:,}" if state.step >= 0 else ""
        outcome = {
            "start": f"{'resumed' + at if state.step >= 0 else 'started'}",
            "restart": f"its worker died; restarted{at}",
            "done": f"done{_score(event)}",
            "failed": f"FAILED: {state.error}",
        }[event.kind]
        return f"[{over:>{width}}/{len(texts)}] {name}  {texts[name]}: {outcome}"

    if not enabled:
        yield lambda event: None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda event: tell(line(event))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24)
    with Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        whole = bar.add_task("sweep", total=len(texts))
        tasks: dict[str, Any] = {}

        def show(event: Event) -> None:
            name = event.job.name
            if event.kind != "start":
                bar.console.print(printable(line(event)), markup=False, highlight=False)
                if name in tasks:
                    bar.remove_task(tasks.pop(name))
            elif name not in tasks:
                line(event)
                tasks[name] = bar.add_task(f"  {name}  {texts[name]}", total=None)
            bar.update(whole, completed=over)

        yield show


def _score(event: Event) -> str:
    from rl_training.experiment.studies.trials import summary_of

    evaluation = summary_of(event.state).get("final_eval") or {}
    return f", mean return {evaluation['mean_return']:,.1f}" if "mean_return" in evaluation else ""


def ranking(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each combination, best first."""
    several = len({row["env_id"] for row in rows}) > 1
    out = []
    for place, row in enumerate(rows, start=1):
        values = "  ".join(f"{key}={value}" for key, value in row["settings"].items())
        where = f" on {row['env_id']}" if several else ""
        who = f"{row['algo']}{where}  {values}".rstrip()
        spread = f" ({row['lowest']:,.1f} to {row['highest']:,.1f})" if len(row["trials"]) > 1 else ""
        seeds = f"{row['seeds']} seed{'s' * (row['seeds'] != 1)}"
        out.append(f"{place:>3}  mean return {row['mean_return']:>10,.1f}{spread}, {seeds}  {who}")
    return out


def _report(table: dict[str, Any]) -> None:
    rows = [("directory", table["directory"]), ("trials", f"{table['done']} of {table['total']} complete")]
    rows += [(row["name"], f"failed: {row['error']}") for row in table["trials"] if row["status"] == "failed"][:20]
    tell(lines(rows))
