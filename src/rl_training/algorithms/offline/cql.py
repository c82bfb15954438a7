"""Conservative Q-learning, CQL(H) (Kumar et al. 2020), and Cal-QL (Nakamoto et al. 2023): SAC on a dataset whose
critics are pushed down where the policy goes and up on the data. Cal-QL does not push the values of the policy's
actions below the return that the data reached from that state. `cal_ql_online` continues in the environment; the
returns of its own episodes are a floor once they have ended.
The squared errors have no factor 1/2, as in CORL, whose values of `cql_alpha` are the published ones.

Deviations: the penalty's weight is fixed, not tuned by a Lagrange multiplier; the estimate of the soft maximum is
divided by the number of samples, so that it is the integral itself (a constant in the loss); observations are not
normalised, and initial weights are not orthogonal, as they are in CORL.
"""

from __future__ import annotations

from rl_training.algorithms.continuous.critics.base import CriticOptions
from rl_training.algorithms.continuous.critics.penalised import (
    CalibratedOptions,
    ConservativeFields,
    ConservativeOptions,
)
from rl_training.algorithms.continuous.sac import SAC, SACFields
from rl_training.algorithms.hyper import OfflineHyper, Positive, Widths, constant
from rl_training.algorithms.prior_data import FineTuneFields
from rl_training.ops.schedules import Schedule


class CQLFields(ConservativeFields, SACFields):
    """Settings of CQL on any kind of data."""

    actor_learning_rate: Positive = constant(3e-5)
    """Step size of policy and temperature; a number or a schedule."""

    def critic_options(self) -> CriticOptions:
        return ConservativeOptions.of(self)

    def actor_rate(self) -> Schedule:
        return self.actor_learning_rate


class CQLHyper(CQLFields, OfflineHyper):
    """Settings of CQL on a dataset alone."""

    hidden_sizes: Widths = (256, 256, 256)


class CalQLHyper(CQLHyper):
    def critic_options(self) -> CriticOptions:
        return CalibratedOptions.of(self)


class CalQLOnlineHyper(CQLFields, FineTuneFields):
    """Settings of Cal-QL on a dataset and in the environment."""

    hidden_sizes: Widths = (256, 256, 256)

    def critic_options(self) -> CriticOptions:
        return CalibratedOptions.of(self)


class CQL(SAC[CQLHyper]):
    Hyper = CQLHyper
    name = "cql"


class CalQL(SAC[CalQLHyper]):
    Hyper = CalQLHyper
    name = "cal_ql"
    dataset_columns = ("returns",)


class CalQLOnline(SAC[CalQLOnlineHyper]):
    Hyper = CalQLOnlineHyper
    name = "cal_ql_online"
    dataset_columns = ("returns",)
