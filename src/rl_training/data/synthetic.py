"""A ring of transitions that a dynamics model generates. Rollouts start at real states and continue from the
*frontier*, the states that they have reached."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_training.data.storage import Batch, Data, Storage, transition_columns
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.rows import write_rows
from rl_training.ops.tree import copy_into, tree_items
from rl_training.spec import EnvSpec

BLOCK = 128


def running_sum(x: Tensor) -> Tensor:
    """`cumsum` over the last axis, in blocks: inductor cannot compile a long scan for CUDA together with the operations
    before it (pytorch issue 180221)."""
    size = x.shape[-1]
    if size <= BLOCK:
        return torch.cumsum(x, -1)
    blocks = -(-size // BLOCK)
    padded = nn.functional.pad(x, (0, blocks * BLOCK - size))
    within = torch.cumsum(padded.reshape(*x.shape[:-1], blocks, BLOCK), -1)
    totals = within[..., -1]
    before = running_sum(totals) - totals  # [..., blocks]
    return (within + before.unsqueeze(-1)).flatten(-2)[..., :size]


class SyntheticReplay(Storage):
    """The last `capacity` transitions of `width` parallel rollouts, sampled uniformly."""

    def __init__(self, spec: EnvSpec, capacity: int, width: int, *, gamma: float) -> None:
        if capacity < width:
            raise UserError(
                f"a synthetic buffer of {capacity} transitions cannot hold one step of {width} rollouts; make it larger"
            )
        columns = {k: v for k, v in transition_columns(spec).items() if k != "truncated"}
        super().__init__(columns, capacity + 1, 1, ring=False)  # transitions that are not kept go to the last row
        self.capacity, self.width, self.gamma = capacity, width, gamma
        self.obs_dim = spec.obs_dim

    def init(self, seeds: int, device: torch.device) -> Data:
        data = super().init(seeds, device)
        data["frontier"] = {
            "obs": torch.zeros(seeds, self.width, self.obs_dim, device=device),
            "alive": torch.zeros(seeds, self.width, dtype=torch.bool, device=device),
        }
        return data

    def append(self, data: Data, rows: Batch) -> None:
        """`rows` has the new frontier and, after a step of the rollouts, transitions [S, R, ...] and `keep`."""
        rows = dict(rows)
        frontier = rows.pop("frontier")
        if rows:  # before the frontier is replaced: their observations may be the old frontier itself
            self._append(data, rows, rows.pop("keep"))
        copy_into(data["frontier"], frontier)

    def _append(self, data: Data, rows: Batch, keep: Tensor) -> None:
        order = running_sum(keep.to(torch.int64)) - 1  # [S, R]: number of each row among those that are kept
        slots = torch.where(keep, (data["count"] + order) % self.capacity, self.capacity)
        stored = {name: data[name] for name in rows}
        for (_, column), (_, value) in zip(tree_items(stored), tree_items(rows), strict=True):
            # Rows that are not kept become zero: they all write the same to the last row, so the order does not matter.
            value = torch.where(keep.view(*keep.shape, *[1] * (value.ndim - 2)), value, torch.zeros_like(value))
            write_rows(column, slots, value)
        data["count"].add_(keep.sum(-1, keepdim=True))

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        held = torch.clamp(data["count"][0], max=self.capacity)
        rows = rng.randint(key, (batch_size,), held)
        batch = self.read(data, rows, ("obs", "actions", "rewards", "next_obs"))
        batch["discounts"] = torch.where(data["terminated"][rows], 0.0, self.gamma)
        batch["weights"] = torch.ones_like(batch["rewards"])
        batch["indices"] = rows
        return batch

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """Does nothing: sampling is uniform."""
