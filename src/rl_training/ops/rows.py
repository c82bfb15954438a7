"""Writing rows of a large tensor in place, at a cost that does not depend on its size."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.ops.operations import operation


def write_rows(column: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write `values` [S, K, ...] to `rows` [S, K] of a column [S, T, ...], in place.

    A compiled graph turns a write in place into a new tensor and a copy back, and finds out later that neither is
    needed. For a view on a GPU some versions of torch do not: every step then copies the whole column, gigabytes for
    images. As an operation of its own the write is never split.
    """
    seeds, total = column.shape[:2]
    first = torch.arange(seeds, device=rows.device).unsqueeze(-1) * total
    flat, values = (first + rows).flatten(), values.flatten(0, 1).to(column.dtype)
    if column.device.type == "cuda":
        _write_rows(column, flat, values)
    else:
        _write(column, flat, values)


def _write(column: Tensor, rows: Tensor, values: Tensor) -> None:
    column.view(-1, *column.shape[2:]).index_copy_(0, rows, values)


def _shapes(column: Tensor, rows: Tensor, values: Tensor) -> None:
    """It returns nothing."""


_write_rows = operation(
    "write_rows(Tensor(a!) column, Tensor rows, Tensor values) -> ()", _write, "CPU", "CUDA", shapes=_shapes
)
