"""`rl-training finetune`"""

from __future__ import annotations

import sys

import typer

from rl_training.cli import options as o
from rl_training.cli.output import show_result


def finetune(
    checkpoint: o.Checkpoint,
    total_timesteps: o.RequiredSteps,
    seed: o.Seed = None,
    output_dir: o.OutputDir = None,
    settings: o.Settings = None,
    device: o.Device = None,
    execution: o.Execution = None,
    no_progress: o.NoProgress = False,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Continue training an offline agent (iql, awac, cal_ql) in the environment.

    rl-training finetune --checkpoint runs/my_iql_run -n 10000 --set prior_share=0.25
    """
    from rl_training.experiment.run.config import combine
    from rl_training.experiment.run.trainer import Trainer
    from rl_training.experiment.run.warm_start import fine_tune_config

    base = fine_tune_config(checkpoint, total_timesteps)
    named = {"seed": seed, "output_dir": output_dir, "device": device, "execution": execution}
    changes = {**o.parse_settings(settings or (), base.algo), **{k: v for k, v in named.items() if v is not None}}
    trainer = Trainer(combine(base.to_dict(), **changes), progress=not no_progress, command=sys.argv)
    raise typer.Exit(show_result(trainer.run(), as_json))
