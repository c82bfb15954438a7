"""CrossQ (Bhatt et al. 2024): SAC without target networks, made stable by batch normalisation.

Both sides of the Bellman equation go through the critics in one joint batch (Eq. 3), so that they share its statistics.
The running statistics of actor and critics are part of `extra`. Rows of weight 0 do not enter the statistics.
Deviations: critics as wide as the actor by default (the paper's are [2048, 2048]: `critic_hidden_sizes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.sac import SAC, CriticReport, Extra, SACHyper
from rl_training.algorithms.hyper import Positive, Widths, constant
from rl_training.data.storage import Batch
from rl_training.models.renorm import CrossQModel
from rl_training.ops.optim import Optimizer
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec


class CrossQHyper(SACHyper):
    learning_rate: Positive = constant(1e-3)
    """Step size of the optimiser; a number or a schedule."""
    policy_delay: int = Field(3, ge=1)
    """Gradient steps of the critics for each one of actor and temperature."""
    critic_hidden_sizes: Widths | None = None
    """Widths of the hidden layers of the critics; none: those of `hidden_sizes`."""
    num_critics: int = Field(2, ge=1)
    """Critics, whose smallest value counts."""
    adam_beta1: float = Field(0.5, ge=0.0, lt=1.0)
    """Decay of the optimiser's first moment (the paper's 0.5 in place of the usual 0.9)."""
    renorm_warmup: int = Field(100_000, ge=0)
    """Updates with plain batch normalisation before its correction by the running statistics begins."""


class CrossQ(SAC):
    Hyper = CrossQHyper
    name = "crossq"
    targets: ClassVar[tuple[str, ...]] = ()
    if TYPE_CHECKING:
        hp: CrossQHyper

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        model = CrossQModel(
            spec, hp.hidden_sizes, critic_hidden_sizes=hp.critic_hidden_sizes or hp.hidden_sizes,
            num_critics=hp.num_critics, activation=hp.activation, warmup=hp.renorm_warmup,
        )  # fmt: skip
        return self.named_networks(model)

    def optimizer(self, **changes: Any) -> Optimizer:
        return super().optimizer(beta1=self.hp.adam_beta1, **changes)

    def init_extra(self) -> Extra:
        norms: Extra = {f"{name}_norm": net.module.torso.initial() for name, net in self.nets.items()}  # type: ignore
        return {**super().init_extra(), **norms}

    def critic_loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor, key: Tensor
    ) -> tuple[Tensor, CriticReport]:
        counts = batch["weights"] > 0
        both_obs = tree_map(lambda a, b: torch.cat([a, b]), batch["obs"], batch["next_obs"])
        both_actions = torch.cat([batch["actions"], next_action])
        both_q, norm = self.nets["critic"](
            params, both_obs, both_actions, state.extra["critic_norm"], torch.cat([counts, counts])
        )
        q, next_q = both_q.chunk(2, -1)  # [E, B] each
        target = (batch["rewards"] + batch["discounts"] * (next_q.amin(0) + bonus)).detach()
        error = q - target
        loss = 0.5 * (error**2).sum(0)
        return loss, CriticReport(q.mean(0), error.abs().mean(0), target, {"critic_norm": norm})

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        q, _ = self.nets["critic"](params, obs, action, extra["critic_norm"])
        smallest: Tensor = q.amin(0)
        return smallest

    def policy(self, params: Tensor, extra: Extra, obs: Obs, with_features: bool = False) -> Any:
        result = self.nets["actor"](params, obs, extra["actor_norm"], None, with_features)
        return (result[0], result[2]) if with_features else result[0]

    def learning_policy(self, params: Tensor, extra: Extra, obs: Obs, weights: Tensor) -> tuple[Tensor, Extra]:
        out, norm = self.nets["actor"](params, obs, extra["actor_norm"], weights > 0)
        return out, {"actor_norm": norm}
