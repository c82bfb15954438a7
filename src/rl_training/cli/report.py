"""`rl-training report` and `rl-training leaderboard`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import show

_Markdown = Annotated[str | None, typer.Option("--markdown", metavar="FILE", help="Also write the tables as Markdown.")]
_Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Also write a self-contained page with plots.")
]


def analysis_options(
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="Metric; higher is better.  [default: eval/mean_reward]"),
    ] = None,
    at: Annotated[
        int | None, typer.Option("--at", metavar="STEP", parser=o.parse_count, help="Last step to use: 50000 or 50k.")
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Normalise scores: 0 is a random policy, 1 the reference score.")
    ] = False,
    bounds: Annotated[
        list[str] | None,
        typer.Option("--bounds", metavar="ENV=LOW:HIGH", help="Scores that are normalised to 0 and 1."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Include unfinished runs, with the scores they have.")
    ] = False,
) -> dict[str, Any]:
    """The options that say which scores are analysed, as arguments of the analysis. --bounds implies --normalize."""
    from rl_training.reports.analysis import known_bounds
    from rl_training.reports.runs import METRIC

    return {
        "metric": metric or METRIC,
        "at": at,
        "normalize": normalize or bool(bounds),
        "bounds": known_bounds(bounds or ()),
        "partial": partial,
        "warn": lambda message: tell(f"warning: {message}"),
    }


@o.with_options(analysis_options)
def report(
    options: dict[str, Any],
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="Run directories, or directories of runs.")],
    markdown: _Markdown = None,
    html: _Html = None,
    as_json: o.Json = False,
) -> None:
    """Summarise runs: IQM, mean, median, optimality gap and probability of improvement with intervals, and curves.

    Runs of one algorithm that differ only in their seeds are pooled.
    """
    _report(runs, "Report", options, markdown, html, as_json)


@o.with_options(analysis_options)
def leaderboard(
    options: dict[str, Any],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory of runs.")] = "runs",
    markdown: _Markdown = None,
    html: _Html = None,
    as_json: o.Json = False,
) -> None:
    """Rank the runs in a directory by IQM, per environment and, with --normalize, over all environments."""
    _report([directory], "Leaderboard", {**options, "mixed": True}, markdown, html, as_json)


def _report(
    paths: list[str], title: str, options: dict[str, Any], markdown: str | None, html: str | None, as_json: bool
) -> None:
    from rl_training.experiment.run.atomic import atomic_write_text
    from rl_training.reports import analysis, page, text

    data = analysis.report(paths, **options)
    if markdown is not None:
        atomic_write_text(Path(markdown), text.markdown(data, title))
    if html is not None:
        atomic_write_text(Path(html), page.page(data, title))
    show(data, as_json, text.print_tables)
    for path in (markdown, html):
        if path is not None:
            tell(f"written to {path}")
