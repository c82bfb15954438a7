"""Synchronous advantage actor-critic (Mnih et al. 2016, without the asynchrony): one update on each whole rollout.

Settings and RMSprop (smoothing 0.99, no centring) are those of Stable-Baselines3. Deviations from the paper: separate
actor and critic networks, and generalised advantages; with `gae_lambda` 1 they are the paper's n-step returns.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Positive, constant
from rl_training.algorithms.policy_gradient.base import PolicyGradient
from rl_training.algorithms.policy_gradient.whole_rollout import WholeRolloutHyper, rollout_optimizer, rollout_step
from rl_training.data.storage import Batch
from rl_training.ops.losses import weighted_normalise


class A2CHyper(WholeRolloutHyper):
    learning_rate: Positive = constant(7e-4)
    """Step size of the optimiser; a number or a schedule."""
    n_steps: int = Field(5, ge=1)
    """Steps of each environment in one rollout, which is one update."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Bias-variance trade-off of the advantage estimate; 1: n-step returns."""
    normalize_advantage: bool = False
    """Standardise the advantages of each rollout."""


class A2C(PolicyGradient[A2CHyper]):
    Hyper = A2CHyper
    name = "a2c"

    def setup(self) -> None:
        super().setup()
        self.optim = rollout_optimizer(self)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        if self.hp.normalize_advantage:
            batch = {**batch, "advantages": weighted_normalise(batch["advantages"], batch["weights"])}
        return rollout_step(self, state, batch)
