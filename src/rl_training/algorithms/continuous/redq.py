"""Randomised ensembled double Q-learning, REDQ (Chen et al. 2021), and DroQ (Hiraoka et al. 2022).

Both are SAC with many updates for each environment step, kept from overestimating by the critics:
REDQ takes the minimum over a random pair of ten critics; DroQ takes two critics with dropout and LayerNorm.
As in both papers the policy learns once for each block of critic updates, from the mean of all critics.

Deviations: the policy learns at the first update of a block instead of the last, which is the same rhythm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Obs
from rl_training.algorithms.continuous.sac import SAC, Extra, SACHyper
from rl_training.errors import UserError
from rl_training.models.control import EnsembleCritic, SACModel
from rl_training.ops import rng
from rl_training.spec import EnvSpec


class REDQHyper(SACHyper):
    gradient_steps: int = Field(20, ge=-1)
    """Updates in a block (the update-to-data ratio); -1: one for each transition collected since the last block."""
    policy_delay: int = Field(20, ge=1)
    """Gradient steps of the critics for each one of actor and temperature."""
    num_critics: int = Field(10, ge=1)
    """Critics in the ensemble (N)."""
    num_target_critics: int = Field(2, ge=1)
    """Critics drawn for each target, whose minimum is taken (M)."""
    layer_norm: bool = False
    """LayerNorm in the critics."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the critics' hidden units that are dropped, in targets as well as in losses."""


class REDQ(SAC):
    Hyper = REDQHyper
    name = "redq"
    if TYPE_CHECKING:
        hp: REDQHyper

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            SACModel(
                spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation, layer_norm=hp.layer_norm,
                dropout=hp.dropout,
            )
        )  # fmt: skip

    def setup(self) -> None:
        super().setup()
        critic = self.nets["critic"].module
        self.members = critic.members if isinstance(critic, EnsembleCritic) else self.hp.num_critics
        if self.hp.num_target_critics > self.members:
            raise UserError(
                f"{self.name}: num_target_critics = {self.hp.num_target_critics} cannot be drawn from an ensemble of"
                f" {self.members}; raise num_critics"
            )

    def subset(self, key: Tensor) -> Tensor:
        """M different critics: [M]."""
        return rng.permutation(key, self.members)[: self.hp.num_target_critics]

    def q_values(self, params: Tensor, obs: Obs, actions: Tensor, key: Tensor | None) -> Tensor:
        q: Tensor = self.nets["critic"](params, obs, actions, key)
        return q

    def next_q(self, params: Tensor, next_obs: Obs, next_action: Tensor, key: Tensor) -> Tensor:
        """Minimum over the drawn critics (Algorithm 1, line 6); only they are evaluated."""
        drawn = self.subset(rng.fold(key, 0)) if self.hp.num_target_critics < self.members else None
        q: Tensor = self.nets["critic"](params, next_obs, next_action, rng.fold(key, 1), drawn)
        return q.amin(0)

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        """Mean of all critics (Algorithm 1, line 10)."""
        return torch.mean(self.q_values(params, obs, action, key), 0)
