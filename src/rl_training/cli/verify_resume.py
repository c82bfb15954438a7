"""`rl-training verify-resume`"""

from __future__ import annotations

from typing import Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import print_json, say


@o.with_options(o.run_options)
def verify_resume(
    run: dict[str, Any],
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Train briefly, stop, resume in a new process, and compare every saved tensor with an uninterrupted run.

    -n is the length of the short run. Exit status 0: identical, 1: something differs.
    """
    steps = run["total_timesteps"]
    chosen = o.build_config(**{**run, "total_timesteps": steps or (1_000_000 if run["source"] is None else None)})
    from rl_training.experiment.tools.verify_resume import verify_resume as verify

    tell("training twice, and resuming once in a new process ...")
    found = verify(chosen, steps=steps)
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
