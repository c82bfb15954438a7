"""Replay that returns what follows a transition: the next n steps as they were stored, for algorithms that choose the
length of their returns in each update or predict later observations (BBF)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.data.storage import Batch, Data
from rl_training.ops.tree import tree_map


class _Following:
    """`transitions` for replay of any kind of sampling.

    Of every row, [B, ...]: obs, actions, weights, indices. Of the n steps that begin with it, [B, n, ...]:
      following_obs         the observation after each step, the true last one of an episode included
      following_actions     the action of each step; the first is `actions`
      following_rewards, following_terminated, following_truncated
      following_available   the step is in the buffer; those beyond the end of an episode belong to the next one
    """

    def transitions(self: Replay, data: Data, env: Tensor, time: Tensor, key: Tensor) -> Batch:  # type: ignore[misc]
        rows = env * self.stride + time % self.stride
        batch: Batch = self.read(data, rows, ("obs", "actions"))
        window, available = self.window(data, env, time)  # [B, n]
        after = self.read(data, window.flatten(), ("next_obs",))["next_obs"]
        batch["following_obs"] = tree_map(lambda x: x.unflatten(0, window.shape), after)
        for name in ("actions", "rewards", "terminated", "truncated"):
            batch[f"following_{name}"] = data[name][window]
        batch["following_available"], batch["indices"] = available, rows
        batch["rewards"] = batch["following_rewards"][:, 0]
        return batch


class SubsequenceReplay(_Following, Replay):
    """Uniform."""


class PrioritizedSubsequenceReplay(_Following, PrioritizedReplay):
    """In proportion to priorities."""


def in_episode(terminated: Tensor, truncated: Tensor, available: Tensor) -> Tensor:
    """Which of n steps [B, n] are stored and belong to the episode of the first one."""
    goes_on = available & ~(terminated | truncated)
    reached = torch.cat([available[:, :1], goes_on[:, :-1]], -1).to(torch.float32).cumprod(-1)
    return (reached * available) > 0
