"""Truncated quantile critics (Kuznetsov et al. 2020): SAC with quantile critics whose largest atoms are dropped.

Deviations: two critics by default instead of five, as in the runs that published scores are compared with.
"""

from __future__ import annotations

from rl_training.algorithms.continuous.critics.base import CriticOptions
from rl_training.algorithms.continuous.critics.quantile import QuantileFields, QuantileOptions
from rl_training.algorithms.continuous.sac import SAC, SACReplayHyper


class TQCHyper(QuantileFields, SACReplayHyper):
    def critic_options(self) -> CriticOptions:
        return QuantileOptions.of(self)


class TQC(SAC[TQCHyper]):
    Hyper = TQCHyper
    name = "tqc"
