"""Critics and actor with batch renormalisation and no target networks (Bhatt et al. 2024).

Both sides of the Bellman equation go through the critics in one joint batch (Eq. 3), so that they share its statistics.
The running statistics of actor and critics are entries of `state.extra`; rows of weight 0 do not count in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.critics.base import Critic, CriticFields, CriticOptions, Extra, Owner, Report
from rl_training.algorithms.hyper import Widths
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.renorm import CrossQModel, RenormCritic
from rl_training.models.residual import Network
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec


class RenormFields(CriticFields):
    critic_hidden_sizes: Widths | None = None
    """Widths of the hidden layers of the critics; none: those of `hidden_sizes`."""
    num_critics: int = Field(2, ge=1)
    """Critics, whose smallest value counts."""
    renorm_warmup: int = Field(100_000, ge=0)
    """Updates with plain batch normalisation before its correction by the running statistics begins."""


class RenormOptions(RenormFields, CriticOptions):
    can_share: ClassVar[bool] = False
    kind: Literal["renorm"] = "renorm"

    def model(
        self, spec: EnvSpec, hidden_sizes: Sequence[int], *, actor_outputs: int, activation: str, num_critics: int = 2,
        network: Network = "mlp", critic_hidden_sizes: Sequence[int] | None = None,
    ) -> nn.Module:  # fmt: skip
        if network != "mlp":
            raise UserError(
                f"network: {network} cannot be combined with renormalised critics, which have a network of their own"
            )
        return CrossQModel(
            spec, hidden_sizes, critic_hidden_sizes=self.critic_hidden_sizes or critic_hidden_sizes or hidden_sizes,
            num_critics=self.num_critics, activation=activation, warmup=self.renorm_warmup, actor_outputs=actor_outputs,
        )  # fmt: skip

    def build(self, owner: Owner) -> Critic:
        critic = JointCritic(owner)
        if not isinstance(critic.net.module, RenormCritic):
            raise UserError(
                f"{owner.algorithm.name}: renormalised critics need networks made for them, such as a CrossQModel"
            )
        return critic


class JointCritic(Critic):
    """Values of both sides of the Bellman equation by one pass of the critics."""

    renormalised = True

    def init_extra(self) -> Extra:
        return {"critic_norm": self.net.module.torso.initial()}  # type: ignore[union-attr, operator]

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Report]:
        counts = batch["weights"] > 0
        both_obs = tree_map(lambda a, b: torch.cat([a, b]), batch["obs"], batch["next_obs"])
        both_actions = torch.cat([batch["actions"], next_action])
        both_q, norm = self.net(params, both_obs, both_actions, state.extra["critic_norm"], torch.cat([counts, counts]))
        q, next_q = both_q.chunk(2, -1)  # [E, B] each
        target = self.bootstrap(batch, next_q.amin(0), bonus).detach()
        return self.squared_error(q, target, {"critic_norm": norm})

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        q, _ = self.net(params, obs, action, extra["critic_norm"])
        smallest: Tensor = q.amin(0)
        return smallest
