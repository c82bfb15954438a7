"""Transition storage as a tree of tensors [S, N * rows, ...] on the training device, for S seeds of N environments.

Rows are the raw one-step transitions (true next observation, terminated and truncated apart). n-step returns,
discounts and sequences are computed when a batch is read, so that gamma, n and truncation live in exactly one place.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.ops.rows import write_rows
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import ArraySpec, EnvSpec

Data = dict[str, Any]  # column -> tensor (or a dict of tensors for mixed observations)
Batch = dict[str, Any]  # column -> tensor [B, ...], as an update reads it
Columns = dict[str, Any]  # column -> (shape, dtype), or a dict of those


def action_column(spec: EnvSpec) -> tuple[tuple[int, ...], torch.dtype]:
    action = spec.action
    if action.kind == "box":
        return (action.dim,), torch.float32
    return (() if action.discrete else (action.dim,)), torch.int64


def observation_columns(spec: EnvSpec) -> Any:
    def column(array: ArraySpec) -> tuple[tuple[int, ...], torch.dtype]:
        return array.shape, torch.uint8 if array.dtype == "uint8" else torch.float32

    if isinstance(spec.observation, dict):
        return {name: column(array) for name, array in spec.observation.items()}
    return column(spec.observation)


def transition_columns(spec: EnvSpec) -> Columns:
    return {
        "obs": observation_columns(spec),
        "next_obs": observation_columns(spec),
        "actions": action_column(spec),
        "rewards": ((), torch.float32),
        "terminated": ((), torch.bool),
        "truncated": ((), torch.bool),
    }


def _is_column(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], torch.dtype)


def map_columns(fn: Any, columns: Any) -> Any:
    return fn(*columns) if _is_column(columns) else {k: map_columns(fn, v) for k, v in columns.items()}


def column_bytes(columns: Any) -> int:
    """Bytes of one row."""
    sizes: list[int] = []
    map_columns(lambda shape, dtype: sizes.append(math.prod(shape) * dtype.itemsize), columns)
    return sum(sizes)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU the system provides the memory only where something is written, so that a buffer that is never
    filled costs nothing (`torch.zeros` writes to all of it)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device, where that can be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """Refuse before allocating what cannot fit, in the user's words."""
    free = available_memory(device)
    if free is not None and needed > 0.9 * free:
        raise UserError(
            f"{what} needs {needed / 2**30:.1f} GiB but {device} has {free / 2**30:.1f} GiB free;"
            " lower buffer_size (n_steps for on-policy algorithms) or the number of seeds"
        )


class Storage:
    """A ring of `rows` transitions for each of N environments; every environment has its own write position.

    A row that is not a transition (`advance` False) is written but not counted: the next one overwrites it. One spare
    row takes it, so that nothing valid is lost. With `rows` exactly filled and read whole, the same class is the
    rollout.
    """

    def __init__(self, columns: Columns, rows: int, num_envs: int, *, ring: bool = True) -> None:
        self.columns = columns
        self.rows = rows
        self.num_envs = num_envs
        self.stride = rows + 1 if ring else rows  # rows held for each environment

    @property
    def row_columns(self) -> Columns:
        """What `write` takes."""
        return self.columns

    def nbytes(self, seeds: int) -> int:
        return column_bytes(self.columns) * seeds * self.num_envs * self.stride

    def init(self, seeds: int, device: torch.device) -> Data:
        require_memory(self.nbytes(seeds), device, f"storage for {seeds} x {self.num_envs * self.rows:,} transitions")
        total = self.num_envs * self.stride
        data: Data = map_columns(lambda shape, dtype: zeros((seeds, total, *shape), dtype, device), self.columns)
        data["count"] = torch.zeros((seeds, self.num_envs), dtype=torch.int64, device=device)
        return data

    def slots(self, count: Tensor) -> Tensor:
        """Row of each environment that its `count`-th transition goes to: [..., N] -> [..., N]."""
        base = torch.arange(self.num_envs, device=count.device) * self.stride
        return base + count % self.stride

    def write(self, data: Data, row: Data, advance: Tensor) -> Tensor:
        """Write one transition of every environment ([S, N, ...]) in place; returns the flat rows written [S, N]."""
        return self.put(data, row, advance, {})

    def put(self, data: Data, row: Data, advance: Tensor, corrections: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """`write`, and corrections of rows that are there already.

        `corrections`: by name of a column, other rows [S, N] of it and their values. A column is written to once: a
        compiled graph that writes to it twice copies all of it.
        """
        slots = self.slots(data["count"])
        stored = {name: data[name] for name in row}
        for (name, column), (_, value) in zip(tree_items(stored), tree_items(row), strict=True):
            rows = slots
            if name in corrections:
                others, values = corrections[name]
                rows, value = torch.cat([others, slots], -1), torch.cat([values, value], 1)
            write_rows(column, rows, value)
        data["count"].add_(advance)
        return slots

    def lost_ends(self, data: Data, row: Data, advance: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Corrections for `put`: an episode that was lost (its end is no transition) ends with its newest row, or a
        reader that goes from row to row would walk on into the next episode."""
        newest = self.slots(data["count"] - 1)
        lost = row["truncated"].to(torch.bool) & ~advance
        return {"truncated": (newest, data["truncated"].gather(-1, newest) | lost)}

    def cut(self, data: Data) -> None:
        """The running episodes go on no further than the last transition stored: it counts as truncated."""
        rows = self.slots(data["count"] - 1)  # where nothing is stored: the spare row
        data["truncated"].scatter_(-1, rows, ~data["terminated"].gather(-1, rows))

    def written(self, data: Data, count: int | None = None) -> Data:
        """What has been written so far, or when an environment has stored `count` rows: views [S, N, rows, ...]. So a
        checkpoint is no larger than what is in the buffer."""
        if self.stride == self.rows:  # a rollout: read only when it is full
            return data
        count = int(data["count"].max()) if count is None else count
        return {**data, **{name: self.first_rows(data[name], self.stride, count + 1) for name in self.columns}}

    def first_rows(self, tree: Any, each: int, rows: int) -> Any:
        """The first `rows` of the `each` that every environment has in the columns of a tree."""
        return tree_map(lambda column: column.unflatten(1, (self.num_envs, each))[:, :, :rows], tree)

    def read(self, data: Data, rows: Tensor, names: tuple[str, ...]) -> Data:
        """Gather rows [B] of one seed's data (no seed axis)."""
        return {name: tree_map(lambda column: column[rows], data[name]) for name in names}

    def whole(self, data: Data) -> Data:
        """All rows of one seed's rollout, time-major: [T, N, ...]."""
        columns = {k: v for k, v in data.items() if k != "count"}
        return tree_map(lambda c: c.unflatten(0, (self.num_envs, self.stride)).transpose(0, 1), columns)
