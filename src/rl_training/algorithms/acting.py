"""Acting with a policy that may carry a state from step to step: a recurrent state, a plan, or exploration noise."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.state import Choice, Obs, TrainState, Tree
from rl_training.errors import UserError
from rl_training.ops.tree import tree_items, tree_leaves, tree_map, where_rows


class Policy(Protocol):
    """What it takes to act. Every algorithm is a policy."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def recurrent(self) -> bool: ...

    def init_carry(self, batch: int) -> Tree: ...

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice: ...


class Expert(NamedTuple):
    """A trained policy that another algorithm learns from; its state does not change."""

    policy: Policy
    state: TrainState

    def content_hash(self) -> str:
        """SHA-256 over the algorithm's name and all tensors that the policy acts with."""
        digest = hashlib.sha256(self.policy.name.encode())
        for name, x in tree_items({"params": self.state.params, "extra": self.state.extra}):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)};".encode() + x.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def start_carry(policy: Policy, rows: int) -> Tree:
    """The carry of `rows` episodes that begin, on the policy's device."""
    return tree_map(lambda x: x.to(policy.device), policy.init_carry(rows))


def reset_carry(policy: Policy, carry: Tree, starts: Tensor) -> Tree:
    """The carry with the rows where `starts` is true set back to the start of an episode. `starts` is [N], or [S, N]
    for a carry with a seed axis."""
    return where_rows(starts, start_carry(policy, starts.shape[-1]), carry)


class RunningEpisodes:
    """The episodes that a policy plays outside a run. It keeps the carry of a recurrent policy from call to call, one
    row for each episode; other policies have nothing to keep."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.carry: Tree = None

    def reset(self) -> None:
        """Forget the episodes: the next observations are the first of new ones."""
        self.carry = None

    def read(self, rows: int, episode_start: Any = None) -> Tree:
        """The carry to act on `rows` observations with. Rows where `episode_start` is true begin an episode."""
        policy = self.policy
        if not policy.recurrent or self.carry is None:
            return start_carry(policy, rows)
        running = len(tree_leaves(self.carry)[0])
        starts = None if episode_start is None else torch.as_tensor(np.asarray(episode_start, np.bool_))
        if starts is not None and starts.numel() not in (1, rows):
            raise UserError(f"episode_start has {starts.numel()} entries for {rows} observations")
        if starts is not None and bool(starts.all()):
            return start_carry(policy, rows)
        if running != rows:
            raise UserError(
                f"{policy.name} remembers {running} running episode{'s' * (running > 1)}, but was given {rows}"
                f" observation{'s' * (rows > 1)}; call reset() where new episodes begin"
            )
        return self.carry if starts is None else reset_carry(policy, self.carry, starts.expand(rows).to(policy.device))

    def write(self, carry: Tree) -> None:
        if self.policy.recurrent:
            self.carry = carry
