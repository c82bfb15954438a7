"""Discriminators between an expert's transitions and a policy's, and the encoding of actions for them.

Each has a flag for the absorbing state after the end of an episode (Kostrikov et al. 2019), where observation and
action are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_training.models.layers import Scalar
from rl_training.models.torsos import mlp
from rl_training.spec import ActionSpec


def action_code_size(action: ActionSpec) -> int:
    """Length of an action encoded by `action_code`."""
    return sum(action.nvec) if action.kind in ("discrete", "multi_discrete") else action.dim


def action_code(action: ActionSpec, actions: Tensor) -> Tensor:
    """Actions as vectors [B, C]: one-hot choices, bits, or box actions clipped as in the environment."""
    if action.kind == "box":
        return actions.clamp(-1.0, 1.0) if action.bounded else actions
    if action.kind == "multi_binary":
        return actions.to(torch.float32)
    columns = [actions] if action.discrete else list(actions.unbind(-1))
    codes = [c.unsqueeze(-1) == torch.arange(n, device=c.device) for c, n in zip(columns, action.nvec)]
    return torch.cat(codes, -1).to(torch.float32)


class MLPGAILDiscriminator(nn.Module):
    """log D / (1 - D), where D is the probability that (obs, action) is the expert's: [B, O], [B, C] -> [B].

    `actions` are one-hot for discrete spaces, numbers for continuous ones. `absorbing` [B] is 1 after the end.
    """

    def __init__(
        self, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh"
    ) -> None:
        super().__init__()
        size = obs_dim + action_dim + 1
        self.hidden = mlp(size, hidden_sizes, activation)
        self.head = Scalar(hidden_sizes[-1] if hidden_sizes else size)

    def forward(self, obs: Tensor, actions: Tensor, absorbing: Tensor | None = None) -> Tensor:
        flag = obs.new_zeros(obs.shape[0]) if absorbing is None else absorbing
        logits: Tensor = self.head(self.hidden(torch.cat([obs, actions, flag.unsqueeze(-1)], -1)))
        return logits


class MLPAIRLReward(nn.Module):
    """f(s, a, s') = g(s, a) + gamma h(s') - h(s) (Fu et al. 2018, Eq. 4): a reward and a shaping potential.

    With `state_only`, g depends only on the observation, which lets the reward transfer to other dynamics.
    """

    def __init__(
        self, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh", *,
        gamma: float = 0.99, state_only: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gamma, self.state_only = gamma, state_only
        self.reward = MLPGAILDiscriminator(obs_dim, 0 if state_only else action_dim, hidden_sizes, activation)
        self.potential = MLPGAILDiscriminator(obs_dim, 0, hidden_sizes, activation)

    def g(self, obs: Tensor, actions: Tensor, absorbing: Tensor) -> Tensor:
        out: Tensor = self.reward(obs, actions[:, :0] if self.state_only else actions, absorbing)
        return out

    def h(self, obs: Tensor, absorbing: Tensor) -> Tensor:
        out: Tensor = self.potential(obs, obs[:, :0], absorbing)
        return out

    def forward(
        self, obs: Tensor, actions: Tensor, next_obs: Tensor, absorbing: Tensor, next_absorbing: Tensor,
        continues: Tensor,
    ) -> Tensor:  # fmt: skip
        """`continues` is 0 where there is no next state, so that its potential does not count."""
        shaping = self.gamma * continues * self.h(next_obs, next_absorbing) - self.h(obs, absorbing)
        return self.g(obs, actions, absorbing) + shaping
