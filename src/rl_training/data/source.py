"""Where batches come from: replay, a fixed dataset, a mix of two sources, or transitions made by a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_training.data.storage import Batch, Data
from rl_training.ops import rng
from rl_training.ops.returns import n_step_window
from rl_training.ops.tree import tree_map

if TYPE_CHECKING:
    from rl_training.data.dataset import RewardRule
    from rl_training.data.replay import Replay


class Source(Protocol):
    """Batches are drawn by pure functions of tensors, so that sampling is part of the compiled update."""

    def init(self, seeds: int, device: torch.device) -> Data:
        """The tensors to draw from, with a leading seed axis; {} for a source that reads those of the replay."""

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        """A batch of one seed's data (no seed axis)."""

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """Store the new priorities of the rows that an update used, of all seeds ([S, B] each), in place."""


@runtime_checkable
class Sink(Protocol):
    """A source that a phase writes to. If its tensors have a "frontier", the phase's batches include it."""

    def append(self, data: Data, rows: Batch) -> None:
        """Store what a step returned for all seeds, in place."""


class MixedSource:
    """Batches with a fixed share of rows from a second source: in RLPD, half of them are prior data.

    Priorities are not fed back, because the two parts have no common scale.
    """

    def __init__(self, first: Source, second: Source, share: float) -> None:
        self.first, self.second, self.share = first, second, share

    def init(self, seeds: int, device: torch.device) -> Data:
        return {"first": self.first.init(seeds, device), "second": self.second.init(seeds, device)}

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        rows = round(self.share * batch_size)
        a = self.first.sample(data["first"], rng.fold(key, 0), batch_size - rows, progress)
        b = self.second.sample(data["second"], rng.fold(key, 1), rows, progress)
        return {k: tree_map(lambda x, y: torch.cat([x, y]), a[k], b[k]) for k in a if k in b}

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        return None


class Labelled:
    """Batches of a source with the column `labels`, the same number in every row: in imitation learning 1 for the
    expert's rows and 0 for the policy's."""

    def __init__(self, source: Source, label: float) -> None:
        self.source, self.label = source, label

    def init(self, seeds: int, device: torch.device) -> Data:
        return self.source.init(seeds, device)

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        batch = self.source.sample(data, key, batch_size, progress)
        return {**batch, "labels": torch.full_like(batch["weights"], self.label)}

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        self.source.feedback(data, rows, priority)


class MatchedReplay:
    """Replay whose batches match those of a dataset, so that the two can be mixed.

    Rewards follow the dataset's rule. With `horizon`, a batch also has the return of each row to the end of its
    episode. Where the end has not been seen yet, or is more than `horizon` steps away, it is minus infinity: unknown.
    """

    def __init__(self, replay: Replay, rule: RewardRule, horizon: int = 0) -> None:
        self.replay, self.rule, self.horizon = replay, rule, horizon
        replay.walks = replay.walks or horizon > 0

    def init(self, seeds: int, device: torch.device) -> Data:
        return self.replay.init(seeds, device)

    def rewards(self, rewards: Tensor) -> Tensor:
        scale, shift, clip = self.rule
        out = rewards if (scale, shift) == (1.0, 0.0) else scale * rewards + shift
        return out if clip is None else out.clamp(*clip)

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        batch = self.replay.sample(data, key, batch_size, progress)
        batch["rewards"] = self.rewards(batch["rewards"])
        if self.horizon:
            batch["returns"] = self.returns(data, batch["indices"])
        return batch

    def returns(self, data: Data, rows: Tensor) -> Tensor:
        stride = self.replay.stride
        env = rows // stride
        newest = data["count"][env] - 1
        time = newest - (newest - rows % stride) % stride
        ahead = time.unsqueeze(-1) + torch.arange(self.horizon, device=rows.device)  # [B, H]
        window = (env * stride).unsqueeze(-1) + ahead % stride
        terminated, truncated = data["terminated"][window], data["truncated"][window]
        seen = ahead <= newest.unsqueeze(-1)
        total, _, last = n_step_window(
            self.rewards(data["rewards"][window]), terminated, truncated, seen, self.replay.gamma
        )
        ended = (terminated | truncated).gather(-1, last.unsqueeze(-1)).squeeze(-1)
        return torch.where(ended, total, -torch.inf)

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        self.replay.feedback(data, rows, priority)
