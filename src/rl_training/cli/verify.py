"""`rl-training verify`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import lines, print_json, say


def verify(
    algo: Annotated[
        str, typer.Argument(metavar="ALGO", help="Algorithm with an entry in the ledger.", show_default=False)
    ],
    env: o.Env = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="LIST", help="Seeds to use instead of the ledger's: 0,1,2 or 0-4.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Where the result goes.  [default: results]"),
    ] = None,
    cluster: o.Cluster = None,
    no_progress: o.NoProgress = False,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Train as the verification ledger specifies and compare the score with the published bar.

    A missed bar is a result, not an error: the exit status is 0 and `passed` is false.
    """
    chosen = o.parse_seeds(seeds) if seeds is not None else None
    from rl_training import registry
    from rl_training.experiment.tools import verify as ledger

    registry.entry(algo)  # a typo raises an error with the nearest name
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)  # fail now, not after hours of training
    folder = Path(output or ledger.RESULTS).absolute()  # an environment may change the directory
    result = ledger.verify(algo, env=env, seeds=chosen, output=folder, progress=not no_progress, cluster=cluster)
    if as_json:
        print_json(result)
        return
    for row in result["results"]:
        verdict = "reaches" if row["passed"] else "MISSES"
        if row.get("at_most"):
            verdict = "stays below" if row["passed"] else "EXCEEDS"
        bar = f"{row['threshold']:g}" + (f" to {row['ceiling']:g}" if "ceiling" in row else "")
        of_return = row.get("statistic", "mean_return") == "mean_return"
        score = f"{row['score']:,.1f}" if of_return else f"{row['score']:.2f} ({row['statistic']})"
        rows = [
            ("score", f"{score} {verdict} the bar of {bar}"),
            ("bar from", row["source"]),
            ("trained", f"{row['total_timesteps']:,} steps, seeds {', '.join(map(str, row['seeds']))}"),
            ("time", f"{row['wall_time_s']:,.0f} s on {row['device']} ({row['execution']})"),
        ]
        say(f"{row['algo']} on {row['env_id']}" + (f" ({row['variant']})" if row.get("variant") else ""))
        print(lines(rows))
    tell(f"written to {output or ledger.RESULTS}")
