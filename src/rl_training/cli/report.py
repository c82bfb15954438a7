"""`rl-training report` and `rl-training leaderboard`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import print_json

Metric = Annotated[
    str | None, typer.Option("--metric", metavar="NAME", help="What is compared; higher is better.  [eval/mean_reward]")
]
At = Annotated[
    int | None, typer.Option("--at", metavar="STEP", parser=o.parse_count, help="Scores up to this step: 50000, 50k.")
]
Normalize = Annotated[
    bool, typer.Option("--normalize", help="Put environments on one scale: random policy 0, reference score 1.")
]
Bounds = Annotated[
    list[str] | None, typer.Option("--bounds", metavar="ENV=LOW:HIGH", help="Scores for 0 and 1 of an environment.")
]
Partial = Annotated[bool, typer.Option("--partial", help="Take unfinished runs too, as far as they got.")]
_Markdown = Annotated[str | None, typer.Option("--markdown", metavar="FILE", help="Also write the tables as Markdown.")]
_Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Also write one page with plots; it opens from disk.")
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
    """Scores of runs with their intervals: IQM, mean, median, optimality gap, probability of improvement, curves.

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
    """Rank all runs below a directory by IQM, each environment on its own (and all together with --normalize)."""
    options = {"metric": metric, "at": at, "normalize": normalize, "bounds": bounds, "partial": partial, "mixed": True}
    _report([directory], "Leaderboard", options, markdown, html, as_json)


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line as the analysis takes them; scores given for an environment ask for its scale."""
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
