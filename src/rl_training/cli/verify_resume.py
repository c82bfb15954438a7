"""`rl-training verify-resume`"""

from __future__ import annotations

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import print_json, say


def verify_resume(
    config: o.Config = None,
    algo: o.Algo = None,
    env: o.Env = None,
    total_timesteps: o.Steps = None,
    seed: o.Seed = None,
    seeds: o.Seeds = None,
    settings: o.Settings = None,
    device: o.Device = None,
    execution: o.Execution = None,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Train briefly, stop, resume in a new process, and compare every saved tensor with an uninterrupted run.

    -n is the length of the short run. Exit status 0: identical, 1: something differs.
    """
    from rl_training.experiment.run.config import TrainConfig

    chosen: TrainConfig = o.build_config(
        config, settings=settings, seeds=seeds, algo=algo, env_id=env, seed=seed, device=device, execution=execution,
        total_timesteps=total_timesteps or (1_000_000 if config is None else None),
    )  # fmt: skip
    from rl_training.experiment.tools.verify_resume import verify_resume as verify

    tell("training twice, and resuming once in a new process ...")
    found = verify(chosen, steps=total_timesteps)
    if as_json:
        print_json(found)
    else:
        what = f"{found['algo']} on {found['env_id']}, stopped at step {found['cut_at']:,} of {found['steps']:,}"
        if found["identical"]:
            say(f"identical: {what}; all {found['compared']} tensors and records have the same SHA-256")
        else:
            names = ", ".join(found["different"][:8]) + (" ..." if len(found["different"]) > 8 else "")
            why = " (its environments cannot be restored)" if found["environments"] == "restarted" else ""
            say(f"DIFFERENT: {what}; {len(found['different'])} of {found['compared']} differ{why}: {names}")
    raise typer.Exit(0 if found["identical"] else 1)
