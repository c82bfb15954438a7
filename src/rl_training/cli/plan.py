"""`rl-training plan`"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.output import lines, say, show


@o.with_options(o.run_options)
def plan(
    run: dict[str, Any],
    defaults: o.Defaults = False,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Skip the speed measurement.")] = False,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Estimate what a run needs: memory, disk space, gradient steps, and time, measured for a few seconds."""
    chosen = o.build_config(**run, tuned=not defaults)
    from rl_training.experiment.run.estimate import plan as make_plan

    found = make_plan(chosen, probe=not no_probe)
    show(found, as_json, _show)


def _show(p: dict[str, Any]) -> None:
    seeds = f"{len(p['seeds'])} seeds" if len(p["seeds"]) > 1 else "one seed"
    ratio = f"{p['update_ratio']:.3g} per step, each transition used {p['replay_ratio']:.3g} times"
    envs = f"{p['num_envs']} environments" if p["num_envs"] > 1 else "one environment"
    rows = [
        ("training", f"{p['total_timesteps']:,} steps, {seeds}, {envs} per seed"),
        ("execution", f"{p['execution']} on {p['device']} ({p['execution_reason']})"),
        ("gradient steps", f"{p['gradient_steps']:,} ({ratio})"),
        ("parameters", f"{p['parameters']:,}"),
        ("RAM", _size(p["ram_bytes"])),
        ("VRAM", _size(p["vram_bytes"]) if p["vram_bytes"] else "none"),
        ("stored steps", _size(p["stored_bytes"])),
        ("environments", f"{_size(p['environment_bytes'])} of tensors"),
        *([("rollout batch", _size(p["batch_bytes"]))] if p["batch_bytes"] else []),
        ("checkpoint", f"{_size(p['checkpoint_bytes'])}; at most {_size(p['disk_bytes'])} on disk"),
        ("evaluations", f"{p['evaluations']}" + ("" if p["probe"] is None else " (not included in the time below)")),
    ]
    if p["probe"] is not None:
        probe = p["probe"]
        rows.append(("speed", f"{probe['steps_per_second']:,.0f} steps/s (measured over {probe['steps']:,} steps)"))
        rows.append(("time", str(timedelta(seconds=round(p["eta_s"])))))
    say(f"{p['algo']} on {p['env_id']}")
    print(lines(rows))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
