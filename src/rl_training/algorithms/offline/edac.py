"""SAC-N and EDAC (An et al. 2021): SAC on a dataset with an ensemble of critics whose minimum is the target; EDAC also
keeps the critics' gradients with respect to the action apart, so that fewer of them are enough (eta 0 is SAC-N).
Vector observations only: the gradients need one copy of the observation for each critic. The squared errors have no
factor 1/2 beside the diversity term, as in CORL, whose values of `eta` are the published ones.

Deviations: initial weights are PyTorch's, where CORL starts biases at 0.1 and the last layers within 0.003 of 0.
"""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.continuous.critics.base import CriticOptions
from rl_training.algorithms.continuous.critics.ensemble import TwinOptions
from rl_training.algorithms.continuous.critics.penalised import DiverseFields, DiverseOptions
from rl_training.algorithms.continuous.sac import SAC, SACFields
from rl_training.algorithms.hyper import OfflineHyper, Widths


class EDACHyper(DiverseFields, SACFields, OfflineHyper):
    hidden_sizes: Widths = (256, 256, 256)
    num_critics: int = Field(10, ge=2)
    """Critics in the ensemble, whose minimum is the target (N)."""

    def critic_options(self) -> CriticOptions:
        return DiverseOptions(eta=self.eta, base=TwinOptions(num_critics=self.num_critics))


class EDAC(SAC[EDACHyper]):
    Hyper = EDACHyper
    name = "edac"
    vector_observations = True
