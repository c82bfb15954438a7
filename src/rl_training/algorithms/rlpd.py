"""RLPD (Ball et al. 2023): online SAC whose batches are half prior data, with LayerNorm critics, an ensemble of ten of
which two make the target, and twenty updates for each environment step.

Deviations: the policy learns at the first update of a block and climbs the mean of all critics, as in our REDQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rl_training.algorithms.base import Phase
from rl_training.algorithms.redq import REDQ, REDQHyper
from rl_training.data.dataset import DatasetSource
from rl_training.data.recipes import DatasetRecipe
from rl_training.data.source import Source
from rl_training.errors import UserError


class RLPDHyper(REDQHyper):
    dataset: DatasetRecipe = Field(default_factory=DatasetRecipe)
    """Where the prior data come from: a recipe (docs/offline.md)."""
    prior_share: float = Field(0.5, ge=0.0, le=1.0)
    """Share of each batch that is prior data."""
    layer_norm: bool = True
    """LayerNorm in the critics."""


class RLPD(REDQ):
    Hyper = RLPDHyper
    name = "rlpd"
    if TYPE_CHECKING:
        hp: RLPDHyper

    def phases(self) -> tuple[Phase, ...]:
        return tuple(phase._replace(source="mixed") for phase in super().phases())

    def prior(self) -> tuple[Source, float]:
        if self.dataset is None:
            raise UserError(f"{self.name} learns with a dataset; none was given")
        if self.hp.n_step != 1 or self.hp.prioritized:
            raise UserError(f"{self.name} mixes its batches from one-step transitions: leave n_step and prioritized")
        return DatasetSource(self.dataset, self.hp.gamma), self.hp.prior_share
