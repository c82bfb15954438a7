"""IMPALA (Espeholt et al. 2018) in one process: actors whose policy lags behind the learner, corrected by V-trace.

The policy acts with the parameters of `policy_lag` updates ago, as an actor on another machine would. Importance ratios
and V-trace targets are computed when a rollout is complete, and one update uses all of it. More actors would only add
rollouts. Deviations: separate actor and critic networks; losses are means over a rollout where the paper takes sums, so
that step sizes do not depend on its length.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Positive, constant
from rl_training.algorithms.policy_gradient.a2c import WholeRolloutHyper, rollout_optimizer, rollout_step
from rl_training.algorithms.policy_gradient.base import Params, PolicyGradient, Rollout
from rl_training.data.storage import Batch
from rl_training.ops.returns import vtrace
from rl_training.ops.tree import tree_map


class IMPALAHyper(WholeRolloutHyper):
    learning_rate: Positive = constant(6e-4)
    """Step size of the optimiser; a number or a schedule."""
    n_steps: int = Field(20, ge=1)
    """Steps of each environment in one rollout, which is one update."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Factor on the trace coefficients c of V-trace (lambda of its remark 2)."""
    policy_lag: int = Field(1, ge=0, le=64)
    """Updates by which the policy that collects is older than the one that learns."""
    rho_bar: float = Field(1.0, gt=0.0)
    """Bound on the importance weight of the temporal differences; it decides which policy is evaluated."""
    c_bar: float = Field(1.0, gt=0.0)
    """Bound on the importance weight of the traces; it decides how fast values converge."""
    ent_coef: Positive = constant(0.01)
    """Weight of the entropy bonus; a number or a schedule."""


class IMPALA(PolicyGradient[IMPALAHyper]):
    Hyper = IMPALAHyper
    name = "impala"

    def setup(self) -> None:
        super().setup()
        self.optim = rollout_optimizer(self)

    def init_state(self, seed: int) -> TrainState:
        """Also the parameters of the last updates, oldest (the actors') first; at the start all are the same."""
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
        """Section 4.2. The factor rho is in the advantages already."""
        new, aux = rollout_step(self, state, batch)
        if self.hp.policy_lag:
            history = torch.cat([state.extra["history"][1:], new.params["policy"].unsqueeze(0)])
            new = new._replace(extra={**new.extra, "history": history})
        return new, aux
