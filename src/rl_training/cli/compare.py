"""`rl-training compare`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.output import lines, print_json, say
from rl_training.cli.report import analysis_options


@o.with_options(analysis_options)
def compare(
    options: dict[str, Any],
    a: Annotated[str, typer.Argument(metavar="A", help="Baseline: a run directory or a directory of runs.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The new run, or a directory of new runs.")],
    statistic: Annotated[str, typer.Option("--statistic", metavar="NAME", help="iqm, mean or median.")] = "iqm",
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="X", min=0.0, help="Score difference by which B may be worse.")
    ] = 0.0,
    as_json: o.Json = False,
) -> None:
    """Compare run B with run A. The exit status is 1 if B is significantly worse.

    Significantly worse means that the whole 95 % interval of the difference B - A is below minus the tolerance.
    """
    from rl_training.reports import analysis
    from rl_training.reports.text import percent, ranged

    result = analysis.compare(a, b, statistic=statistic, tolerance=tolerance, **options)
    if as_json:
        print_json(result)
    else:
        seeds = {side: sum(map(len, result[side]["seeds"].values())) for side in "ab"}
        rows = [
            *((s.upper(), f"{result[s]['name']}, {seeds[s]} seeds: {ranged(result[s])}") for s in "ab"),
            ("B - A", ranged(result["difference"])),
            ("P(B beats A)", ranged(result["improvement"], percent)),
            ("verdict", f"B is {result['verdict']}"),
        ]
        say(f"{statistic} of {result['metric']} on {', '.join(result['environments'])}")
        print(lines(rows))
    if result["verdict"] == "worse":
        raise typer.Exit(1)
