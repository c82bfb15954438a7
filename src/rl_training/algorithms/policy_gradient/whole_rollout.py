"""One step along the plain policy gradient on each whole rollout: what A2C and IMPALA do."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Positive, RolloutHyper, constant
from rl_training.algorithms.policy_gradient.base import PolicyGradient
from rl_training.data.storage import Batch
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer


class WholeRolloutHyper(RolloutHyper):
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "rmsprop"
    """Rule that turns gradients into steps."""
    rmsprop_alpha: float = Field(0.99, gt=0.0, lt=1.0)
    """Smoothing of the squared gradients (rmsprop)."""
    ent_coef: Positive = constant(0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""


W = TypeVar("W", bound=WholeRolloutHyper)


def rollout_optimizer(algorithm: PolicyGradient[W]) -> Optimizer:
    """The optimiser of the settings, with the smoothing of RMSprop."""
    hp = algorithm.hp
    return algorithm.optimizer(**({"beta2": hp.rmsprop_alpha} if hp.optimizer == "rmsprop" else {}))


def rollout_step(algorithm: PolicyGradient[W], state: TrainState, batch: Batch) -> tuple[TrainState, Aux]:
    """One gradient step on policy, value and entropy of the whole rollout."""
    hp, dist, weights, mask = algorithm.hp, algorithm.dist, batch["weights"], batch.get("mask")
    ent_coef = hp.ent_coef(state.progress)

    def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out, values = algorithm.outputs({"policy": params}, batch["obs"])
        log_probs = dist.log_prob(out, batch["actions"], mask)
        policy = weighted_mean(-batch["advantages"] * log_probs, weights)
        value = weighted_mean((values - batch["returns"]) ** 2, weights)
        entropy = weighted_mean(dist.entropy(out, mask), weights)
        metrics = {"policy_loss": policy, "value_loss": value, "entropy": entropy}
        return policy + hp.vf_coef * value - ent_coef * entropy, metrics

    old = state.params["policy"]
    total, metrics, grads = value_and_grad(loss, old)
    params, opt = algorithm.optim.update(grads, state.opt["policy"], old, hp.learning_rate(state.progress))
    state = state._replace(params={"policy": params}, opt={"policy": opt}, step=state.step + 1)
    return state, Aux({"loss": total, **metrics})
