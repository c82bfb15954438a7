"""`rl-training record`"""

from __future__ import annotations

from typing import Annotated

import typer

from rl_training.cli import options as o
from rl_training.cli.evaluate import evaluate


def record(
    checkpoint: o.Checkpoint,
    video: Annotated[
        str, typer.Option("--video", "--output-dir", "-o", metavar="DIR", help="Where the MP4 files are written.")
    ] = "videos",
    num_episodes: Annotated[
        int, typer.Option("--num-episodes", "-n", min=1, max=10_000, help="Episodes of each seed.")
    ] = 1,
    seed: o.EpisodeSeed = 0,
    env: o.Env = None,
    device: o.Device = None,
    as_json: o.Json = False,
) -> None:
    """Record episodes of a trained agent as videos: `eval --video` with one episode a seed."""
    evaluate(
        checkpoint, num_episodes=num_episodes, seed=seed, env=env, device=device, render=False, video=video,
        as_json=as_json,
    )  # fmt: skip
