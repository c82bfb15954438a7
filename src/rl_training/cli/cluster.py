"""`rl-training cluster`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import interruptible
from rl_training.cli.output import lines, print_json
from rl_training.errors import UserError

_NEEDED = {"actors", "actors_replaced", "lost_steps", "unrolls_under_way", "learner_busy"}
_REPLAY = {"replay_size", "shards_replaced", "lost_transitions"}

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at distributed runs.")


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a distributed run.", show_default=False)],
    as_json: o.Json = False,
) -> None:
    """Show the actors, queues and learner of a distributed run, as of its last log line.

    It only reads the run directory, so it also works while the run is in progress and on another machine.
    """
    found = read_status(Path(run))
    if as_json:
        print_json(found)
        return
    last = found["metrics"]
    rows = [
        ("run", f"{found['status']}, step {found['step']:,}"),
        (
            "actors",
            f"{last['actors']:.0f}, {last['actors_replaced']:.0f} replaced, {last['lost_steps']:.0f} steps lost",
        ),
        (
            "speed",
            f"{last.get('actor_fps_mean', 0):,.0f} steps/s each, the slowest {last.get('actor_fps_min', 0):,.0f}",
        ),
        ("unrolls", f"{last['unrolls_under_way']:.0f} under way or waiting"),
        ("staleness", f"{last.get('staleness_mean', 0):.1f} updates, at most {last.get('staleness_max', 0):.0f}"),
        ("learner", f"{last['learner_busy']:.0%} busy"),
    ]
    if "replay_size" in last:
        lost = f"{last['shards_replaced']:.0f} shards replaced, {last['lost_transitions']:,.0f} transitions lost"
        rows.append(("replay", f"{last['replay_size']:,.0f} transitions, {lost}"))
    rows += [(f"actor {k}", f"{speed:,.0f} steps/s") for k, speed in found["actors"].items()]
    print(lines(rows))


def read_status(run: Path) -> dict[str, Any]:
    """The last metrics of the cluster in a run directory."""
    from rl_training.experiment.run.metrics import is_finite, read_metrics
    from rl_training.experiment.run.run_dir import read_status as status_of

    if not (run / "metrics.jsonl").is_file():
        raise UserError(f"{run} is not a run directory: it has no metrics.jsonl")
    last = next((row for row in reversed(list(read_metrics(run))) if "cluster/actors" in row), None)
    if last is None:
        raise UserError(f"{run} has logged nothing about a cluster: the run is not distributed, or has just started")
    found = {key: value for key, value in last.items() if is_finite(value)}
    own = {key.removeprefix("cluster/"): value for key, value in found.items() if key.startswith("cluster/")}
    needed = _NEEDED | (_REPLAY if "cluster/replay_size" in last else set())
    if "step" not in found or not needed <= own.keys():
        raise UserError(f"{run / 'metrics.jsonl'} is damaged: its last line about the cluster is not complete")
    actors = {key.rpartition("/")[2]: value for key, value in own.items() if key.startswith("actor_fps/")}
    metrics = {key: value for key, value in own.items() if "/" not in key}
    return {"run": str(run), "status": status_of(run), "step": found["step"], "metrics": metrics, "actors": actors}


app.command("status", short_help="Show actors, queues and learner of a run.")(interruptible(status))
