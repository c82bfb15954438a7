"""Windows of consecutive steps of a dataset, for sequence models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.dataset import DatasetSource, TransitionDataset
from rl_training.data.storage import Data
from rl_training.ops import rng
from rl_training.ops.tree import tree_map


class WindowSource(DatasetSource):
    """Batches of windows: up to `length` steps of one episode that end with a uniformly drawn step.

    Of every step, [B, K, ...]: obs, actions, returns (undiscounted, to the end of the episode), times (steps since its
    start) and mask (false for the missing first steps of a short window). Of every window: weights, indices.
    """

    def __init__(self, dataset: TransitionDataset, length: int) -> None:
        self.size, self.length = len(dataset), length
        starts = np.concatenate([np.full(part.stop - part.start, part.start) for part in dataset.episodes()])
        columns: dict[str, Any] = {
            "obs": dataset.obs, "actions": dataset.actions, "returns": dataset.with_returns(1.0).returns,
            "start": starts.astype(np.int64),
        }  # fmt: skip
        self.tensors: Data = tree_map(lambda x: torch.from_numpy(np.require(x, requirements=["C", "W"])), columns)
        self.columns = self.tensors

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Data:
        last = rng.randint(key, (batch_size,), self.size)
        rows = last.unsqueeze(-1) + torch.arange(1 - self.length, 1, device=last.device)  # [B, K]
        times = rows - data["start"][last].unsqueeze(-1)
        rows = rows.clamp(min=0)
        batch: Data = {name: data[name][rows] for name in ("obs", "actions", "returns")}
        batch |= {"times": times.clamp(min=0), "mask": times >= 0}
        return batch | {"weights": torch.ones_like(batch["returns"][:, 0]), "indices": last}
