"""Model-based offline policy optimisation, MOPO (Yu et al. 2020, Algorithm 2): MBPO on a dataset, where the reward of
an imagined step is lowered by the model's own estimate of its error.

The ensemble is fitted to the dataset first. Then rollouts start from the dataset's states every `rollout_freq` updates,
and SAC learns from batches with a share `real_ratio` of real transitions. The penalty is `penalty_coef` x the largest
norm of a member's standard deviation (section 4.3); with 0 it is MBPO without new data.

Deviations: those of `Dynamics` (model_fit.py).
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import UpdateResult
from rl_training.algorithms.hyper import Hyper, OfflineHyper
from rl_training.algorithms.model_based.mbpo import ModelPolicy, RolloutFields
from rl_training.algorithms.phases import ONCE, ReplayPhase
from rl_training.data.storage import Batch
from rl_training.models.dynamics import Imagined


class MOPOHyper(RolloutFields, OfflineHyper):
    penalty_coef: float = Field(1.0, ge=0.0)
    """Weight of the model's uncertainty in the reward (lambda; paper: 0.5 to 5)."""
    rollout_freq: int = Field(1_000, ge=1)
    """Updates between two sets of rollouts."""
    rollout_length: int = Field(5, ge=1)

    model_retain_epochs: float = Field(5.0, gt=0.0)

    def rollouts_every(self, num_envs: int) -> int:
        return self.rollout_freq

    @model_validator(mode="after")
    def _blocks(self) -> MOPOHyper:
        if self.rollout_freq % self.updates_per_call:
            raise ValueError(
                f"rollout_freq = {self.rollout_freq} must be a multiple of updates_per_call = {self.updates_per_call}"
            )
        return self


M = TypeVar("M", bound=MOPOHyper)


class MOPO(ModelPolicy[M]):
    Hyper: ClassVar[type[Hyper]] = MOPOHyper
    name = "mopo"

    def reward(self, imagined: Imagined) -> Tensor:
        return imagined.rewards - self.hp.penalty_coef * imagined.uncertainty  # Eq. 8

    def phases(self) -> tuple[ReplayPhase, ...]:
        rows = len(self.dataset) if self.dataset is not None else 0
        return (
            *self.dynamics.phases(lambda _: rows, ONCE),
            *self.imagination_phases(self.hp.rollout_freq),
            self.policy_phase(),
        )

    def update_model(self, batch: Batch) -> UpdateResult:
        """One gradient step of the model alone, on a batch of arrays or tensors."""
        return self.shell.update(batch, self.model_step)
