"""How stored transitions are saved: the only place that knows the names and shapes in the replay file of a checkpoint.

`rows.*` are the columns, [S, N, rows, ...] for S seeds of N environments, as far as they have been written. `index.*`
is everything else that a storage keeps: counts, priorities, recurrent states. Older checkpoints hold whole columns,
[S, N * rows, ...]; both layouts can be read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from rl_training.data.dataset import REQUIRED
from rl_training.data.storage import Data, Storage
from rl_training.ops.tree import fill, tree_items

ROWS, INDEX = "rows", "index"


def saved_tensors(store: Storage, data: Data, count: int | None = None) -> dict[str, Tensor]:
    """The stored data by name: as it is now, or as it will be when an environment has stored `count` rows."""
    rows, index = _parts(store, store.written(data, count))
    return {**dict(tree_items(rows, ROWS)), **dict(tree_items(index, INDEX))}


def restore(store: Storage, data: Data, tensors: dict[str, Tensor]) -> None:
    """Copy saved tensors into `data`."""
    for part, prefix in zip(_parts(store, data), (ROWS, INDEX)):
        fill(part, tensors, prefix, envs=store.num_envs)


def _parts(store: Storage, data: Data) -> tuple[Data, Data]:
    """(the columns, everything else)"""
    rows = {name: value for name, value in data.items() if name in store.columns}
    return rows, {name: value for name, value in data.items() if name not in store.columns}


def saved_transitions(tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """The transitions of the first seed, oldest first, environment after environment; None if there are none.

    Each environment's last transition ends its episode: it counts as truncated unless it is terminated.
    """
    columns = {name.removeprefix(f"{ROWS}."): x[0] for name, x in tensors.items() if name.startswith(f"{ROWS}.")}
    if not any(name.partition(".")[0] == "next_obs" for name in columns):
        return None
    if columns["rewards"].ndim == 2:
        columns = {name: x.flatten(0, 1) for name, x in columns.items()}
    count = tensors[f"{INDEX}.count"][0].numpy()  # [N]
    each = len(columns["rewards"]) // len(count)  # rows of one environment, one of them spare
    order = np.concatenate([
        n * each + np.arange(max(0, total - each + 1), total) % each for n, total in enumerate(count)
    ]).astype(np.int64)  # fmt: skip
    out: dict[str, Any] = {}
    for name, x in columns.items():
        column, _, part = name.partition(".")
        if part:
            out.setdefault(column, {})[part] = x.numpy()[order]
        else:
            out[column] = x.numpy()[order]
    filled = np.minimum(count, each - 1)
    last = np.cumsum(filled)[filled > 0] - 1
    out["truncated"][last] |= ~out["terminated"][last]
    return {name: out[name] for name in REQUIRED}
