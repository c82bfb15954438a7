"""`rl-training dream`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.evaluate import load_agent
from rl_training.cli.output import lines, print_json, say

if TYPE_CHECKING:
    from rl_training.experiment.tools.dream import OpenLoop

SHOWN = 3  # episodes to draw


def dream(
    checkpoint: o.Checkpoint,
    video: Annotated[
        str, typer.Option("--output-dir", "-o", metavar="DIR", help="Directory for the images and videos.")
    ] = "dreams",
    num_episodes: Annotated[
        int, typer.Option("--num-episodes", "-n", min=1, max=1_000, help="Episodes for measuring the error.")
    ] = 8,
    context: Annotated[int, typer.Option("--context", min=1, max=10_000, help="Observations shown to the model.")] = 5,
    horizon: Annotated[
        int, typer.Option("--horizon", min=1, max=10_000, help="Steps to predict after that, without observations.")
    ] = 45,
    training: Annotated[
        bool, typer.Option("--training", help="Also plot losses and error over training, from all kept checkpoints.")
    ] = False,
    seed: o.EpisodeSeed = 0,
    env: o.Env = None,
    device: o.Device = None,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Show a world model's open-loop predictions next to what really happened."""
    from rl_training.envs.video import can_write_video
    from rl_training.experiment.tools.dream import open_loop, over_training, play, world_model_of
    from rl_training.reports.dreams import training_curves, write_dreams

    folder = Path(video).absolute()  # an environment may change the directory
    agent = load_agent(checkpoint, env, device)
    world_model_of(agent)
    folder.mkdir(parents=True, exist_ok=True)
    episodes = play(agent, num_episodes, context + 4 * horizon, seed)
    loop = open_loop(agent, episodes, context, horizon)
    written = write_dreams(loop, folder, range(min(SHOWN, num_episodes)))
    if training:
        path = folder / "training.svg"
        training_curves(over_training(agent, episodes, context, horizon), path)
        written.append(path)
    if any(array.ndim > 3 for array in loop.true.values()) and not can_write_video():
        tell("videos need an encoder, so only image strips were written: pip install 'rl-training[video]'")
    result = {
        "algo": agent.config.algo, "env_id": agent.config.env_id, "checkpoint": str(agent.path), "seed": seed,
        "context": context, "error": loop.error, "still": loop.still, "reward_error": loop.reward_error,
        "files": [str(path) for path in written],
    }  # fmt: skip
    if as_json:
        print_json(result)
        return
    say(f"{agent.config.algo} on {agent.config.env_id}: error by number of steps without observations")
    print(lines([*_table(loop), ("pictures", str(folder)), ("checkpoint", str(agent.path))]))


def _table(loop: OpenLoop) -> list[tuple[str, str]]:
    from rl_training.reports.dreams import unit

    reach = len(loop.reward_error) - 1
    steps = [step for step in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if step < reach] + [reach]

    def row(values: Any) -> str:
        return "  ".join(f"{values[step]:8.3f}" for step in steps)

    rows = [("steps", "  ".join(f"{step:8d}" for step in steps))]
    for part, error in loop.error.items():
        rows += [(f"{part} ({unit(part, loop)})", row(error)), ("  if nothing changed", row(loop.still[part]))]
    return [*rows, ("reward (mean error)", row(loop.reward_error))]
