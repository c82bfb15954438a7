"""Start a run from the networks of another one: fine-tuning in the environment after offline training, or transfer.

The new run takes over parameters, target networks, optimiser moments, temperatures and normalisers; its step counter
starts at 0. Its own checkpoints are complete, so resuming it does not need the old run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_training import registry
from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.checkpoint import load_checkpoint, resolve
from rl_training.experiment.run.config import TrainConfig, merge
from rl_training.ops.tree import tree_items

TAKEN = ("params", "target", "opt", "extra")
SUFFIX = "_online"


@torch.no_grad()
def start_from(path: str | Path, algorithm: Algorithm[Any], train: TrainState, seeds: Sequence[int]) -> None:
    """Copy the networks of a checkpoint into `train`, whose leaves have a leading seed axis."""
    other = Agent.load(path, device="cpu")
    _check(path, algorithm, other)
    rows = _rows(path, other.seeds, seeds)
    theirs = dict(tree_items({name: getattr(other.train, name) for name in TAKEN}))
    for name, leaf in tree_items({name: getattr(train, name) for name in TAKEN}):
        source = theirs.get(name)
        if source is None and name.startswith("target."):  # no slow copy was saved: start with the network itself
            source = theirs["params." + name.removeprefix("target.")]
        if source is not None and source.shape[1:] == leaf.shape[1:]:
            leaf.copy_(source[rows])


def _rows(path: str | Path, theirs: Sequence[int], ours: Sequence[int]) -> list[int]:
    """For each of our seeds, the index of the agent to start from."""
    if len(theirs) == 1:
        return [0] * len(ours)
    if missing := [seed for seed in ours if seed not in theirs]:
        raise UserError(
            f"init_from: {path} is a study of the seeds {', '.join(map(str, theirs))}; it has no agent for seed"
            f" {missing[0]}, so choose among its seeds"
        )
    return [list(theirs).index(seed) for seed in ours]


def _check(path: str | Path, algorithm: Algorithm[Any], other: Agent) -> None:
    """Every network of ours needs one of the same name with the same layers."""
    for name, module in algorithm.modules.items():
        theirs = other.algorithm.modules.get(name)
        shapes, found = ([tuple(p.shape) for p in m.parameters()] if m is not None else [] for m in (module, theirs))
        if shapes != found:
            what = f"no network '{name}'" if theirs is None else f"a network '{name}' with layers of other sizes"
            raise UserError(
                f"init_from: {path} ({other.config.algo} on {other.config.env_id}) has {what}, so"
                f" {algorithm.name} on {algorithm.spec.env_id} cannot start from it (see hidden_sizes and num_critics)"
            )


def fine_tune_config(path: str | Path, total_timesteps: int, **changes: Any) -> TrainConfig:
    """The configuration that continues an offline agent in its environment, with its settings and its dataset.

    Schedules would continue at their final value, so they are replaced by their initial value.
    """
    found = resolve(path)
    meta = load_checkpoint(found, stems=()).meta
    config = TrainConfig.from_file(meta["config"])
    name = config.algo + SUFFIX
    if name not in registry.entries():
        able = sorted(n.removesuffix(SUFFIX) for n in registry.entries() if n.endswith(SUFFIX))
        raise UserError(
            f"{config.algo} has no online version; these algorithms have one: {', '.join(able)}."
            f" `rl-training train --init-from {path}` starts any algorithm that has the same networks"
        )
    cls = registry.entry(name).load()
    kept: dict[str, Any] = {}
    for key, value in config.algo_kwargs.items():
        if key in cls.Hyper.model_fields:
            scheduled = isinstance(value, dict) and {"kind", "start"} <= set(value)
            kept[key] = value["start"] if scheduled else value
    shared = ("seed", "seeds", "env_kwargs", "eval_episodes", "eval_deterministic")
    base = {field: getattr(config, field) for field in shared}
    base |= {"env_id": config.env_id, "algo": name, "init_from": str(found), "algo_kwargs": kept}
    base["total_timesteps"] = total_timesteps
    return TrainConfig.from_file(merge(base, changes))
