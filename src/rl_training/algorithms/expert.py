"""A trained policy that another algorithm learns from."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from rl_training.algorithms.acting import Policy
from rl_training.algorithms.state import TrainState
from rl_training.ops.tree import tree_items


class Expert(NamedTuple):
    """A policy and its trained state, which does not change."""

    policy: Policy
    state: TrainState

    def content_hash(self) -> str:
        """SHA-256 over the algorithm's name and all tensors that the policy acts with."""
        digest = hashlib.sha256(self.policy.name.encode())
        for name, x in tree_items({"params": self.state.params, "extra": self.state.extra}):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)};".encode() + x.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()
