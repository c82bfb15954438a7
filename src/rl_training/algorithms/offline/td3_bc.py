"""TD3+BC (Fujimoto & Gu 2021): TD3 on a dataset, with the distance to the data's actions added to the policy's loss.

Deviations: the first update of actor and targets is update 1 instead of 2, as in our TD3.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import Behaviour
from rl_training.algorithms.continuous.td3 import TD3, Regularizer, TD3Fields
from rl_training.algorithms.hyper import OfflineHyper, Positive, constant
from rl_training.algorithms.observations import DatasetNormalizer
from rl_training.data.storage import Batch
from rl_training.ops.losses import weighted_mean


class TD3BCHyper(TD3Fields, OfflineHyper):
    learning_rate: Positive = constant(3e-4)
    alpha: float = Field(2.5, gt=0.0)
    """Weight of the value against the distance to the data's actions (paper: 2.5)."""
    normalize_observations: bool = True
    """Subtract the dataset's mean observation and divide by its deviation; part of the policy, saved with it."""


class BehaviourCloning(Regularizer):
    """The squared distance to the data's action beside the value, which is scaled to a mean size of alpha."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def policy_loss(self, value: Tensor, action: Tensor, batch: Batch) -> Tensor:
        scale = self.alpha / weighted_mean(value.detach().abs(), batch["weights"]).clamp(min=1e-8)  # lambda, Eq. 5
        loss: Tensor = (action - batch["actions"]).square().mean(-1) - scale * value  # Eq. 3
        return loss


class TD3BC(TD3[TD3BCHyper]):
    """TD3 on normalised observations."""

    Hyper = TD3BCHyper
    name = "td3_bc"

    def setup(self) -> None:
        super().setup()
        self.regularizer = BehaviourCloning(self.hp.alpha)
        self.normalised = DatasetNormalizer(self.spec, self.hp.normalize_observations)  # Eq. 6

    def init_extra(self) -> dict[str, Any]:
        return self.normalised.init_extra(self.dataset)

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        inputs = {name: self.normalised(state.extra, batch[name]) for name in ("obs", "next_obs")}
        return super().train_step(state, {**batch, **inputs}, key, actor)

    def behaviour(self, state: TrainState, obs: Obs) -> Behaviour:
        return super().behaviour(state, self.normalised(state.extra, obs))

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critics' value of the deterministic action."""
        action = self.greedy(state, obs)
        return self.critic.value(state.params["critic"], state.extra, self.normalised(state.extra, obs), action)
