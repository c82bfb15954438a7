"""`rl-training resume`"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import show_result
from rl_training.errors import UserError


def resume(
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-p", metavar="PATH", help="Checkpoint, or RUN (its latest valid checkpoint)."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", "-r", metavar="DIR", hidden=True, help="RUN, as in --checkpoint."),
    ] = None,
    total_timesteps: o.Steps = None,
    env: o.Env = None,
    cluster: o.Cluster = None,
    no_progress: o.NoProgress = False,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Continue a run exactly where it stopped. Use --total-timesteps to train longer than planned.

    A distributed run starts Ray on this machine as it did before; type --cluster to join one at an address.
    """
    if (checkpoint is None) == (run is None):
        raise UserError("say once what to continue, with --checkpoint PATH: a run directory or one of its checkpoints")
    from rl_training.experiment.run.trainer import Trainer

    try:
        trainer = Trainer.resume(
            run if run is not None else checkpoint or "", total_timesteps=total_timesteps, env=env,
            cluster=cluster, progress=not no_progress, command=sys.argv,
            warn=lambda message: tell(f"warning: {message}"),
        )  # fmt: skip
    except UserError as error:
        if env is not None and "does not fit" in str(error):
            raise UserError(f"the spaces of --env {env} differ from those of the run ({error})") from None
        raise
    raise typer.Exit(show_result(trainer.run(), as_json))
