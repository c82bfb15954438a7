"""Evidence of a numerical accident: the batch and the update that first gave NaN or infinity."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.runtime.learners.rollout import RolloutLearner
from rl_training.runtime.loops.base import Loop


@torch.no_grad()
def save_nan_dump(run_dir: Path, loop: Loop, index: int, step: int) -> Path:
    """Write the batch of update `step` (its rows follow from the random key) and return the directory."""
    learner = loop.learner
    train = tree_map(lambda x: x[index], learner.train)
    tensors: dict[str, Tensor] = dict(tree_items(train.params, "params"))
    if isinstance(learner, ReplayLearner) and len(learner.phases) == 1:  # else it is not known whose update it was
        phase = learner.phases[0]
        data = tree_map(lambda x: x[index], learner.source_data(learner.tree, phase))
        at_step = train._replace(step=torch.full_like(train.step, step))
        tensors |= dict(tree_items(learner.sample_one(phase, at_step, learner.tree["keys"][index], *data), "batch"))
    elif isinstance(learner, RolloutLearner):
        tensors |= dict(tree_items(tree_map(lambda x: x[index], learner.scratch["rollout"]["batch"]), "batch"))
    directory = run_dir / f"nan_dump_seed{loop.seeds[index]}_update{step}"
    directory.mkdir(exist_ok=True)
    save_file({k: v.contiguous().cpu().clone() for k, v in tensors.items()}, directory / "tensors.safetensors")
    bad = sorted(k for k, v in tensors.items() if v.is_floating_point() and not torch.isfinite(v).all())
    note = {"seed": loop.seeds[index], "update": step, "env_steps": loop.env_steps, "non_finite_tensors": bad}
    (directory / "note.json").write_text(json.dumps(note, indent=2))
    return directory
