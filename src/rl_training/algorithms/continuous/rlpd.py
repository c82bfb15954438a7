"""RLPD (Ball et al. 2023): online SAC whose batches are half prior data, with LayerNorm critics, an ensemble of ten of
which two make the target, and twenty updates for each environment step.

Deviations: the policy learns at the first update of a block and climbs the mean of all critics, as in our REDQ.
"""

from __future__ import annotations

from rl_training.algorithms.continuous.redq import REDQHyper
from rl_training.algorithms.continuous.sac import SAC
from rl_training.algorithms.prior_data import PriorFields


class RLPDHyper(REDQHyper, PriorFields):
    layer_norm: bool = True
    entropy_per_action: float = -0.5


class RLPD(SAC[RLPDHyper]):
    Hyper = RLPDHyper
    name = "rlpd"
