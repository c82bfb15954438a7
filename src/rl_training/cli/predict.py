"""`rl-training predict`"""

from __future__ import annotations

import json
import secrets
import sys
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.evaluate import load_agent
from rl_training.cli.output import as_plain, print_json
from rl_training.errors import UserError


def predict(
    checkpoint: o.Checkpoint,
    obs: Annotated[
        str, typer.Option("--obs", metavar="JSON", help="One observation or a list of observations; - reads stdin.")
    ],
    stochastic: Annotated[bool, typer.Option("--stochastic", help="Sample actions as in training.")] = False,
    env: o.Env = None,
    device: o.Device = None,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Print the action for an observation: rl-training predict --checkpoint RUN --obs '[0.1, 0, 0, 0]'"""
    value = read_observation(sys.stdin.read() if obs == "-" else obs)
    agent = load_agent(checkpoint, env, device)
    if stochastic:
        agent._calls = secrets.randbits(31)  # every call is a new process, which must not repeat the same sample
    action = as_plain(agent.predict(value, deterministic=not stochastic))
    if as_json:
        config = agent.config
        print_json({"action": action, "deterministic": not stochastic, "algo": config.algo, "env_id": config.env_id})
    else:
        print(json.dumps(action))


def read_observation(text: str) -> Any:
    """Parse the JSON value. Errors name the position of the mistake."""
    if not text.strip():
        raise UserError("--obs is empty; write it as JSON, such as '[0.1, 0, 0, 0]'")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(
            f"--obs is not valid JSON ({error.msg} at {place}); write JSON such as '[0.1, 0, 0, 0]'"
        ) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"--obs cannot be read: {error}") from None
