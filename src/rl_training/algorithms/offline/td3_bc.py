"""TD3+BC (Fujimoto & Gu 2021): TD3 on a dataset, with the distance to the data's actions added to the policy's loss.

Deviations: the first update of actor and targets is update 1 instead of 2, as in our TD3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import Behaviour
from rl_training.algorithms.continuous.td3 import TD3, TD3Fields
from rl_training.algorithms.hyper import OfflineHyper, Positive, constant
from rl_training.algorithms.observations import check_can_normalise
from rl_training.data.storage import Batch
from rl_training.ops.losses import weighted_mean


class TD3BCHyper(TD3Fields, OfflineHyper):
    learning_rate: Positive = constant(3e-4)
    """Step size of the optimiser; a number or a schedule."""
    alpha: float = Field(2.5, gt=0.0)
    """Weight of the value against the distance to the data's actions (paper: 2.5)."""
    normalize_observations: bool = True
    """Subtract the dataset's mean observation and divide by its deviation; part of the policy, saved with it."""


class TD3BC(TD3):
    Hyper = TD3BCHyper
    name = "td3_bc"
    if TYPE_CHECKING:
        hp: TD3BCHyper

    def setup(self) -> None:
        super().setup()
        check_can_normalise(self.spec, self.hp.normalize_observations)

    def init_extra(self) -> dict[str, Any]:
        if not self.hp.normalize_observations:
            return {}
        size = self.spec.obs_dim
        if self.dataset is None:  # a policy that is about to be loaded
            return {"obs_mean": torch.zeros(size), "obs_std": torch.ones(size)}
        mean, std = self.dataset.moments()  # Eq. 6
        return {"obs_mean": torch.tensor(mean).float(), "obs_std": torch.tensor(std).float()}

    def seen(self, state: TrainState, obs: Obs) -> Obs:
        """Observations as the networks see them."""
        if not self.hp.normalize_observations:
            return obs
        return (obs - state.extra["obs_mean"]) / state.extra["obs_std"]

    def policy_loss(self, critic: Tensor, batch: Batch, action: Tensor) -> Tensor:
        q = self.first_q(critic, batch["obs"], action)
        scale = self.hp.alpha / weighted_mean(q.detach().abs(), batch["weights"]).clamp(min=1e-8)  # lambda, Eq. 5
        loss: Tensor = (action - batch["actions"]).square().mean(-1) - scale * q  # Eq. 3
        return loss

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        seen = {"obs": self.seen(state, batch["obs"]), "next_obs": self.seen(state, batch["next_obs"])}
        return super().train_step(state, {**batch, **seen}, key, actor)

    def behaviour(self, state: TrainState, obs: Obs) -> Behaviour:
        return super().behaviour(state, self.seen(state, obs))

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Smallest critic's value of the deterministic action."""
        q: Tensor = self.nets["critic"](state.params["critic"], self.seen(state, obs), self.greedy(state, obs))
        return q.amin(0)
