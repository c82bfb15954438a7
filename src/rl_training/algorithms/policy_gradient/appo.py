"""Asynchronous PPO: the clipped objective of PPO (Schulman et al. 2017) on rollouts of a lagging policy, with V-trace
(Espeholt et al. 2018) instead of GAE.

V-trace corrects values and advantages (by the factor min(rho_bar, pi / mu)) for the difference between the policy that
collected a rollout and the one that learns from it. The clipped objective then limits how far the policy moves during
the epochs. So unlike in PPO, a rollout may be old; unlike in IMPALA, it is used several times.

Deviations: those of PPO; no paper describes this combination, which other libraries have under the same name.
"""

from __future__ import annotations

from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.policy_gradient.impala import VTraceActor, VTraceFields
from rl_training.algorithms.policy_gradient.ppo import PPO, PPOHyper
from rl_training.data.storage import Batch
from rl_training.errors import UserError


class APPOHyper(VTraceFields, PPOHyper):
    """Settings of PPO and of V-trace."""


class APPO(VTraceActor[APPOHyper], PPO[APPOHyper]):
    Hyper = APPOHyper
    name = "appo"

    def setup(self) -> None:
        super().setup()
        if self.hp.clip_range_vf is not None:
            raise UserError(
                f"{self.name} cannot clip values (clip_range_vf): V-trace advantages do not determine the old values"
            )

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        new, aux = super().train_step(state, batch, key)
        return self.remember(new), aux
