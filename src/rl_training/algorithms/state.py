"""What `train_step` takes and returns: the training state, and the outcome of an update."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rl_training.data.storage import Batch
from rl_training.ops.tree import tree_leaves

Obs = Any  # a tensor, or a dict of tensors
Tree = Any  # tensors in nested dicts and tuples
Choice = tuple[Tree, Tensor, dict[str, Tensor]]  # carry, actions [B, ...], columns to store with the transitions


class TrainState(NamedTuple):
    """Everything that learning changes. Every leaf is a tensor, with a leading seed axis inside a study."""

    params: dict[str, Tensor]  # network -> flat vector
    target: dict[str, Tensor]  # the slow copies
    opt: dict[str, dict[str, Tensor]]  # optimiser moments
    extra: dict[str, Any]  # normalisers, temperatures, ...
    step: Tensor  # gradient steps taken, int64
    progress: Tensor  # share of the planned environment steps taken, for schedules


class Aux(NamedTuple):
    """What an update returns beside the new state."""

    metrics: dict[str, Tensor]
    priority: Tensor | None = None  # per sample, for prioritised replay
    rows: Batch | None = None  # rows that the phase's sink stores


def count_rows(obs: Obs) -> int:
    """The number of observations in a batch."""
    return tree_leaves(obs)[0].shape[0]  # not len(): that would fix the number in an exported graph
