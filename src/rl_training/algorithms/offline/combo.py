"""COMBO (Yu et al. 2021): MOPO with critics that are conservative where the model goes, and no penalty on its rewards.

Values of the rollouts' states are pushed down (by the soft maximum over actions of CQL, one of the paper's two choices)
and values of the data are pushed up (Eq. 2), on batches with a share `real_ratio` of real transitions (f of Eq. 3). It
needs no estimate of the model's error; `penalty_coef` adds MOPO's penalty as well.
It owns a CQL as MBPO owns a SAC.

Deviations: those of `Dynamics` (model_fit.py) and of CQL; the squared errors have no factor 1/2 (Eq. 2 has one), so
that `cql_alpha` means the same as in CQL.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Positive, constant
from rl_training.algorithms.offline.cql import CQL, CQLFields
from rl_training.algorithms.offline.mopo import MOPO, MOPOHyper
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.storage import Batch


class COMBOHyper(CQLFields, MOPOHyper):
    penalty_coef: float = Field(0.0, ge=0.0)
    """Weight of the model's uncertainty in the reward; the paper needs none."""
    real_ratio: float = Field(0.5, gt=0.0, lt=1.0)
    """Share of real transitions in the batches of the policy (f)."""
    cql_alpha: float = Field(1.0, ge=0.0)
    """Weight of the conservative term (beta; paper: 0.5 to 5)."""
    actor_learning_rate: Positive = constant(1e-4)

    @model_validator(mode="after")
    def _both_kinds(self) -> COMBOHyper:
        if not 0 < round(self.real_ratio * self.batch_size) < self.batch_size:
            raise ValueError(
                f"real_ratio = {self.real_ratio} of batch_size = {self.batch_size} leaves no real or no imagined row;"
                " the conservative term compares the two"
            )
        return self


class COMBO(MOPO[COMBOHyper]):
    Hyper = COMBOHyper
    Policy = CQL
    name = "combo"

    def mixed_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """A step of the policy on a batch whose column `real` marks the real rows: they come first."""
        rewards = batch["rewards"]
        real = torch.arange(len(rewards), device=rewards.device) < self.real_rows
        return self.policy_step(state, {**batch, "real": real}, key)

    def policy_phase(self, **fields: Any) -> ReplayPhase:
        return super().policy_phase(**fields)._replace(step=self.mixed_step)
