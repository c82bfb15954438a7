"""A ring of transitions that a dynamics model generates. Rollouts start at real states and continue from the
*frontier*, the states that they have reached."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_training.data.storage import Batch, Data, Storage, transition_columns
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
    """The newest transitions of `width` parallel rollouts, sampled uniformly.

    It has room for `sets` complete sets of rollouts. A set starts with a new frontier; each of its steps adds up to
    `width` transitions. So the ring grows with the longest rollouts so far, up to those of `longest` steps: memory
    beyond it is not touched, neither by writing nor in a checkpoint. When it grows, new transitions follow those that
    it holds, as in the code of Janner et al. It does not shrink.
    """

    def __init__(self, spec: EnvSpec, width: int, sets: int, longest: int, *, gamma: float) -> None:
        columns = {k: v for k, v in transition_columns(spec).items() if k != "truncated"}
        self.width, self.room = width, width * sets  # for each step of the rollouts
        self.capacity, self.gamma = self.room * longest, gamma
        super().__init__(columns, self.capacity + 1, 1, ring=False)  # transitions that are not kept go to the last row
        self.obs_dim = spec.obs_dim

    def init(self, seeds: int, device: torch.device) -> Data:
        data = super().init(seeds, device)
        # count: transitions held. next: the row that the next one goes to. size: rows of the ring. steps: of this set.
        data |= {name: torch.zeros_like(data["count"]) for name in ("next", "size", "steps")}
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
        else:
            data["steps"].zero_()
        copy_into(data["frontier"], frontier)

    def _append(self, data: Data, rows: Batch, keep: Tensor) -> None:
        steps = data["steps"] + 1
        size = torch.maximum(data["size"], (steps * self.room).clamp(max=self.capacity))  # [S, 1]
        first = torch.where(size > data["size"], data["count"], data["next"])
        order = running_sum(keep.to(torch.int64)) - 1  # [S, R]: number of each row among those that are kept
        slots = torch.where(keep, (first + order) % size, self.capacity)
        stored = {name: data[name] for name in rows}
        for (_, column), (_, value) in zip(tree_items(stored), tree_items(rows), strict=True):
            # Rows that are not kept become zero: they all write the same to the last row, so the order does not matter.
            value = torch.where(keep.view(*keep.shape, *[1] * (value.ndim - 2)), value, torch.zeros_like(value))
            write_rows(column, slots, value)
        added = keep.sum(-1, keepdim=True)
        count = torch.minimum(data["count"] + added, size)
        copy_into(
            {name: data[name] for name in ("count", "next", "size", "steps")},
            {"count": count, "next": (first + added) % size, "size": size, "steps": steps},
        )

    def written(self, data: Data, count: int | None = None) -> Data:
        count = int(data["count"].max()) if count is None else count
        return {**data, **{name: self.first_rows(data[name], self.stride, count) for name in self.columns}}

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        rows = rng.randint(key, (batch_size,), data["count"][0])
        batch = self.read(data, rows, ("obs", "actions", "rewards", "next_obs"))
        batch["discounts"] = torch.where(data["terminated"][rows], 0.0, self.gamma)
        batch["weights"] = torch.ones_like(batch["rewards"])
        batch["indices"] = rows
        return batch

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """Does nothing: sampling is uniform."""
