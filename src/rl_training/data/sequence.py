"""Replay of sequences for recurrent agents and world models, as pure functions on the tensors of `Storage`.

Sequences have a fixed length, and a new one starts every `period` steps of an environment, so neighbours overlap by
length - period steps. They may extend across the end of an episode: `is_first` marks where the next one begins, and the
reader resets its memory there. The recurrent state that the policy had at the first step of each sequence is stored
separately from the rows (Kapturowski et al. 2019, "stored state"): one state per sequence, not one per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_training.data.buffers import SampledBuffer
from rl_training.data.replay import new_priorities, stratified
from rl_training.data.storage import Batch, Columns, Data, Storage, column_bytes, map_columns, transition_columns, zeros
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.returns import n_step_window
from rl_training.ops.rows import write_rows
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import EnvSpec

_FLAGS = ("terminated", "truncated")


class RecurrentReplay(Storage):
    """Reads batches of B sequences of L steps.

    Of every step, [B, L, ...]: the columns (obs, actions, next_obs, ...) and
      rewards     sum of up to n discounted rewards; the walk stops at the end of the episode or of the sequence
      discounts   gamma^k x (1 - terminated) for the k steps walked
      bootstrap   the step, within the sequence, whose next_obs the walk ends at
      is_first    an episode begins here
      mask        the step has been collected (true everywhere once every environment has made L steps)
    Of every sequence, [B, ...]: state (if stored), weights, indices.

    Without `alpha`, sequences are sampled uniformly, and a share `recent` of the batch comes from the newest tenth.
    With it they are drawn in proportion to priority^alpha, as in prioritised replay; a new sequence gets the highest
    priority so far.
    """

    def __init__(
        self, columns: Columns, capacity: int, num_envs: int, *, length: int, period: int, gamma: float = 1.0,
        n_step: int = 1, state: Any = None, alpha: float | None = None, beta: float = 0.4, eps: float = 1e-6,
        recent: float = 0.0,
    ) -> None:  # fmt: skip
        rows = math.ceil(capacity / num_envs)
        if not 1 <= period <= length:
            raise UserError(f"sequences of {length} steps can start every 1 to {length} steps, not every {period}")
        if rows < length + period:
            raise UserError(
                f"a buffer of {capacity:,} transitions holds {rows:,} steps of each of {num_envs} environments, but"
                f" sequences of {length} steps that start every {period} need {length + period}; raise buffer_size"
            )
        super().__init__(columns, rows, num_envs)
        self.length, self.period, self.gamma, self.n_step = length, period, gamma, n_step
        self.state, self.alpha, self.beta, self.eps, self.recent = state, alpha, beta, eps, recent
        self.slots_each = rows // period + 2  # sequences of one environment that can be in the ring, complete or not

    def nbytes(self, seeds: int) -> int:
        each = column_bytes(self.state or {}) + (4 if self.alpha is not None else 0)
        return super().nbytes(seeds) + each * seeds * self.num_envs * self.slots_each

    def init(self, seeds: int, device: torch.device) -> Data:
        data = super().init(seeds, device)
        total = self.num_envs * self.slots_each
        if self.state is not None:
            data["state"] = map_columns(lambda shape, dtype: zeros((seeds, total, *shape), dtype, device), self.state)
        if self.alpha is not None:
            data["priority"] = torch.zeros(seeds, total, device=device)
            data["max_priority"] = torch.ones(seeds, device=device)
        return data

    def written(self, data: Data, count: int | None = None) -> Data:
        count = int(data["count"].max()) if count is None else count
        out = super().written(data, count)
        if self.state is not None:  # updates may renew states up to the end of a sequence
            begun = (count + self.length) // self.period + 2
            out["state"] = self.first_rows(data["state"], self.slots_each, begun)
        return out

    @property
    def row_columns(self) -> Columns:
        return self.columns if self.state is None else {**self.columns, "state": self.state}

    def slot_of(self, sequence: Tensor) -> Tensor:
        """The slot of sequence number [..., N] of each environment."""
        base = torch.arange(self.num_envs, device=sequence.device) * self.slots_each
        return base + sequence % self.slots_each

    def write(self, data: Data, row: Data, advance: Tensor) -> Tensor:
        time = data["count"].clone()
        rows = dict(row)
        if self.state is not None:
            self._keep_state(data["state"], rows.pop("state"), time)
        slots = self.put(data, rows, advance, self.lost_ends(data, row, advance) if "truncated" in rows else {})
        if self.alpha is not None:  # the sequence that this row completes can now be drawn
            start = data["count"] - self.length
            complete = advance & (start >= 0) & (start % self.period == 0)
            place = self.slot_of(start.clamp(min=0) // self.period)
            top = torch.where(complete, data["max_priority"].unsqueeze(-1), data["priority"].gather(-1, place))
            write_rows(data["priority"], place, top)
        return slots

    def _keep_state(self, stored: Any, state: Any, time: Tensor) -> None:
        """Store the state before the row at `time` [S, N], where a sequence starts with that row."""
        places, begins = self.slot_of(time // self.period), time % self.period == 0
        seed = torch.arange(len(time), device=time.device).unsqueeze(-1)
        for (_, column), (_, value) in zip(tree_items(stored), tree_items(state), strict=True):
            keep = begins.view(*begins.shape, *[1] * (value.ndim - 2))
            write_rows(column, places, torch.where(keep, value, column[seed, places]))

    def span(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """First and last number of the complete sequences in the buffer: [..., N] each. (0, 0) if there are none."""
        oldest = torch.clamp(count - self.rows, min=0)
        first = (oldest + self.period - 1) // self.period
        return first, torch.maximum((count - self.length) // self.period, first)

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        if self.alpha is None:
            env, number = draw_sequences(self.span, data["count"], key, batch_size, self.recent)
            batch = self.sequences(data, env, number)
            batch["weights"] = torch.ones_like(batch["rewards"][:, 0])
            return batch
        mass, held = self._mass(data)
        ends = torch.cumsum(mass, -1)
        share = stratified(key, batch_size)
        slots = torch.searchsorted(ends, share.clamp(max=1.0 - 1e-6) * ends[-1], right=True).clamp(max=len(mass) - 1)
        env = slots // self.slots_each
        batch = self.sequences(data, env, held[slots])
        beta = self.beta + (1.0 - self.beta) * progress
        weights = torch.pow((mass > 0).sum() * (mass[slots] / ends[-1]).clamp(min=1e-12), -beta)
        batch["weights"] = weights / weights.max()
        return batch

    def _mass(self, data: Data) -> tuple[Tensor, Tensor]:
        """(priorities, 0 for sequences that are overwritten or incomplete; the number of the sequence in each slot)."""
        first, last = (x.unsqueeze(-1) for x in self.span(data["count"]))  # [N, 1]
        slot = torch.arange(self.slots_each, device=first.device)
        number = last - (last - slot) % self.slots_each  # the newest complete sequence in the slot
        held = (number >= first) & (data["count"].unsqueeze(-1) >= number * self.period + self.length)
        return torch.where(held.flatten(), data["priority"], 0.0), number.clamp(min=0).flatten()

    def sequences(self, data: Data, env: Tensor, number: Tensor) -> Batch:
        """The given sequences [B] of one seed's data."""
        count = data["count"][env].unsqueeze(-1)
        time = (number * self.period).unsqueeze(-1) + torch.arange(self.length, device=env.device)  # [B, L]
        base = (env * self.stride).unsqueeze(-1)
        rows = base + time % self.stride
        batch = self.read(data, rows, tuple(k for k in self.columns if k not in _FLAGS))
        terminated, truncated = data["terminated"][rows], data["truncated"][rows]
        mask = time < count
        before = base + (time[:, :1] - 1) % self.stride
        known = (time[:, :1] > 0) & (time[:, :1] - 1 >= count - self.rows)  # the previous row is in the buffer
        starts = ~known | data["terminated"][before] | data["truncated"][before]
        batch["is_first"] = torch.cat([starts, (terminated | truncated)[:, :-1]], -1)
        batch["mask"] = mask
        steps = torch.arange(self.length, device=env.device).unsqueeze(-1)
        ahead = steps + torch.arange(self.n_step, device=env.device)  # [L, n]
        inside = ahead.clamp(max=self.length - 1)
        available = mask[:, inside] & (ahead < self.length)
        batch["rewards"], batch["discounts"], last = n_step_window(
            batch["rewards"][:, inside], terminated[:, inside], truncated[:, inside], available, self.gamma
        )
        batch["bootstrap"] = ahead[:, 0] + last
        batch["indices"] = env * self.slots_each + number % self.slots_each
        if self.state is not None:
            batch["state"] = tree_map(lambda column: column[batch["indices"]], data["state"])
        return batch

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """Set the priorities of the sequences [S, B] of the last batch, in place; uniform replay ignores them."""
        if self.alpha is not None:
            write_rows(data["priority"], rows, new_priorities(data, priority, self.alpha, self.eps))


def draw_sequences(
    span: Callable[[Tensor], tuple[Tensor, Tensor]], count: Tensor, key: Tensor, batch_size: int, recent: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(environment, number) of uniformly drawn sequences [B]. `span` gives the sequences of environments with `count`
    [N] steps. The first ones, a share `recent` of the batch, are drawn from the newest tenth."""
    u = rng.bits(key, (2, batch_size)) >> 32 & 0xFFFFFFFF  # 32 bits each for the environment and the time
    env = (u[0] * len(count)) >> 32
    first, last = span(count[env])
    if rows := round(recent * batch_size):
        newest = torch.maximum(first, last - (last - first) // 10)
        first = torch.where(torch.arange(batch_size, device=first.device) < rows, newest, first)
    return env, first + ((u[1] * (last - first + 1)) >> 32)


class NewestSequences:
    """A source that reads the tensors of a replay: the newest complete sequence of every environment."""

    def __init__(self, replay: RecurrentReplay) -> None:
        self.replay = replay

    def init(self, seeds: int, device: torch.device) -> Data:
        return {}

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        """`batch_size` is the number of environments."""
        env = torch.arange(batch_size, device=key.device)
        batch = self.replay.sequences(data, env, self.replay.span(data["count"])[1])
        batch["weights"] = torch.ones_like(batch["rewards"][:, 0])
        return batch

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        return None


S = TypeVar("S", bound=RecurrentReplay)


def sequence_priority(errors: Tensor, mask: Tensor, eta: float = 0.9) -> Tensor:
    """eta max + (1 - eta) mean of the absolute errors [B, L] over the steps in the mask (R2D2, section 2.3)."""
    size = errors.abs() * mask
    return eta * size.amax(-1) + (1.0 - eta) * size.sum(-1) / mask.sum(-1).clamp(min=1)


class SequenceBuffer(SampledBuffer[S]):
    """A buffer that gives batches of sequences."""

    def sample(self, batch_size: int, *, progress: float = 0.0) -> Batch:
        steps = int(self.data["count"].min())
        if steps < self.replay.length:
            raise UserError(f"a sequence has {self.replay.length} steps; only {steps} have been added")
        return super().sample(batch_size, progress=progress)


class RecurrentReplayBuffer(SequenceBuffer[RecurrentReplay]):
    """Sequences of `length` steps; a new one starts every `period` steps. Prioritised when `alpha` is given.

    With `state_shape`, `add` takes the recurrent state before the step as `state=`, and batches contain the state
    before the first step of each sequence.
    """

    def __init__(
        self, spec: EnvSpec, capacity: int, *, length: int, period: int | None = None, num_envs: int = 1,
        gamma: float = 0.99, n_step: int = 1, state_shape: tuple[int, ...] | None = None, alpha: float | None = None,
        beta: float = 0.4, recent: float = 0.0, device: str | torch.device = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        check_length(spec, length)
        replay = RecurrentReplay(
            transition_columns(spec), capacity, num_envs, length=length, period=period or length, gamma=gamma,
            n_step=n_step, state=None if state_shape is None else (state_shape, torch.float32), alpha=alpha, beta=beta,
            recent=recent,
        )  # fmt: skip
        super().__init__(replay, spec, device, seed)

    def update_priorities(self, indices: Tensor, priorities: Tensor) -> None:
        """Set the priorities of the sequences of a batch, for example to `sequence_priority` of their errors."""
        self._feed_back(indices, priorities)


def check_length(spec: EnvSpec, length: int) -> None:
    """Refuse sequences that no episode can fill."""
    if spec.max_episode_steps is not None and length > spec.max_episode_steps:
        raise UserError(
            f"sequences of {length} steps (burn-in included) are longer than any episode of {spec.env_id}, which ends"
            f" after {spec.max_episode_steps}; make them shorter"
        )
