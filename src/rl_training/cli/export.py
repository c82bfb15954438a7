"""`rl-training export`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli import options as o
from rl_training.cli.evaluate import load_agent
from rl_training.cli.output import lines, print_json, say


def export(
    checkpoint: o.Checkpoint,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="model.onnx, or model.pt2 for a torch.export program.")
    ] = "model.onnx",
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Agent of a study.  [default: the first seed]")
    ] = None,
    env: o.Env = None,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Export the deterministic policy to one file that runs without this library.

    The file includes observation normalisation and action scaling. Before it is written, its actions on random and real
    observations are compared with the agent's.
    """
    from rl_training.experiment.tools.export import export as write

    target = Path(output).absolute()  # an environment may change the directory
    agent = load_agent(checkpoint, env, "cpu", seed)
    result = write(agent, str(target))
    if as_json:
        config, path = agent.config, str(agent.path)
        print_json({"algo": config.algo, "env_id": config.env_id, "checkpoint": path, **asdict(result)})
        return
    shape = "{dtype}[{axes}]"
    described = {
        name: shape.format(dtype=part["dtype"], axes=", ".join(map(str, part["shape"])))
        for name, part in {**result.inputs, "action": result.output}.items()
    }
    checked = f"{result.observations} observations, largest error {result.max_error:.1g}"
    if result.output["dtype"].startswith(("int", "uint")):
        checked = f"{result.observations} observations, {result.different} different actions"
    rows = [(f"input {name}" if name != "action" else "output action", text) for name, text in described.items()]
    say(f"{agent.config.algo} on {agent.config.env_id}")
    print(lines([*rows, ("compared on", checked), ("written", f"{result.path} ({result.bytes / 1e3:,.0f} kB)")]))
