"""`rl-training resume`"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import report
from rl_training.errors import UserError


def resume(
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", "-p", metavar="PATH", help="Continue from this checkpoint.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", "-r", metavar="DIR", help="Continue from the latest valid checkpoint of a run."),
    ] = None,
    total_timesteps: o.Steps = None,
    env: o.Env = None,
    no_progress: o.NoProgress = False,
    as_json: o.Json = False,
) -> None:
    """Continue a run as if it had never stopped; --total-timesteps makes it longer."""
    if (checkpoint is None) == (run is None):
        raise UserError("say what to continue: --run DIR (its latest checkpoint) or --checkpoint PATH, one of them")
    from rl_training.experiment.run.trainer import Trainer

    try:
        trainer = Trainer.resume(
            run if run is not None else checkpoint or "", total_timesteps=total_timesteps, env=env,
            progress=not no_progress, command=sys.argv, warn=lambda message: tell(f"warning: {message}"),
        )  # fmt: skip
    except UserError as error:
        if env is not None and "does not fit" in str(error):
            raise UserError(f"--env {env} has other spaces than the environment of this run ({error})") from None
        raise
    raise typer.Exit(report(trainer.run(), as_json))
