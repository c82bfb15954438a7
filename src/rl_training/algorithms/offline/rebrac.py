"""ReBRAC (Tarasov et al. 2023): TD3 held to the data both in the policy's loss and in the critics' target, with
LayerNorm critics (the norm follows the ReLU), deeper networks and large batches.

Deviations: the first update of actor and targets is update 1 instead of 2, as in our TD3; at the last row of a
truncated episode the data's next action is not known, so its penalty is left out there; initial weights are PyTorch's,
where CORL starts biases at 0.1 and the last layers within 0.003 of 0.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.continuous.critics.base import CriticOptions, Extra
from rl_training.algorithms.continuous.critics.ensemble import TwinOptions
from rl_training.algorithms.continuous.td3 import TD3, Regularizer, TD3Fields
from rl_training.algorithms.hyper import OfflineHyper, Positive, Widths, constant
from rl_training.data.storage import Batch
from rl_training.ops.losses import weighted_mean


class ReBRACHyper(TD3Fields, OfflineHyper):
    learning_rate: Positive = constant(1e-3)
    hidden_sizes: Widths = (256, 256, 256)
    batch_size: int = Field(1024, ge=1)
    actor_penalty: float = Field(0.01, ge=0.0)
    """Weight of the squared distance to the data's action in the policy's loss (beta 1)."""
    critic_penalty: float = Field(0.01, ge=0.0)
    """Weight of the squared distance to the data's next action in the target (beta 2)."""
    normalize_q: bool = True
    """Divide the policy's value by its mean size, as TD3+BC does."""
    layer_norm: bool = True
    """LayerNorm in the critics."""

    def critic_options(self) -> CriticOptions:
        return TwinOptions.of(self, norm_last=True)


class TwoPenalties(Regularizer):
    """Squared distances to the data's action, and to its next action."""

    def __init__(self, hp: ReBRACHyper) -> None:
        self.hp = hp

    def next_bonus(self, batch: Batch, next_action: Tensor) -> Tensor:
        distance = (next_action - batch["next_actions"]).square().sum(-1)
        return -self.hp.critic_penalty * torch.where(batch["has_next"], distance, 0.0)  # Eq. 3

    def policy_loss(self, value: Tensor, action: Tensor, batch: Batch) -> Tensor:
        if self.hp.normalize_q:
            value = value / weighted_mean(value.detach().abs(), batch["weights"]).clamp(min=1e-8)
        loss: Tensor = self.hp.actor_penalty * (action - batch["actions"]).square().sum(-1) - value  # Eq. 2
        return loss


class ReBRAC(TD3[ReBRACHyper]):
    Hyper = ReBRACHyper
    name = "rebrac"
    dataset_columns = ("next_actions",)
    climbs = "smallest"

    def setup(self) -> None:
        super().setup()
        self.regularizer = TwoPenalties(self.hp)

    def init_extra(self) -> Extra:
        """With a mark in checkpoints: critics with LayerNorm before the activation have parameters of the same size."""
        return {**super().init_extra(), "norm_after_activation": torch.ones(())}
