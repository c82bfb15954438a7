"""Where batches come from. Replay is a source; so is a fixed dataset, a mix of two, or model-made data."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_training.data.storage import Data
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

Batch = dict[str, Any]


class Source(Protocol):
    """Pure reading of one seed's tensors, so that sampling is part of the compiled update."""

    def init(self, seeds: int, device: torch.device) -> Data:
        """The tensors it reads, with a leading seed axis."""

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        """A batch of one seed's data (no seed axis)."""

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """The outcome of an update of all seeds ([S, B] each), in place."""


@runtime_checkable
class Sink(Protocol):
    """A source that a phase writes to. If its tensors hold a "frontier", the phase reads that with its batch."""

    def append(self, data: Data, rows: Batch) -> None:
        """Take what a step returned for all seeds, in place."""


class MixedSource:
    """Batches with a fixed share of rows from a second source: RLPD's half prior data.

    Priorities are not fed back: the two parts have no common scale.
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
