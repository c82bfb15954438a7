"""Replay: uniform or prioritised sampling of n-step transitions from `Storage`, as pure functions on its tensors."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from rl_training.data.frames import Frames
from rl_training.data.storage import Batch, Columns, Data, Storage
from rl_training.ops import rng
from rl_training.ops.returns import n_step_window
from rl_training.ops.rows import write_rows


class Relabelling(Protocol):
    """Replaces goals and rewards of a batch when it is read (her.py)."""

    def init(self, store: Replay, seeds: int, device: torch.device) -> Data: ...

    def write(self, store: Replay, data: Data, row: Data, advance: Tensor) -> None: ...

    def relabel(self, store: Replay, data: Data, env: Tensor, time: Tensor, batch: Batch, key: Tensor) -> Batch: ...


class Replay(Storage):
    """Reads batches {obs, actions, rewards, next_obs, discounts, weights, indices}.

    rewards: sum of up to n discounted rewards; the walk stops at the end of the episode or of the data.
    discounts: gamma^k x (1 - terminated) for the k steps walked; next_obs: the observation after them.
    With `hindsight`, goals and rewards of some rows are replaced (her.py); with `frames`, each image is held once
    (frames.py).
    """

    def __init__(
        self, columns: Columns, capacity: int, num_envs: int, *, gamma: float, n_step: int = 1,
        hindsight: Relabelling | None = None, frames: Frames | None = None,
    ) -> None:  # fmt: skip
        if frames is not None:
            columns = {k: v for k, v in columns.items() if k not in ("obs", "next_obs")}
        super().__init__(columns, max(1, math.ceil(capacity / num_envs)), num_envs)
        self.gamma, self.n_step, self.hindsight, self.frames = gamma, n_step, hindsight, frames
        self.walks = n_step > 1  # is anything summed from row to row?

    def init(self, seeds: int, device: torch.device) -> Data:
        data = super().init(seeds, device)
        if self.hindsight is not None:
            data["her"] = self.hindsight.init(self, seeds, device)
        if self.frames is not None:
            data.update(self.frames.init(self, seeds, device))
        return data

    def nbytes(self, seeds: int) -> int:
        return super().nbytes(seeds) + (self.frames.nbytes(self, seeds) if self.frames is not None else 0)

    def written(self, data: Data, count: int | None = None) -> Data:
        out = super().written(data, count)
        return out if self.frames is None else {**out, "ring": self.frames.written(self, data, count or 0)}

    def read(self, data: Data, rows: Tensor, names: tuple[str, ...]) -> Data:
        if self.frames is None:
            return super().read(data, rows, names)
        images = {name: self.frames.read(self, data, rows, name) for name in names if name in ("obs", "next_obs")}
        return {**super().read(data, rows, tuple(name for name in names if name not in images)), **images}

    def write(self, data: Data, row: Data, advance: Tensor) -> Tensor:
        corrections: dict[str, tuple[Tensor, Tensor]] = {}
        if self.hindsight is not None:
            self.hindsight.write(self, data, row, advance)
        if self.walks:
            corrections = self.lost_ends(data, row, advance)
        if self.frames is not None:
            self.frames.write(self, data, row, advance)
            row = {k: v for k, v in row.items() if k not in ("obs", "next_obs")}
        return self.put(data, row, advance, corrections)

    def oldest(self, data: Data) -> Tensor:
        """Logical number of the oldest row still held, of each environment."""
        if self.frames is not None:
            held: Tensor = data["frames"]["oldest"]
            return held
        return torch.clamp(data["count"] - self.rows, min=0)

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        """A uniform batch of one seed's data."""
        u = rng.bits(key, (2, batch_size)) >> 32 & 0xFFFFFFFF  # 32 bits each for the environment and the time
        env = (u[0] * self.num_envs) >> 32
        count = data["count"][env]
        oldest = self.oldest(data)[env]
        time = oldest + ((u[1] * (count - oldest)) >> 32)
        batch = self.transitions(data, env, time, key)
        batch["weights"] = torch.ones_like(batch["rewards"])
        return batch

    def window(self, data: Data, env: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the n steps from `time` of `env` on, and which of them are there: [B, n] each."""
        ahead = time.unsqueeze(-1) + torch.arange(self.n_step, device=time.device)
        rows = (env * self.stride).unsqueeze(-1) + ahead % self.stride
        return rows, ahead < data["count"][env].unsqueeze(-1)

    def transitions(self, data: Data, env: Tensor, time: Tensor, key: Tensor) -> Batch:
        """The n-step transitions that start at logical `time` of environment `env`: [B] each."""
        base = env * self.stride
        rows = base + time % self.stride
        stored = dict.fromkeys(("obs", *self.columns))
        batch = self.read(data, rows, tuple(k for k in stored if k not in ("next_obs", "terminated", "truncated")))
        if self.n_step == 1:
            batch["next_obs"] = self.read(data, rows, ("next_obs",))["next_obs"]
            batch["discounts"] = torch.where(data["terminated"][rows], 0.0, self.gamma)
        else:
            window, available = self.window(data, env, time)
            batch["rewards"], batch["discounts"], last = n_step_window(
                data["rewards"][window], data["terminated"][window], data["truncated"][window], available, self.gamma
            )
            final = base + (time + last) % self.stride
            batch["next_obs"] = self.read(data, final, ("next_obs",))["next_obs"]
        batch["indices"] = rows
        if self.hindsight is not None:
            batch = self.hindsight.relabel(self, data, env, time, batch, rng.fold(key, 1))
        return batch

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """Take the outcome of an update of all seeds, [S, B] each, in place (uniform replay has no use for it)."""


def stratified(key: Tensor, count: int) -> Tensor:
    """Numbers in [0, 1), one in each of `count` equal parts."""
    return (torch.arange(count, device=key.device) + rng.uniform(key, (count,))) / count


def new_priorities(data: Data, priority: Tensor | None, alpha: float, eps: float) -> Tensor:
    """The errors of a batch [S, B] as priorities; the highest one so far is kept in `data`, in place."""
    if priority is None:
        raise ValueError("prioritised replay needs the algorithm to return priorities")
    value = torch.pow(priority.abs() + eps, alpha)
    data["max_priority"].copy_(torch.maximum(data["max_priority"], value.amax(-1)))
    return value


class PrioritizedReplay(Replay):
    """Proportional prioritisation (Schaul et al. 2016): P(i) = p_i^alpha / sum, weights (N P(i))^-beta / max.

    The sum tree has two levels: priorities, and the sum of each block of about sqrt(rows). Both levels are searched by
    cumulative sums and a touched block is summed again, so that there are few operations, all batched, and no drift.
    """

    def __init__(
        self, columns: Columns, capacity: int, num_envs: int, *, gamma: float, n_step: int = 1, alpha: float = 0.6,
        beta: float = 0.4, eps: float = 1e-6, hindsight: Relabelling | None = None, frames: Frames | None = None,
    ) -> None:  # fmt: skip
        super().__init__(columns, capacity, num_envs, gamma=gamma, n_step=n_step, hindsight=hindsight, frames=frames)
        self.alpha, self.beta, self.eps = alpha, beta, eps
        total = self.num_envs * self.stride
        self.block = 2 ** max(3, round(math.log2(total) / 2))
        self.blocks = math.ceil(total / self.block)

    def init(self, seeds: int, device: torch.device) -> Data:
        data = super().init(seeds, device)
        data["priority"] = torch.zeros(seeds, self.blocks * self.block, device=device)
        data["block_sum"] = torch.zeros(seeds, self.blocks, device=device)
        data["max_priority"] = torch.ones(seeds, device=device)
        return data

    def _set(self, data: Data, rows: Tensor, value: Tensor) -> None:
        """Write priorities [S, K] in place, then the sums of the blocks they lie in."""
        write_rows(data["priority"], rows, value)
        touched = rows // self.block
        in_block = touched.unsqueeze(-1) * self.block + torch.arange(self.block, device=rows.device)  # [S, K, block]
        sums = data["priority"].gather(-1, in_block.flatten(1)).unflatten(-1, (-1, self.block)).sum(-1)
        data["block_sum"].scatter_(-1, touched, sums)

    def write(self, data: Data, row: Data, advance: Tensor) -> Tensor:
        spare = self.slots(data["count"] + 1)  # the row that the next write overwrites: not to be sampled any more
        oldest = None if self.frames is None else self.oldest(data).clone()
        slots = super().write(data, row, advance)
        top = torch.where(advance, data["max_priority"].unsqueeze(-1), 0.0)
        if oldest is None:
            cleared = torch.where(advance, 0.0, data["priority"].gather(-1, spare))
            self._set(data, torch.cat([slots, spare], -1), torch.cat([top, cleared], -1))
        else:
            rows, value = self._without_frames(data, oldest, slots, top)
            self._set(data, torch.cat([slots, rows], -1), torch.cat([top, value], -1))
        return slots

    def _without_frames(self, data: Data, oldest: Tensor, slots: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """Rows whose frames a write took away, with the priority 0: [S, K] each. In place of rows that are still
        complete, the new row of the environment is named again, with its own priority."""
        assert self.frames is not None
        ahead = torch.arange(1 + self.frames.lost_at_once, device=oldest.device)
        times = oldest.unsqueeze(-1) + ahead  # [S, N, ahead]
        gone = times < self.oldest(data).unsqueeze(-1)
        base = (torch.arange(self.num_envs, device=oldest.device) * self.stride).unsqueeze(-1)
        rows = torch.where(gone, base + times % self.stride, slots.unsqueeze(-1))
        return rows.flatten(1), torch.where(gone, 0.0, top.unsqueeze(-1)).flatten(1)

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        block_end = torch.cumsum(data["block_sum"], -1)
        total = block_end[-1]
        mass = torch.minimum(stratified(key, batch_size) * total, total * (1.0 - 1e-6))
        block = (block_end.unsqueeze(0) <= mass.unsqueeze(-1)).sum(-1).clamp(max=self.blocks - 1)  # [B]
        inside = torch.cumsum(data["priority"].view(self.blocks, self.block)[block], -1)  # [B, block]
        rest = mass - (block_end[block] - data["block_sum"][block])
        rest = torch.minimum(rest.clamp(min=0.0), inside[:, -1] * (1.0 - 1e-6))  # rounding may leave it below 0
        rows = block * self.block + (inside <= rest.unsqueeze(-1)).sum(-1).clamp(max=self.block - 1)
        env = rows // self.stride
        newest = data["count"][env] - 1
        time = newest - (newest - rows % self.stride) % self.stride
        batch = self.transitions(data, env, time, key)
        held = (data["count"] - self.oldest(data)).sum()
        probability = data["priority"][rows] / total
        beta = self.beta + (1.0 - self.beta) * progress
        weights = torch.pow(held * probability, -beta)
        batch["weights"] = weights / weights.max()
        return batch

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        self._set(data, rows, new_priorities(data, priority, self.alpha, self.eps))
