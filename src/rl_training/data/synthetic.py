"""A ring of transitions that a model made up, filled by a phase: rollouts branch off real states and go on from the
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
    """`cumsum` over the last axis, in blocks: inductor cannot compile a long scan for CUDA together with what goes
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
    """The last `capacity` transitions of `width` rollouts that run abreast; every one kept is drawn equally often."""

    def __init__(self, spec: EnvSpec, capacity: int, width: int, *, gamma: float) -> None:
        if capacity < width:
            raise UserError(
                f"a synthetic buffer of {capacity} cannot hold one step of {width} rollouts; make it larger"
            )
        columns = {k: v for k, v in transition_columns(spec).items() if k != "truncated"}
        super().__init__(columns, capacity + 1, 1, ring=False)  # the last row takes what is not kept
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
        """`rows` has the new frontier and, after a step of the rollouts, the transitions [S, R, ...] with `keep`."""
        rows = dict(rows)
        frontier = rows.pop("frontier")
        if rows:  # first: the observations among them may be the old frontier itself
            self._append(data, rows, rows.pop("keep"))
        copy_into(data["frontier"], frontier)

    def _append(self, data: Data, rows: Batch, keep: Tensor) -> None:
        order = running_sum(keep.to(torch.int64)) - 1  # [S, R]: the number of each kept row among them
        slots = torch.where(keep, (data["count"] + order) % self.capacity, self.capacity)
        stored = {name: data[name] for name in rows}
        for (_, column), (_, value) in zip(tree_items(stored), tree_items(rows), strict=True):
            # What is not kept becomes zero: several rows then write the same to the last place, in whatever order.
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
        """Uniform: errors have no use."""
