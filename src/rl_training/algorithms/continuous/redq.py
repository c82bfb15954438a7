"""Randomised ensembled double Q-learning, REDQ (Chen et al. 2021), and DroQ (Hiraoka et al. 2022).

Both are SAC with many updates for each environment step, kept from overestimating by the critics:
REDQ takes the minimum over a random pair of ten critics; DroQ takes two critics with dropout and LayerNorm.
As in both papers the policy learns once for each block of critic updates, from the mean of all critics.

Deviations: the policy learns at the first update of a block instead of the last, which is the same rhythm.
"""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.continuous.critics.base import CriticOptions
from rl_training.algorithms.continuous.critics.ensemble import SubsetFields, SubsetOptions
from rl_training.algorithms.continuous.sac import SAC, SACReplayHyper


class REDQHyper(SubsetFields, SACReplayHyper):
    gradient_steps: int = Field(20, ge=-1)
    """Updates in a block (the update-to-data ratio); -1: one for each transition collected since the last block."""
    policy_delay: int = Field(20, ge=1)

    def critic_options(self) -> CriticOptions:
        return SubsetOptions.of(self)


class REDQ(SAC[REDQHyper]):
    Hyper = REDQHyper
    name = "redq"
