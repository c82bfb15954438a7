"""ReBRAC (Tarasov et al. 2023): TD3 held to the data both in the policy's loss and in the critics' target, with
LayerNorm critics, deeper networks and large batches.

Deviations: the first update of actor and targets is update 1 instead of 2, as in our TD3. At the last row of an episode
that was cut, the data's next action is not known: its penalty is left out there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.continuous.td3 import TD3, TD3Fields
from rl_training.algorithms.hyper import OfflineHyper, Positive, Widths, constant
from rl_training.data.storage import Batch
from rl_training.models.control import TD3Model
from rl_training.ops.losses import weighted_mean
from rl_training.spec import EnvSpec


class ReBRACHyper(TD3Fields, OfflineHyper):
    learning_rate: Positive = constant(1e-3)
    """Step size of the optimiser; a number or a schedule."""
    hidden_sizes: Widths = (256, 256, 256)
    """Widths of the hidden layers of actor and critics."""
    batch_size: int = Field(1024, ge=1)
    """Transitions in one update."""
    actor_penalty: float = Field(0.01, ge=0.0)
    """Weight of the squared distance to the data's action in the policy's loss (beta 1)."""
    critic_penalty: float = Field(0.01, ge=0.0)
    """Weight of the squared distance to the data's next action in the target (beta 2)."""
    normalize_q: bool = True
    """Divide the policy's value by its mean size, as TD3+BC does."""
    layer_norm: bool = True
    """LayerNorm in the critics."""


class ReBRAC(TD3):
    Hyper = ReBRACHyper
    name = "rebrac"
    dataset_columns = ("next_actions",)
    if TYPE_CHECKING:
        hp: ReBRACHyper

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        options = {"num_critics": hp.num_critics, "activation": hp.activation, "layer_norm": hp.layer_norm}
        return self.named_networks(TD3Model(spec, hp.hidden_sizes, **options))

    def next_q(self, params: Tensor, batch: Batch, next_action: Tensor) -> Tensor:
        distance = (next_action - batch["next_actions"]).square().sum(-1)
        penalty = self.hp.critic_penalty * torch.where(batch["has_next"], distance, 0.0)
        return super().next_q(params, batch, next_action) - penalty  # Eq. 3

    def policy_loss(self, critic: Tensor, batch: Batch, action: Tensor) -> Tensor:
        q: Tensor = self.nets["critic"](critic, batch["obs"], action).amin(0)
        if self.hp.normalize_q:
            q = q / weighted_mean(q.detach().abs(), batch["weights"]).clamp(min=1e-8)
        loss: Tensor = self.hp.actor_penalty * (action - batch["actions"]).square().sum(-1) - q  # Eq. 2
        return loss
