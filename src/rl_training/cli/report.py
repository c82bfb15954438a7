"""`rl-training report` and `rl-training leaderboard`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import print_json

Metric = Annotated[
    str | None, typer.Option("--metric", metavar="NAME", help="Metric; higher is better.  [default: eval/mean_reward]")
]
At = Annotated[
    int | None, typer.Option("--at", metavar="STEP", parser=o.parse_count, help="Last step to use: 50000 or 50k.")
]
Normalize = Annotated[
    bool, typer.Option("--normalize", help="Normalise scores: 0 is a random policy, 1 the reference score.")
]
Bounds = Annotated[
    list[str] | None, typer.Option("--bounds", metavar="ENV=LOW:HIGH", help="Scores that are normalised to 0 and 1.")
]
Partial = Annotated[bool, typer.Option("--partial", help="Include unfinished runs, with the scores they have.")]
_Markdown = Annotated[str | None, typer.Option("--markdown", metavar="FILE", help="Also write the tables as Markdown.")]
_Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Also write a self-contained page with plots.")
]


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="Run directories, or directories of runs.")],
    metric: Metric = None,
    at: At = None,
    normalize: Normalize = False,
    bounds: Bounds = None,
    partial: Partial = False,
    markdown: _Markdown = None,
    html: _Html = None,
    as_json: o.Json = False,
) -> None:
    """Summarise runs: IQM, mean, median, optimality gap and probability of improvement with intervals, and curves.

    Runs of one algorithm that differ only in their seeds are pooled.
    """
    options = {"metric": metric, "at": at, "normalize": normalize, "bounds": bounds, "partial": partial}
    _report(runs, "Report", options, markdown, html, as_json)


def leaderboard(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory of runs.")] = "runs",
    metric: Metric = None,
    at: At = None,
    normalize: Normalize = False,
    bounds: Bounds = None,
    partial: Partial = False,
    markdown: _Markdown = None,
    html: _Html = None,
    as_json: o.Json = False,
) -> None:
    """Rank the runs in a directory by IQM, per environment and, with --normalize, over all environments."""
    options = {"metric": metric, "at": at, "normalize": normalize, "bounds": bounds, "partial": partial, "mixed": True}
    _report([directory], "Leaderboard", options, markdown, html, as_json)


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Convert the command-line options to arguments of the analysis. --bounds implies --normalize."""
    from rl_training.reports.analysis import known_bounds
    from rl_training.reports.runs import METRIC

    bounds = options["bounds"] or ()
    return {
        **options,
        "metric": options["metric"] or METRIC,
        "normalize": options["normalize"] or bool(bounds),
        "bounds": known_bounds(bounds),
        "warn": lambda message: tell(f"warning: {message}"),
    }


def _report(
    paths: list[str], title: str, options: dict[str, Any], markdown: str | None, html: str | None, as_json: bool
) -> None:
    from rl_training.experiment.run.atomic import atomic_write_text
    from rl_training.reports import analysis, page, text

    data = analysis.report(paths, **read_options(options))
    if markdown is not None:
        atomic_write_text(Path(markdown), text.markdown(data, title))
    if html is not None:
        atomic_write_text(Path(html), page.page(data, title))
    if as_json:
        print_json(data)
    else:
        text.print_tables(data)
    for path in (markdown, html):
        if path is not None:
            tell(f"written to {path}")
