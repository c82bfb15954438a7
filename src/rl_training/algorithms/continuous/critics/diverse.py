"""Critics whose gradients with respect to the action are kept apart (An et al. 2021), so that the minimum of fewer of
them is pessimistic enough."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.continuous.critics.base import Critic, CriticFields, CriticReport, Owner
from rl_training.algorithms.continuous.critics.ensemble import TwinOptions
from rl_training.algorithms.continuous.critics.wrapper import BaseCritic, Wrapper, WrapperOptions
from rl_training.data.storage import Batch
from rl_training.errors import UserError


class DiverseFields(CriticFields):
    eta: float = Field(1.0, ge=0.0)
    """Weight of the diversity of the critics' gradients."""


class DiverseOptions(DiverseFields, WrapperOptions):
    kind: Literal["diverse"] = "diverse"
    base: BaseCritic = TwinOptions(num_critics=10)
    """The critics that are kept apart: twin, subset, dropout or quantile, with their own options."""

    def build(self, owner: Owner) -> Critic:
        seen = owner.spec.observation
        if isinstance(seen, dict) or len(seen.shape) != 1:
            raise UserError(
                f"{owner.name}: diverse critics need vector observations, one copy for each critic;"
                f" {owner.spec.env_id} has {seen}"
            )
        members = int(owner.net.module.members)  # type: ignore[arg-type]
        if members < 2:
            raise UserError(f"{owner.name}: diverse critics need at least two critics to keep apart; raise num_critics")
        base = self.base.build(owner)
        return DiverseCritic(base, self.eta, members) if self.eta else base


def gradient_similarity(gradients: Tensor) -> Tensor:
    """Sum over pairs i != j of the cosine of two critics' gradients, over N - 1: [E, B, A] -> [B] (Eq. 8)."""
    members = gradients.shape[0]
    unit = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    # Over all ordered pairs: |sum of the unit vectors|^2 - sum of their squared lengths.
    pairs: Tensor = unit.sum(0).square().sum(-1) - unit.square().sum((0, -1))
    return pairs / (members - 1)


class DiverseCritic(Wrapper):
    def __init__(self, base: Critic, eta: float, members: int) -> None:
        super().__init__(base)
        self.eta, self.members = eta, members

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, CriticReport]:
        loss, report = self.base.loss(params, state, batch, next_action, bonus, key)
        obs, actions = batch["obs"], batch["actions"]
        obs = obs.expand(self.members, *obs.shape)  # [E, B, D]

        def total(actions: Tensor) -> Tensor:
            return self.values(params, obs, actions).sum()

        gradients = torch.func.grad(total)(actions.expand(self.members, *actions.shape))  # [E, B, A]
        return loss + self.eta * gradient_similarity(gradients), report
