"""Replay of observations for world models: rows are observations, not transitions.

A world model predicts the reward and the end of episode that arrive with an observation, and must see the observation
at which an episode ends. So there is a row for each observation that was acted on, and one more for the true final
observation of every episode. No observation is stored twice, and images are stored as bytes. A new sequence starts
every `period` rows and may extend across the end of an episode: `is_first` marks where the next one begins. The agent's
memory is stored for each row at which a sequence starts; updates that read such a row renew it (Hafner et al. 2023,
section "Replay").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl_training.data.sequence import RecurrentReplay, SequenceBuffer, draw_sequences
from rl_training.data.storage import Batch, Columns, Data, action_column, observation_columns, transition_columns
from rl_training.ops.rows import write_rows
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import EnvSpec


class DreamReplay(RecurrentReplay):
    """Reads batches of B sequences of L observations.

    Of every step, [B, L, ...]:
      obs          the observation
      actions      taken after it (0 where is_last)
      rewards      arrived with it (0 where is_first)
      is_first     an episode begins with it
      is_last      an episode ends with it ...
      is_terminal  ... because the environment terminated it
      mask         it can be learned from: it has been collected, and the memory before it is known
    Of every sequence, [B, ...]: state (the memory before its first observation), weights, indices.

    With `online`, batches first take the sequences that have not been in any batch, oldest first, so that every
    observation is soon learned from. The rest of a batch is drawn uniformly, a share `recent` of it from the newest
    tenth.
    """

    def __init__(
        self, spec: EnvSpec, capacity: int, num_envs: int, *, length: int, period: int = 1, state: Columns,
        recent: float = 0.0, online: bool = True,
    ) -> None:  # fmt: skip
        flag = ((), torch.bool)
        columns = {
            "obs": observation_columns(spec), "actions": action_column(spec), "rewards": ((), torch.float32),
            "is_first": flag, "is_last": flag, "is_terminal": flag,
        }  # fmt: skip
        super().__init__(columns, capacity, num_envs, length=length, period=period, state=state, recent=recent)
        self.spec, self.online = spec, online
        self.hop = math.ceil(length / period)  # distance to the next sequence that does not overlap

    @property
    def row_columns(self) -> Columns:
        return {**transition_columns(self.spec), "state": self.state}

    def init(self, seeds: int, device: torch.device) -> Data:
        data = super().init(seeds, device)
        data["arrived"] = torch.zeros((seeds, self.num_envs), device=device)  # reward that belongs to the next row
        if self.online:  # the first sequence of each environment that was in no batch
            data["next"] = torch.zeros((seeds, self.num_envs), dtype=torch.int64, device=device)
        return data

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, data: Data, row: Data, advance: Tensor) -> Tensor:
        """Store the observation that was acted on, and the final one if the episode ended."""
        terminated, yes = row["terminated"].to(torch.bool), torch.ones_like(advance)
        ended = terminated | row["truncated"].to(torch.bool)
        newest = self.slots(data["count"] - 1)
        over = data["is_last"].gather(-1, newest) | (ended & ~advance)  # the episode was lost
        first = over | (data["count"] == 0)
        acted_on = {
            "obs": row["obs"], "actions": row["actions"], "rewards": torch.where(first, 0.0, data["arrived"]),
            "is_first": first, "is_last": ~yes, "is_terminal": ~yes,
        }  # fmt: skip
        final = {
            "obs": row["next_obs"], "actions": torch.zeros_like(row["actions"]), "rewards": row["rewards"],
            "is_first": ~yes, "is_last": yes, "is_terminal": terminated,
        }  # fmt: skip
        # The final row is always written, but counted only if the episode ended; otherwise the next row replaces it.
        # Both rows are written at once, because a second write to a column would copy all of it.
        after = self.slots(data["count"] + advance)
        also = {name: (after, value) for name, value in tree_items(final)}
        also["is_last"] = (torch.cat([newest, after], -1), torch.cat([over, yes], -1))
        self._keep_state(data["state"], row["state"], data["count"])
        slots = self.put(data, acted_on, advance, also)
        data["count"].add_(advance & ended)
        data["arrived"].copy_(torch.where(advance, row["rewards"], data["arrived"]))
        return slots

    def cut(self, data: Data) -> None:
        """End the running episodes at the last stored observation."""
        newest = self.slots(data["count"] - 1)
        data["is_last"].scatter_(-1, newest, torch.ones_like(newest, dtype=torch.bool))

    # --- reading -----------------------------------------------------------------------------------------------------

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        env, number = draw_sequences(self.span, data["count"], key, batch_size, self.recent)
        if self.online:  # from the end of the batch, so that those drawn from the newest tenth are replaced last
            queued_env, queued, waiting = (x.flip(-1) for x in self._queue(data, batch_size))
            env, number = torch.where(waiting, queued_env, env), torch.where(waiting, queued, number)
        return self.sequences(data, env, number)

    def _queue(self, data: Data, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(environment, number, is there one) of the sequences that are next in the queue, oldest first: [..., B]."""
        count = data["count"].unsqueeze(-1)
        most = min(batch_size, self.rows // self.length + 1)
        number = self._next(data).unsqueeze(-1) + self.hop * torch.arange(most, device=count.device)  # [..., N, K]
        age = count - number * self.period
        age = torch.where(age >= self.length, age, 0).flatten(-2)
        order = torch.argsort(age, dim=-1, descending=True, stable=True)[..., :batch_size]
        found = (order // most, number.flatten(-2).gather(-1, order), age.gather(-1, order) > 0)
        room = (0, batch_size - order.shape[-1])
        env, number, waiting = (torch.nn.functional.pad(x, room) for x in found)
        return env, number, waiting

    def _next(self, data: Data) -> Tensor:
        """The first sequence of each environment that was in no batch and is still in the buffer: [..., N]."""
        return torch.maximum(data["next"], self.span(data["count"])[0])

    def sequences(self, data: Data, env: Tensor, number: Tensor) -> Batch:
        """The given sequences [B] of one seed's data."""
        time = (number * self.period).unsqueeze(-1) + torch.arange(self.length, device=env.device)  # [B, L]
        rows = (env * self.stride).unsqueeze(-1) + time % self.stride
        batch = self.read(data, rows, tuple(self.columns))
        # The agent does not act on the last observation of an episode, so the memory before it is not stored.
        unknown = batch["is_last"] & (time == time[:, :1])
        batch["mask"] = (time < data["count"][env].unsqueeze(-1)) & ~unknown
        batch["weights"] = torch.ones_like(batch["rewards"][:, 0])
        batch["indices"] = env * self.slots_each + number % self.slots_each
        batch["state"] = tree_map(lambda column: column[batch["indices"]], data["state"])
        return batch

    # --- after an update ---------------------------------------------------------------------------------------------

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """Remove the sequences of the last batch from the queue."""
        if self.online:
            env, _, waiting = self._queue(data, rows.shape[-1])
            data["next"].copy_(self._next(data).scatter_add(-1, env, self.hop * waiting.to(torch.int64)))

    @property
    def renewed(self) -> int:
        """Number of rows within a sequence at which other sequences start."""
        return (self.length - 1) // self.period

    def append(self, data: Data, rows: Batch) -> None:
        """Replace the memory before the rows period, 2 period, ... of the sequences `indices` [S, B] by `state`
        [S, B, K, ...], in place.

        If several sequences of a batch contain the same row, the last of them counts; all write its value, so that the
        order of writing does not matter. A row that has not been collected yet will bring its own memory.
        """
        indices, device = rows["indices"], rows["indices"].device
        (seeds, batch), each, ahead = indices.shape, self.slots_each, self.renewed
        if not ahead:
            return
        env, slot = indices // each, indices % each  # [S, B]
        places = (slot.unsqueeze(-1) + torch.arange(1, ahead + 1, device=device)) % each  # [S, B, K]
        # The same place in every sequence: [S, B, K, B]
        where = (places.unsqueeze(-1) - slot[:, None, None] - 1) % each
        holds = (where < ahead) & (env.unsqueeze(-1) == env.unsqueeze(-2)).unsqueeze(-2)
        last = torch.where(holds, torch.arange(batch, device=device), 0).amax(-1)
        source = last * ahead + where.gather(-1, last.unsqueeze(-1)).squeeze(-1)
        seed = torch.arange(seeds, device=device).view(-1, 1, 1)
        source = (source + seed * batch * ahead).flatten(1)
        target = (places + env.unsqueeze(-1) * each).flatten(1)
        for (_, column), (_, value) in zip(tree_items(data["state"]), tree_items(rows["state"]), strict=True):
            write_rows(column, target, value.flatten(0, 2)[source])


class DreamReplayBuffer(SequenceBuffer[DreamReplay]):
    """Sequences of `length` observations, one starting every `period` observations, for use outside a run.

    `state`: shape and type of the parts of the agent's memory, by name. `add` takes the memory before the observation
    as `state=`; batches contain the one before their first observation, and `renew` replaces those before the others.
    """

    def __init__(
        self, spec: EnvSpec, capacity: int, *, length: int, period: int = 1, state: Columns, num_envs: int = 1,
        recent: float = 0.0, online: bool = True, device: str | torch.device = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        replay = DreamReplay(
            spec, capacity, num_envs, length=length, period=period, state=state, recent=recent, online=online
        )
        super().__init__(replay, spec, device, seed)

    @torch.no_grad()
    def sample(self, batch_size: int, *, progress: float = 0.0) -> Batch:
        batch = super().sample(batch_size, progress=progress)
        self.replay.feedback(self.data, batch["indices"][None], None)
        return batch

    @torch.no_grad()
    def renew(self, indices: Tensor, state: Any) -> None:
        """Replace the memory before the rows period, 2 period, ... of the sequences of a batch: [B, K, ...]."""
        rows = {"indices": indices, "state": state}
        self.replay.append(self.data, tree_map(lambda x: torch.as_tensor(x, device=self.device)[None], rows))
