"""`rl-training bench`"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import lines, print_json
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.experiment.studies.bench import Bench, Task
    from rl_training.experiment.studies.pool import Event

_EVERY = 60.0  # seconds between two lines of a running study where there is no terminal


def bench(
    suite: Annotated[
        str | None, typer.Argument(metavar="SUITE", help="Suite, or a YAML file with one.", show_default=False)
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Show the studies and their state (without SUITE: the suites) and exit.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Studies whose name contains this, such as 'sac__*' or Hopper."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", metavar="N", min=1, max=1024,
                     help="Studies to train at a time.  [default: as many as cores and memory allow]"),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="N", min=0.01, help="Save everything and stop after N minutes.")
    ] = None,
    device: o.Device = None,
    settings: o.Settings = None,
    results: Annotated[
        str | None, typer.Option("--results", metavar="DIR", help="Directory for results.  [default: results/SUITE]")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Run directories.  [default: runs/bench/SUITE]"),
    ] = None,
    cluster: o.Cluster = None,
    gpus: o.GpusPerTrial = 0.0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 if a bar is missed.")] = False,
    allow_import: o.AllowImport = None,
    no_progress: o.NoProgress = False,
    as_json: o.Json = False,
) -> None:  # fmt: skip
    """Train the studies of a suite and compare their scores with the published ones.

    rl-training bench classic --minutes 30

    To continue after --minutes, Ctrl-C or a crash, run the same command again: each study continues exactly where it
    stopped, and complete ones are not repeated. With --cluster, studies are tasks of a Ray cluster, whose machines must
    share the disk of --output-dir. Results with --set are not the suite's: they are written next to the runs.
    Exit status 1: a study failed, or a bar was missed with --strict.
    """
    from rl_training.experiment.studies.suite import load_suite, suite_names

    if suite is None:
        if not list_only:
            raise UserError(f"which suite? {', '.join(suite_names())}")
        _list_suites(as_json)
        return
    chosen = load_suite(suite)
    studies = chosen.chosen(only or ())
    place = Path(output_dir or f"runs/bench/{chosen.name}")
    into = Path(results or f"results/{chosen.name}")
    if settings:
        if output_dir is None:
            place = place.with_name(f"{chosen.name}-{hashlib.sha256(chr(10).join(settings).encode()).hexdigest()[:8]}")
        into = Path(results) if results is not None else place / "results"
    from rl_training.experiment.studies.bench import Bench

    fixed: dict[str, Any] = {} if device is None else {"device": device}
    made = Bench(
        chosen, place, into, studies=studies,
        changes=lambda study: {**fixed, **o.parse_settings(settings or (), study.algo)},
    )  # fmt: skip
    if list_only:
        table = made.table()
    else:
        with display(made, not no_progress) as (planning, show):
            table = made.run(workers, minutes=minutes, on_event=show, on_plan=planning, cluster=cluster, gpus=gpus)
    if as_json:
        print_json(table)
    else:
        print(_table(table))
    if not list_only:
        rest = table["total"] - table["done"]
        again = "; run the command again to continue" if rest else ""
        tell(f"{table['done']} of {table['total']} studies are complete{again}. Results: {into}")
        failed = table["failed"] > 0 or (strict and (table["missed"] or table["done"] < table["total"]))
        raise typer.Exit(1 if failed else 0)


def _list_suites(as_json: bool) -> None:
    from rl_training.experiment.studies.suite import load_suite, suite_names

    found = [load_suite(name) for name in suite_names()]
    if as_json:
        print_json({"suites": [{"name": s.name, "title": s.title, "studies": len(s.studies)} for s in found]})
        return
    print(lines([(s.name, f"{len(s.studies):>3} studies  {s.title}") for s in found]))


def _table(table: dict[str, Any]) -> str:
    rows = []
    for row in table["studies"]:
        state = {"done": "done", "new": "not run"}.get(row["status"], row["status"])
        if row["status"] in ("started", "failed") and row["env_steps"]:
            state += f" at {row['env_steps']:,}"
        steps = f"{row['total_timesteps']:>11,} steps x {len(row['seeds'])} seeds"
        text = f"{steps}  {state:<20}"
        if row["score"] is not None:
            text += f"  score {row['score']:,.1f}"
        if row["published"] is not None:
            text += f"  published {row['published']:,.1f}"
        if row["passed"] is not None and row["status"] == "done":
            text += f", {'reached' if row['passed'] else 'MISSED'} (bar {row['bar']:,.1f})"
        if row["error"]:
            text += f"  {row['error']}"
        rows.append((row["name"], text.rstrip()))
    return lines(rows)


@contextlib.contextmanager
def display(bench: Bench, enabled: bool) -> Iterator[tuple[Any, Any]]:
    """One line for each running study on stderr: live on a terminal, once a minute elsewhere."""
    if not enabled:
        yield lambda task: None, lambda event: None
        return
    tasks = {task.study.name: task for task in bench.tasks}
    running: dict[str, Task] = {}
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        say: Callable[[str], None] = tell
        if live:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            screen = stack.enter_context(Live(console=console, refresh_per_second=2, transient=True))
            say = lambda text: console.print(text, markup=False, highlight=False)  # noqa: E731

        def watch() -> None:
            while not ended.wait(1.0 if live else _EVERY):
                text = [line_of(task) for task in list(running.values())]
                if live:
                    screen.update("\n".join(text))
                elif text:
                    say("\n".join(text))

        def planned(task: Task) -> None:
            if live:
                screen.update(f"planning {task.study.name} ...")

        def show(event: Event) -> None:
            name, state = event.job.name, event.state
            at = f" at step {state.step:,}" if state.step >= 0 else ""
            if event.kind in ("start", "restart"):
                running[name] = tasks[name]
                what = "its worker died; restarted" if event.kind == "restart" else "resumed" if at else "started"
                say(f"{name}: {what}{at}")
                return
            running.pop(name, None)
            say(f"{name}: FAILED: {state.error}" if event.kind == "failed" else _outcome(tasks[name]))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield planned, show
        finally:
            ended.set()
            watcher.join()


def line_of(task: Task) -> str:
    """`sac__Hopper-v5  430,000 of 1,000,000 (43 %)  1,234 steps/s  ETA 0:07:41  last score 2,918.4 (bar 3,490)`."""
    from rl_training.experiment.studies.bench import progress_of

    total, progress = task.config.total_timesteps, progress_of(task.state.run_dir)
    if progress is None:
        return f"{task.study.name}  preparing"
    text = f"{task.study.name}  {progress.step:,} of {total:,} ({100 * progress.step // total} %)"
    eta = progress.eta(total)
    if progress.steps_per_second and eta is not None:
        text += f"  {progress.steps_per_second * len(task.config.all_seeds):,.0f} steps/s"
        text += f"  ETA {timedelta(seconds=round(eta))}"
    if progress.score is not None:
        text += f"  last score {task.study.score_of(progress.score):,.1f}{_bar(task)}"
    return text


def _outcome(task: Task) -> str:
    saved = task.saved
    if not saved:
        return f"{task.study.name}: done"
    verdict = {True: "reached", False: "MISSED", None: "done"}[saved["passed"]]
    took = timedelta(seconds=round(saved["wall_time_s"]))
    return f"{task.study.name}: {verdict}, score {saved['score']:,.1f}{_bar(task)}, {took}"


def _bar(task: Task) -> str:
    bar = task.study.bar
    return f" (bar {bar.threshold:,.1f})" if bar is not None and bar.judged else ""
