"""SAC-N and EDAC (An et al. 2021): SAC on a dataset with an ensemble of critics whose minimum is the target; EDAC also
keeps the critics' gradients with respect to the action apart, so that fewer of them are enough (eta 0 is SAC-N).

Deviations: none known. Vector observations only: the gradients need one copy of the observation for each critic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.continuous.sac import SAC, CriticReport, SACFields
from rl_training.algorithms.hyper import OfflineHyper, Widths
from rl_training.data.storage import Batch
from rl_training.models.control import SACModel
from rl_training.spec import EnvSpec


class EDACHyper(SACFields, OfflineHyper):
    hidden_sizes: Widths = (256, 256, 256)
    """Widths of the hidden layers of actor and critics."""
    num_critics: int = Field(10, ge=2)
    """Critics in the ensemble, whose minimum is the target (N)."""
    eta: float = Field(1.0, ge=0.0)
    """Weight of the diversity of the critics' gradients."""


def gradient_similarity(gradients: Tensor) -> Tensor:
    """Sum over pairs i != j of the cosine of two critics' gradients, over N - 1: [E, B, A] -> [B] (Eq. 8)."""
    members = gradients.shape[0]
    unit = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    # Over all ordered pairs: |sum of the unit vectors|^2 - sum of their squared lengths.
    pairs: Tensor = unit.sum(0).square().sum(-1) - unit.square().sum((0, -1))
    return pairs / (members - 1)


class EDAC(SAC):
    Hyper = EDACHyper
    name = "edac"
    vector_observations = True
    if TYPE_CHECKING:
        hp: EDACHyper

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            SACModel(spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation)
        )

    def critic_loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor, key: Tensor
    ) -> tuple[Tensor, CriticReport]:
        loss, report = super().critic_loss(params, state, batch, next_action, bonus, key)
        if not self.hp.eta:
            return loss, report
        critic: Any = self.nets["critic"]
        members = critic.module.members
        obs = batch["obs"].expand(members, *batch["obs"].shape)

        def total(actions: Tensor) -> Tensor:
            q: Tensor = critic(params, obs, actions)
            return q.sum()

        gradients = torch.func.grad(total)(batch["actions"].expand(members, *batch["actions"].shape))  # [E, B, A]
        return loss + self.hp.eta * gradient_similarity(gradients), report
