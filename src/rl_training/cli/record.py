"""`rl-training record`"""

from __future__ import annotations

from typing import Annotated

import typer

from rl_training.cli import options as o
from rl_training.cli.evaluate import evaluate


def record(
    checkpoint: o.Checkpoint,
    video: Annotated[
        str, typer.Option("--output-dir", "-o", metavar="DIR", help="Directory for the MP4 files.")
    ] = "videos",
    num_episodes: Annotated[
        int, typer.Option("--num-episodes", "-n", metavar="N", min=1, max=10_000, help="Episodes per seed.")
    ] = 1,
    seed: o.EpisodeSeed = 0,
    env: o.Env = None,
    device: o.Device = None,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Record videos of a trained agent: the same as `eval --video`, with one episode per seed."""
    evaluate(
        checkpoint, num_episodes=num_episodes, seed=seed, env=env, device=device, render=False, video=video,
        as_json=as_json,
    )  # fmt: skip
