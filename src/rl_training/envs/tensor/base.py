"""An environment as pure functions of tensors, for N copies at once.

    state, obs = env.reset(key, count)
    step = env.step(state, actions, key)  # step.state, step.obs, step.final_obs, rewards, terminated, truncated

State and randomness are explicit, so a step can be compiled and captured together with the policy, run under `vmap` for
many seeds, saved, and resumed bit for bit. An environment defines `initial`, `observe` and `advance`; time limits and
the reset of finished episodes are written here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

State = dict[str, Any]  # tensors [N, ...]
Obs = Any  # a tensor [N, ...], or a dict of them


class TensorStep(NamedTuple):
    """`final_obs` is the true next observation; `obs` is the one to act on, which differs where an episode ended."""

    state: State
    obs: Obs
    final_obs: Obs
    rewards: Tensor  # f32[N]
    terminated: Tensor  # bool[N]
    truncated: Tensor  # bool[N]


class TensorEnv(ABC):
    """N copies of an environment. Box actions arrive in [-1, 1] and are scaled to the bounds by `scaled`."""

    spec: ClassVar[EnvSpec]

    @abstractmethod
    def initial(self, key: Tensor, count: int) -> State:
        """The first state of `count` episodes."""

    @abstractmethod
    def observe(self, state: State) -> Obs:
        """What the policy sees of a state."""

    @abstractmethod
    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        """(next state, rewards, terminated) of one step."""

    def to(self, device: torch.device) -> TensorEnv:
        """Move the constants that steps read; a graph cannot copy them from the host."""
        return self

    def scaled(self, actions: Tensor, dim: int = 0) -> Tensor:
        """One component of the actions [N, D] in the environment's own units: [N]."""
        low, high = self.spec.action.low[dim], self.spec.action.high[dim]
        return low + (actions[:, dim].clamp(-1.0, 1.0) + 1.0) * (0.5 * (high - low))

    def reset(self, key: Tensor, count: int) -> tuple[State, Obs]:
        state = self.initial(key, count)
        steps = torch.zeros(count, dtype=torch.int32, device=key.device)
        return {"env": state, "steps": steps}, self.observe(state)

    def step(self, state: State, actions: Tensor, key: Tensor) -> TensorStep:
        inner, rewards, terminated = self.advance(state["env"], actions, rng.fold(key, 0))
        final_obs, steps = self.observe(inner), state["steps"] + 1
        limit = self.spec.max_episode_steps
        truncated = (steps >= limit) & ~terminated if limit else torch.zeros_like(terminated)
        fresh, obs = self.reset(rng.fold(key, 1), len(steps))
        ended = terminated ^ truncated  # never both

        def begin(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(ended.view(-1, *[1] * (old.ndim - 1)), new, old)

        following = tree_map(begin, fresh, {"env": inner, "steps": steps})
        return TensorStep(following, tree_map(begin, obs, final_obs), final_obs, rewards, terminated, truncated)
