"""What a run needs to continue: a full checkpoint in a run directory, and a budget that is not used up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from rl_training.errors import UserError, explain
from rl_training.experiment.run import run_dir as runs
from rl_training.experiment.run.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_errors,
    load_checkpoint,
    resolve,
)
from rl_training.experiment.run.config import TrainConfig
from rl_training.imports import allow_address


def open_for_resume(
    path: str | Path, total_timesteps: int | None = None, warn: Callable[[str], None] | None = None,
    cluster: str | None = None,
) -> tuple[Checkpoint, TrainConfig]:  # fmt: skip
    """The checkpoint that a run continues from and its configuration, with another budget or cluster if given."""
    found = resolve(path, warn=warn) if warn else resolve(path)
    checkpoint = load_checkpoint(found)
    if checkpoint.meta.get("kind") != "full":
        raise UserError(
            f"{found} contains only a policy (that of the best evaluation); resume from the run directory instead"
        )
    if found.parent.name != "checkpoints":
        raise UserError(f"{found} is not inside a run: move it into the checkpoints/ directory of one to resume it")
    with checkpoint_errors(found, checkpoint.manifest.get("versions")):
        config = TrainConfig.from_file(checkpoint.meta["config"])
        config.hyper()  # an older version may have had other settings
        _check_meta(checkpoint)
        taken = int(checkpoint.meta["counters"]["env_steps"])
    if total_timesteps is not None:
        config = config.model_copy(update={"total_timesteps": total_timesteps})
    if cluster is not None:
        if config.cluster is None:
            raise UserError("this run is not distributed: continue it without --cluster")
        allow_address(cluster)
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": cluster})})
    if config.total_timesteps <= taken and runs.read_status(found.parent.parent) in ("completed", "stopped"):
        raise UserError(
            f"this run already took {taken:,} of {config.total_timesteps:,} steps;"
            " give a larger --total-timesteps to continue it"
        )
    return checkpoint, config


class _Evaluation(BaseModel):
    step: int = Field(ge=0)
    mean_return: float
    iqm: float
    ci95: tuple[float, float]
    episodes: int = Field(ge=1)
    per_seed: list[dict[str, Any]]


class _Meta(BaseModel):
    """What a run reads from the metadata of a full checkpoint, besides its config and counters."""

    best_eval: _Evaluation | None
    last_eval: _Evaluation | None
    evaluated_at: int
    owed: list[Literal["log", "eval"]]
    elapsed_s: float = Field(ge=0.0, allow_inf_nan=False)
    metrics_position: int = Field(ge=0)
    callbacks: dict[str, Any]


def _check_meta(checkpoint: Checkpoint) -> None:
    try:
        _Meta.model_validate(checkpoint.meta)
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint.path} is not a checkpoint of a training run, or was written by another version:"
            f" {explain(error, _Meta)}"
        ) from None


def check_dataset(checkpoint: Checkpoint, content_hash: str | None) -> None:
    """Refuse to continue on other data than the run was trained on."""
    saved = checkpoint.meta.get("dataset_hash")
    if saved != content_hash:
        raise UserError(
            f"the dataset or expert is not the one that this run trained on: its content hash is {content_hash}, and"
            f" the checkpoint has {saved}; restore the old file or start a new run"
        )


def saved_env_state(counters: dict[str, Any]) -> str:
    """What a resume can do with the environments that a checkpoint's counters describe."""
    if not counters:
        return "not saved"
    meta = counters.get("env_state") or {}
    methods = [sub.get("method") for sub in meta.get("sub_envs", [meta])]
    return "exact" if all(method in ("state", "replay") for method in methods) else "restarted"
