"""IMPALA (Espeholt et al. 2018) in one process: actors whose policy lags behind the learner, corrected by V-trace.

The environments are acted in by the parameters of `policy_lag` updates ago, which is what an actor on another machine
would have; the importance ratios and V-trace targets are computed when a rollout is complete, and one update is made
on all of it. More actors would only add rollouts. Deviations: separate actor and critic networks; the means over a
rollout where the paper takes sums, so that step sizes do not depend on its length.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, Batch, TrainState
from rl_training.algorithms.hyper import Positive, RolloutHyper, constant
from rl_training.algorithms.policy_gradient import Params, PolicyGradient, Rollout
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.returns import vtrace
from rl_training.ops.tree import tree_map


class IMPALAHyper(RolloutHyper):
    learning_rate: Positive = constant(6e-4)
    """Step size of the optimiser; a number or a schedule."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "rmsprop"
    """Rule that turns gradients into steps."""
    rmsprop_alpha: float = Field(0.99, gt=0.0, lt=1.0)
    """Smoothing of the squared gradients (rmsprop)."""
    n_steps: int = Field(20, ge=1)
    """Steps of each environment in one rollout, which is one update."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Factor on the trace coefficients c of V-trace (lambda of its remark 2)."""
    policy_lag: int = Field(1, ge=0, le=64)
    """Updates by which the policy that collects is older than the one that learns."""
    rho_bar: float = Field(1.0, gt=0.0)
    """Bound on the importance weight of the temporal differences; it decides which policy is evaluated."""
    c_bar: float = Field(1.0, gt=0.0)
    """Bound on the importance weight of the traces; it decides how fast."""
    ent_coef: Positive = constant(0.01)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""


class IMPALA(PolicyGradient[IMPALAHyper]):
    Hyper = IMPALAHyper
    name = "impala"

    def setup(self) -> None:
        super().setup()
        if self.hp.optimizer == "rmsprop":
            self.optim = self.optimizer(beta2=self.hp.rmsprop_alpha)

    def init_state(self, seed: int) -> TrainState:
        """The actors' parameters and those after them, oldest first, up to the learner's; at first all the same."""
        state = super().init_state(seed)
        if not self.hp.policy_lag:
            return state
        history = state.params["policy"].expand(self.hp.policy_lag + 1, -1).clone()
        return state._replace(extra={**state.extra, "history": history})

    def behaviour(self, state: TrainState) -> Params:
        return {"policy": state.extra["history"][0]} if self.hp.policy_lag else state.params

    def advantages(self, state: TrainState, rollout: Rollout) -> tuple[Tensor, Tensor]:
        hp, behaviour_log_probs = self.hp, rollout.log_probs
        if hp.policy_lag:
            flat = tree_map(lambda x: x.flatten(0, 1), rollout.obs)
            out = self.policy_out(self.behaviour(state), flat)
            out = out.view(*rollout.rewards.shape, *out.shape[1:])
            behaviour_log_probs = self.dist.log_prob(out, rollout.actions, rollout.mask)
        return vtrace(
            rollout.log_probs - behaviour_log_probs, rollout.rewards, rollout.values, rollout.next_values,
            rollout.discounts, rollout.continues, hp.gae_lambda, hp.rho_bar, hp.c_bar,
        )  # fmt: skip

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, weights, mask = self.hp, batch["weights"], batch.get("mask")
        ent_coef = hp.ent_coef(state.progress)

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out, values = self.outputs({"policy": params}, batch["obs"])
            log_probs = self.dist.log_prob(out, batch["actions"], mask)
            policy = weighted_mean(-batch["advantages"] * log_probs, weights)  # section 4.2; advantages hold rho
            value = weighted_mean((values - batch["returns"]) ** 2, weights)
            entropy = weighted_mean(self.dist.entropy(out, mask), weights)
            metrics = {"policy_loss": policy, "value_loss": value, "entropy": entropy}
            return policy + hp.vf_coef * value - ent_coef * entropy, metrics

        old = state.params["policy"]
        total, metrics, grads = value_and_grad(loss, old)
        params, opt = self.optim.update(grads, state.opt["policy"], old, hp.learning_rate(state.progress))
        extra = dict(state.extra)
        if hp.policy_lag:
            extra["history"] = torch.cat([extra["history"][1:], params.unsqueeze(0)])
        state = state._replace(params={"policy": params}, opt={"policy": opt}, extra=extra, step=state.step + 1)
        return state, Aux({"loss": total, **metrics})
