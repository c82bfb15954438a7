"""Synchronous advantage actor-critic (Mnih et al. 2016, without the asynchrony): one update on each whole rollout.

Settings and RMSprop (smoothing 0.99, no centring) are those of Stable-Baselines3. Deviation from the paper: separate
actor and critic networks, and generalised advantages, which `gae_lambda` 1 makes its n-step returns.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, Batch, TrainState
from rl_training.algorithms.hyper import Positive, RolloutHyper, constant
from rl_training.algorithms.policy_gradient import PolicyGradient
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean, weighted_normalise


class A2CHyper(RolloutHyper):
    learning_rate: Positive = constant(7e-4)
    """Step size of the optimiser; a number or a schedule."""
    n_steps: int = Field(5, ge=1)
    """Steps of each environment in one rollout, which is one update."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Bias-variance trade-off of the advantage estimate; 1: n-step returns."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "rmsprop"
    """Rule that turns gradients into steps."""
    rmsprop_alpha: float = Field(0.99, gt=0.0, lt=1.0)
    """Smoothing of the squared gradients (rmsprop)."""
    ent_coef: Positive = constant(0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""
    normalize_advantage: bool = False
    """Standardise the advantages of each rollout."""


class A2C(PolicyGradient[A2CHyper]):
    Hyper = A2CHyper
    name = "a2c"

    def setup(self) -> None:
        super().setup()
        if self.hp.optimizer == "rmsprop":
            self.optim = self.optimizer(beta2=self.hp.rmsprop_alpha)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, weights, mask = self.hp, batch["weights"], batch.get("mask")
        advantages = batch["advantages"]
        if hp.normalize_advantage:
            advantages = weighted_normalise(advantages, weights)
        ent_coef = hp.ent_coef(state.progress)

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out, values = self.outputs({"policy": params}, batch["obs"])
            log_probs = self.dist.log_prob(out, batch["actions"], mask)
            policy = weighted_mean(-advantages * log_probs, weights)
            value = weighted_mean((values - batch["returns"]) ** 2, weights)
            entropy = weighted_mean(self.dist.entropy(out, mask), weights)
            metrics = {"policy_loss": policy, "value_loss": value, "entropy": entropy}
            return policy + hp.vf_coef * value - ent_coef * entropy, metrics

        total, metrics, grads = value_and_grad(loss, state.params["policy"])
        params, opt = self.optim.update(
            grads, state.opt["policy"], state.params["policy"], hp.learning_rate(state.progress)
        )
        state = state._replace(params={"policy": params}, opt={"policy": opt}, step=state.step + 1)
        return state, Aux({"loss": total, **metrics})
