"""Copies what the environments returned to a GPU: one copy a step, whatever the number of tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.ops.tree import tree_leaves, tree_map

_ALIGN = 64  # bytes


class Staging:
    """A tree of tensors on a GPU and the same tree in pinned memory of the host; each is one block of bytes."""

    def __init__(self, like: Any) -> None:
        leaves = tree_leaves(like)
        sizes = [math.ceil(x.numel() * x.element_size() / _ALIGN) * _ALIGN for x in leaves]
        self.block = torch.zeros(sum(sizes), dtype=torch.uint8, device=leaves[0].device)
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=self.block.is_cuda)
        self._copied = torch.cuda.Event() if self.block.is_cuda else None  # type: ignore[no-untyped-call]
        self.device, self.host = (_views(like, block, sizes) for block in (self.block, self._host))

    def upload(self) -> None:
        self.block.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until the last copy has left the host's memory."""
        if self._copied is not None:
            self._copied.synchronize()


def _views(like: Any, block: Tensor, sizes: list[int]) -> Any:
    parts = iter(torch.split(block, sizes))
    return tree_map(lambda x: next(parts)[: x.numel() * x.element_size()].view(x.dtype).view(x.shape), like)


def arrays_in(tree: Any) -> list[np.ndarray]:
    """The arrays of an observation, in the order of its tensors."""
    if isinstance(tree, dict):
        return [array for value in tree.values() for array in arrays_in(value)]
    return [tree]
