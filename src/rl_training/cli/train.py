"""`rl-training train`"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.output import show_result


@o.with_options(o.run_options)
def train(
    run: dict[str, Any],
    output_dir: o.OutputDir = None,
    cluster: o.Cluster = None,
    track: Annotated[
        list[str] | None, typer.Option("--track", metavar="NAME", help="Also log metrics to wandb, mlflow or trackio.")
    ] = None,
    init_from: Annotated[
        str | None, typer.Option("--init-from", metavar="RUN", help="Start with the networks of this run.")
    ] = None,
    defaults: o.Defaults = False,
    no_progress: o.NoProgress = False,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Train an agent, or a study with several seeds at once.

    rl-training train --config ppo/cartpole

    rl-training train --algo sac --env Pendulum-v1 -n 20000 --seeds 0-4 --set learning_rate=1e-3

    rl-training train --config impala/cartpole --cluster local --set cluster.actors=8

    With --algo and --env, settings that are not given come from the packaged preset for that pair, if there is one.
    """
    chosen = o.build_config(
        **run, output_dir=output_dir, trackers=track or None, init_from=init_from, tuned=not defaults, cluster=cluster
    )
    from rl_training.experiment.run.trainer import Trainer

    trainer = Trainer(chosen, progress=not no_progress, command=sys.argv)
    raise typer.Exit(show_result(trainer.run(), as_json))
