"""`rl-training eval` and `rl-training record`"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import lines, print_json, say, score
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.experiment.run.agent import Agent


def evaluate(
    checkpoint: o.Checkpoint,
    num_episodes: Annotated[
        int, typer.Option("--num-episodes", "-n", metavar="N", min=1, max=1_000_000, help="Episodes per seed.")
    ] = 20,
    seed: o.EpisodeSeed = 0,
    env: o.Env = None,
    device: o.Device = None,
    stochastic: Annotated[bool, typer.Option("--stochastic", help="Sample actions as in training.")] = False,
    render: Annotated[bool, typer.Option("--render", help="Show the episodes in a window.")] = False,
    video: Annotated[
        str | None, typer.Option("--video", metavar="DIR", help="Record the episodes as MP4 files.")
    ] = None,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Evaluate the policy of a checkpoint, with all seeds of a study."""
    if render and video is not None:
        raise UserError("--render and --video cannot be combined: use --render for a window or --video for files")
    folder = Path(video).absolute() if video is not None else None  # an environment may change the directory
    agent = load_agent(checkpoint, env, device)
    if not render and video is None:
        result = agent.evaluate(num_episodes, seed=seed, all_seeds=True, deterministic=not stochastic)
    else:
        result = _watch(agent, num_episodes, seed, folder, not stochastic)
    if as_json:
        config, path = agent.config, str(agent.path)
        header = {"algo": config.algo, "env_id": config.env_id, "checkpoint": path, "seed": seed}
        print_json({**header, "deterministic": not stochastic, **result})
        return
    rows = [("mean return", score(result)), ("checkpoint", str(agent.path))]
    if len(agent.seeds) > 1:
        per_seed = [(f"seed {row['seed']}", f"{row['mean_return']:,.1f}") for row in result["per_seed"]]
        rows[1:1] = per_seed
    else:
        rows[1:1] = [("std of return", f"{result['std_return']:,.1f}")]
        rows[2:2] = [("mean length", f"{result['per_seed'][0]['mean_length']:,.1f} steps")]
    if video is not None:
        rows.append(("videos", video))
    say(f"{agent.config.algo} on {agent.config.env_id}")
    print(lines(rows))


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


def load_agent(checkpoint: str, env: str | None, device: str | None, seed: int | None = None) -> Agent:
    """The agent of `--checkpoint`. Warns about damaged checkpoints that had to be skipped."""
    from rl_training.experiment.run.agent import Agent
    from rl_training.experiment.run.checkpoint import resolve

    path = resolve(checkpoint, warn=lambda message: tell(f"warning: {message}"))
    agent = Agent.load(path, device=device or "auto", env=env, seed=seed)
    if env is not None:
        _check_env(agent, env)
    return agent


def _check_env(agent: Agent, env_id: str) -> None:
    """Another environment is fine as long as its spaces are those that the agent was trained on."""
    try:
        agent._spaces()
    except UserError as error:
        raise UserError(f"--env {env_id}: {error}") from None


def _watch(agent: Agent, episodes: int, seed: int, folder: Path | None, deterministic: bool) -> dict[str, Any]:
    """Evaluate with one environment at a time, shown in a window or recorded."""
    import numpy as np

    from rl_training.envs.video import check_mode, recording, require_video
    from rl_training.experiment.run.stats import eval_summary
    from rl_training.ops.tree import tree_map
    from rl_training.runtime.evaluator import Evaluator

    mode = "human" if folder is None else "rgb_array"
    arguments = {**agent.config.env_arguments("evaluation"), "render_mode": mode}
    check_mode(agent.env, agent.config.env_arguments("evaluation"), mode)
    if folder is not None:
        require_video("--video")
    returns: list[list[float]] = []
    lengths: list[list[int]] = []
    for index, trained in enumerate(agent.seeds):
        source = agent.env
        if folder is not None:
            source = recording(source, [folder / f"seed{trained}-episode-{k}.mp4" for k in range(episodes)])
        evaluator = Evaluator(
            agent.algorithm, source, [seed + trained], episodes, arguments, max_envs=1, deterministic=deterministic
        )
        try:
            result = evaluator.run(tree_map(lambda x, i=index: x[i : i + 1], agent.train))
        except Exception as error:
            if "pygame" in type(error).__module__ or "Display" in str(error) or "GLFW" in str(error):
                raise UserError(f"no window can be opened here ({error}); use --video DIR to record instead") from None
            raise
        finally:
            evaluator.close()
        assert result is not None
        returns += result.returns
        lengths += result.lengths
    summary = eval_summary(list(agent.seeds), returns, lengths, bounds=agent.config.score_bounds())
    return {**summary, "std_return": float(np.std(list(itertools.chain(*returns))))}
