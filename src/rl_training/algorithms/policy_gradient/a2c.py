"""Synchronous advantage actor-critic (Mnih et al. 2016, without the asynchrony): one update on each whole rollout.

Settings and RMSprop (smoothing 0.99, no centring) are those of Stable-Baselines3. On images, actor and critic share
their convolutions, as in the paper.

Deviations: separate actor and critic networks on vectors (`shared_trunk`), and generalised advantages; with
`gae_lambda` 1 they are the paper's n-step returns.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Positive, RolloutHyper, SharedTrunkFields, constant
from rl_training.algorithms.policy_gradient.base import PolicyGradient
from rl_training.data.storage import Batch
from rl_training.ops.losses import weighted_mean, weighted_normalise
from rl_training.ops.optim import Optimizer


class RolloutLossHyper(SharedTrunkFields, RolloutHyper):
    """Settings of the loss of a whole rollout."""

    ent_coef: Positive = constant(0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss, the mean squared error (as in Stable-Baselines3; a source that halves the error means
    twice the weight)."""


class WholeRolloutHyper(RolloutLossHyper):
    """Settings of one update on each whole rollout (A2C, IMPALA)."""

    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "rmsprop"
    rmsprop_alpha: float = Field(0.99, gt=0.0, lt=1.0)
    """Smoothing of the squared gradients (rmsprop)."""


L = TypeVar("L", bound=RolloutLossHyper)
W = TypeVar("W", bound=WholeRolloutHyper)


def rollout_optimizer(algorithm: PolicyGradient[W]) -> Optimizer:
    """The optimiser of the settings, with the smoothing of RMSprop."""
    hp = algorithm.hp
    return algorithm.optimizer(**({"beta2": hp.rmsprop_alpha} if hp.optimizer == "rmsprop" else {}))


def rollout_step(
    algorithm: PolicyGradient[L], state: TrainState, batch: Batch, scale: Tensor | float = 1.0
) -> tuple[TrainState, Aux]:
    """One gradient step on policy, value and entropy of the whole rollout: `scale` times their means."""
    hp, dist, weights, mask = algorithm.hp, algorithm.dist, batch["weights"], batch.get("mask")
    ent_coef = hp.ent_coef(state.progress)

    def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out, values = algorithm.outputs({"policy": params}, batch["obs"])
        log_probs = dist.log_prob(out, batch["actions"], mask)
        policy = weighted_mean(-batch["advantages"] * log_probs, weights)
        value = weighted_mean((values - batch["returns"]) ** 2, weights)
        entropy = weighted_mean(dist.entropy(out, mask), weights)
        metrics = {"policy_loss": policy, "value_loss": value, "entropy": entropy}
        return scale * (policy + hp.vf_coef * value - ent_coef * entropy), metrics

    state, total, metrics, grad_norm = algorithm.descend_with_norm(state, "policy", loss)
    return state._replace(step=state.step + 1), Aux({"loss": total, **metrics, "grad_norm": grad_norm})


class A2CHyper(WholeRolloutHyper):
    learning_rate: Positive = constant(7e-4)
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
