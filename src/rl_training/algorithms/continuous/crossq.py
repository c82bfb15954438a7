"""CrossQ (Bhatt et al. 2024): SAC without target networks, made stable by batch normalisation.

Deviations: critics as wide as the actor by default (the paper's are [2048, 2048]: `critic_hidden_sizes`).
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rl_training.algorithms.continuous.critics.base import CriticOptions
from rl_training.algorithms.continuous.critics.renorm import RenormFields, RenormOptions
from rl_training.algorithms.continuous.sac import SAC, SACReplayHyper
from rl_training.algorithms.hyper import Positive, constant
from rl_training.ops.optim import Optimizer


class CrossQHyper(RenormFields, SACReplayHyper):
    learning_rate: Positive = constant(1e-3)
    policy_delay: int = Field(3, ge=1)
    adam_beta1: float = Field(0.5, ge=0.0, lt=1.0)
    """Decay of the optimiser's first moment (the paper's 0.5 in place of the usual 0.9)."""

    def critic_options(self) -> CriticOptions:
        return RenormOptions.of(self)


class CrossQ(SAC[CrossQHyper]):
    Hyper = CrossQHyper
    name = "crossq"

    def optimizer(self, **changes: Any) -> Optimizer:
        return super().optimizer(beta1=self.hp.adam_beta1, **changes)
