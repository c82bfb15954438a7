"""Conservative Q-learning for discrete actions, CQL(H) (Kumar et al. 2020): DQN on a dataset with a term that lowers
the soft maximum of the values over the actions, which is exact here, and raises the value of the data's action. All
options of DQN (double, dueling, target rules, ...) combine with it.

Deviations: the expected value is regressed (the paper's Atari runs add the term to QR-DQN); its weight is fixed.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.hyper import OfflineHyper
from rl_training.algorithms.value.dqn import DQN, TD, DQNFields, Params
from rl_training.algorithms.value.target_rules import take
from rl_training.data.storage import Batch
from rl_training.ops.losses import huber


class DiscreteCQLHyper(DQNFields, OfflineHyper):
    cql_alpha: float = Field(1.0, ge=0.0)
    """Weight of the conservative term; 0 is DQN on a dataset."""
    double: bool = True


class DiscreteCQL(DQN[DiscreteCQLHyper]):
    Hyper = DiscreteCQLHyper
    masks = False  # datasets have no masks
    name = "discrete_cql"
    kind_defaults = {}

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        values = self.q_values(params, batch["obs"], key)  # [B, A]
        q = take(values, batch["actions"])
        error = q - target
        gap = torch.logsumexp(values, -1) - q  # Eq. 4
        return TD(huber(error) + self.hp.cql_alpha * gap, q, target, error.abs(), {})
