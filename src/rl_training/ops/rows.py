"""Writing rows of a large tensor in place, at a cost that does not depend on its size."""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows(column: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write `values` [S, K, ...] to `rows` [S, K] of a column [S, T, ...], in place.

    A compiled graph turns a write in place into a new tensor and a copy back, and finds out later that neither is
    needed. On a GPU torch 2.11 does not find out for a write to a view: every step then copies the whole column,
    gigabytes for images. So the column itself is indexed there, and all writes of a step become one kernel. On a CPU a
    view is as good, and its flat index is faster.
    """
    seeds, total = column.shape[:2]
    values = values.to(column.dtype)
    seed = torch.arange(seeds, device=rows.device).unsqueeze(-1)
    if column.device.type == "cuda":
        column.index_put_((seed, rows), values)
    else:
        flat = column.view(seeds * total, *column.shape[2:])
        flat.index_copy_(0, (seed * total + rows).flatten(), values.flatten(0, 1))
