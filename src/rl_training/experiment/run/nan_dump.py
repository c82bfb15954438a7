"""Watch for NaN and infinity in training, and keep the batch of the update that first gave one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_training.errors import NonFiniteError
from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.loops.base import Loop


def check_finite(run_dir: Path, loop: Loop) -> None:
    """Raise NonFiniteError, and write a dump, if an update gave NaN or infinity. Synchronises with the device."""
    steps = loop.bad_steps()
    # The largest number is finite exactly when all are; one operation for each network.
    largest = [torch.linalg.vector_norm(flat, math.inf, -1) for flat in loop.learner.train.params.values()]
    for i, values in enumerate(zip(*(x.tolist() for x in largest))):
        step = steps[i]
        if step < 0 and not all(map(math.isfinite, values)):  # by the last update, whose metrics were still finite
            step = max(0, loop.gradient_steps - 1)
        if step >= 0:
            path = save_nan_dump(run_dir, loop, i, step)
            raise NonFiniteError(
                f"update {step} of seed {loop.seeds[i]} gave NaN or infinity; the batch is in {path}, the last good"
                " checkpoint is untouched (a smaller learning_rate or max_grad_norm often helps)"
            )


@torch.no_grad()
def save_nan_dump(run_dir: Path, loop: Loop, index: int, step: int) -> Path:
    """Write the parameters and the batch of update `step` of one seed, and return the directory."""
    params = tree_map(lambda x: x[index], loop.learner.train.params)
    tensors: dict[str, Tensor] = dict(tree_items(params, "params"))
    tensors |= dict(tree_items(loop.learner.batch_of_update(index, step), "batch"))
    directory = run_dir / f"nan_dump_seed{loop.seeds[index]}_update{step}"
    directory.mkdir(exist_ok=True)
    save_file({k: v.contiguous().cpu().clone() for k, v in tensors.items()}, directory / "tensors.safetensors")
    bad = sorted(k for k, v in tensors.items() if v.is_floating_point() and not torch.isfinite(v).all())
    note = {"seed": loop.seeds[index], "update": step, "env_steps": loop.env_steps, "non_finite_tensors": bad}
    (directory / "note.json").write_text(json.dumps(note, indent=2))
    return directory
