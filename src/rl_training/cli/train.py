"""`rl-training train`"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import show_result
from rl_training.errors import UserError


def train(
    config: o.Config = None,
    algo: o.Algo = None,
    env: o.Env = None,
    total_timesteps: o.Steps = None,
    seed: o.Seed = None,
    seeds: o.Seeds = None,
    output_dir: o.OutputDir = None,
    settings: o.Settings = None,
    device: o.Device = None,
    execution: o.Execution = None,
    track: Annotated[
        list[str] | None, typer.Option("--track", metavar="NAME", help="Also log metrics to wandb, mlflow or trackio.")
    ] = None,
    init_from: Annotated[
        str | None, typer.Option("--init-from", metavar="RUN", help="Start with the networks of this run.")
    ] = None,
    no_progress: o.NoProgress = False,
    as_json: o.Json = False,
) -> None:
    """Train an agent, or a study with several seeds at once.

    rl-training train --config ppo/cartpole

    rl-training train --algo sac --env Pendulum-v1 -n 20000 --seeds 0-4 --set learning_rate=1e-3
    """
    chosen = o.build_config(
        config, settings=settings, seeds=seeds, algo=algo, env_id=env, total_timesteps=total_timesteps, seed=seed,
        output_dir=output_dir, device=device, execution=execution, trackers=track or None, init_from=init_from,
    )  # fmt: skip
    from rl_training.experiment.run.trainer import Trainer

    trainer = Trainer(chosen, progress=not no_progress, command=sys.argv)
    if config is None:
        _suggest_preset(chosen.algo, chosen.env_id)
    raise typer.Exit(show_result(trainer.run(), as_json))


def _suggest_preset(algo: str, env_id: str) -> None:
    """Tuned settings change the results, so they are suggested and never applied silently."""
    from rl_training import registry
    from rl_training.experiment.run.config import read_config

    for preset in registry.presets(algo):
        try:
            if read_config(preset).get("env_id") == env_id:
                tell(f"hint: this run uses the default settings; use --config {preset} for tuned ones")
                return
        except UserError:  # a broken preset must not stop a run that does not use it
            continue
