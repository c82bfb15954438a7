"""Soft Q imitation learning, SQIL (Reddy et al. 2020): reinforcement learning on batches that are half an expert's
transitions with reward 1 and half the policy's own with reward 0. The rewards of environment and dataset are not read.

`sqil` is SAC on these rewards. `discrete_sqil` is soft Q-learning: DQN with the `soft` target rule.

Rewards of 1 make it pay to stay in states that the expert visits. Where episodes end early, surviving pays as well,
whatever the expert does; in tasks of fixed length there is no such bias.

Deviations: two critics, target networks and, for continuous actions, SAC's tuned temperature, where the paper has one
network and temperature 1; `discrete_sqil` explores with epsilon instead of sampling from the soft policy, has a
temperature of 0.1, and keeps DQN's Huber loss instead of the squared error.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.continuous.sac import SAC, SACHyper
from rl_training.algorithms.prior_data import ExpertFields
from rl_training.algorithms.value.dqn import DQN, DQNHyper
from rl_training.algorithms.value.target_rules import TargetRule
from rl_training.data.storage import Batch


class SQILHyper(SACHyper, ExpertFields):
    """Settings of SQIL with continuous actions."""


class DiscreteSQILHyper(DQNHyper, ExpertFields):
    """Settings of SQIL with discrete actions."""

    target_rule: TargetRule = "soft"
    rule_temperature: float = Field(0.1, gt=0.0)


def with_imitation_rewards(batch: Batch) -> Batch:
    """The batch with reward 1 on the expert's rows and 0 on the policy's own (section 3)."""
    return {**batch, "rewards": batch["labels"]}


class SQIL(SAC[SQILHyper]):
    Hyper = SQILHyper
    name = "sqil"

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        return super().train_step(state, with_imitation_rewards(batch), key, actor)


class DiscreteSQIL(DQN[DiscreteSQILHyper]):
    Hyper = DiscreteSQILHyper
    name = "discrete_sqil"
    masks = False  # datasets have no masks

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        return super().train_step(state, with_imitation_rewards(batch), key)
