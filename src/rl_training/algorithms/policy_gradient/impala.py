"""IMPALA (Espeholt et al. 2018): the policy that collects lags behind the one that learns, corrected by V-trace.

In one process, the policy acts with the parameters of `policy_lag` updates ago, as an actor on another machine would.
With `store_log_probs`, the lag may be anything: the probability of each action is stored when it is chosen. V-trace
targets are computed when a rollout is complete, and one update uses all of it. The paper's network for images is
`cnn: impala`, and its optimiser is RMSprop with decay 0.99 and epsilon 0.01 on sums of losses (`reduction: sum`); the
presets `impala/*_atari` have both.

Deviations: losses are means over a rollout by default, so that step sizes do not depend on its length (epsilon 1e-5 on
means is close to 0.01 on sums over 20 x 32 steps); no LSTM; separate actor and critic networks on vectors
(`shared_trunk`); epsilon is added to the root of the squared gradients, as in TorchBeast, not under it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from rl_training.algorithms.base import Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import Positive, constant
from rl_training.algorithms.policy_gradient.a2c import WholeRolloutHyper, rollout_optimizer, rollout_step
from rl_training.algorithms.policy_gradient.base import Params, PolicyGradient, R, Rollout
from rl_training.data.storage import Batch, Columns
from rl_training.ops.returns import vtrace
from rl_training.ops.tree import tree_map


class VTraceFields(BaseModel):
    """Settings of V-trace, for hyper-parameters of any kind of update."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Factor on the trace coefficients c of V-trace (lambda of its remark 2)."""
    policy_lag: int = Field(1, ge=0, le=64)
    """Updates by which the policy that collects is older than the one that learns."""
    store_log_probs: bool = False
    """Store the log-probability of each action when it is chosen; then the policy may lag by any number of updates."""
    rho_bar: float = Field(1.0, gt=0.0)
    """Bound on the importance weight of the temporal differences; it decides which policy is evaluated."""
    c_bar: float = Field(1.0, gt=0.0)
    """Bound on the importance weight of the traces; it decides how fast values converge."""


class IMPALAHyper(VTraceFields, WholeRolloutHyper):
    learning_rate: Positive = constant(6e-4)
    n_steps: int = Field(20, ge=1)
    """Steps of each environment in one rollout, which is one update."""
    reduction: Literal["mean", "sum"] = "mean"
    """The loss of a rollout: the mean over its steps, or their sum as in the paper. It decides what max_grad_norm and
    adam_eps are relative to."""
    ent_coef: Positive = constant(0.01)


class VTraceActor(PolicyGradient[R]):
    """Acts with old parameters, and corrects for that when a rollout is complete."""

    hp: Any

    def init_state(self, seed: int) -> TrainState:
        """Also the parameters of the last updates, oldest (the actors') first; at the start all are the same."""
        state = super().init_state(seed)
        if not self.hp.policy_lag:
            return state
        history = state.params["policy"].expand(self.hp.policy_lag + 1, -1).clone()
        return state._replace(extra={**state.extra, "history": history})

    def remember(self, new: TrainState) -> TrainState:
        """The state after an update, with the new parameters as the latest of the history."""
        if not self.hp.policy_lag:
            return new
        history = torch.cat([new.extra["history"][1:], new.params["policy"].unsqueeze(0)])
        return new._replace(extra={**new.extra, "history": history})

    def behaviour(self, state: TrainState) -> Params:
        return {"policy": state.extra["history"][0]} if self.hp.policy_lag else state.params

    def extra_columns(self) -> Columns:
        return {"behaviour_log_probs": ((), torch.float32)} if self.hp.store_log_probs else {}

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        if not (explore and self.hp.store_log_probs):
            return super().select_action(state, carry, obs, key, explore=explore)
        seen, mask = self.reader.read(state.extra, obs)
        out = self.policy_out(self.behaviour(state), seen)
        actions = self.dist.sample(out, key, mask)
        return carry, actions, {"behaviour_log_probs": self.dist.log_prob(out, actions, mask)}

    def behaviour_log_probs(self, state: TrainState, rollout: Rollout) -> Tensor:
        """Log-probabilities [T, N] of the actions under the policy that chose them."""
        if rollout.behaviour_log_probs is not None:
            return rollout.behaviour_log_probs
        if not self.hp.policy_lag:
            return rollout.log_probs
        flat = tree_map(lambda x: x.flatten(0, 1), rollout.obs)
        out = self.policy_out(self.behaviour(state), flat)
        return self.dist.log_prob(out.view(*rollout.rewards.shape, *out.shape[1:]), rollout.actions, rollout.mask)

    def advantages(self, state: TrainState, rollout: Rollout) -> tuple[Tensor, Tensor]:
        hp = self.hp
        return vtrace(
            rollout.log_probs - self.behaviour_log_probs(state, rollout), rollout.rewards, rollout.values,
            rollout.next_values, rollout.discounts, rollout.continues, hp.gae_lambda, hp.rho_bar, hp.c_bar,
        )  # fmt: skip


class IMPALA(VTraceActor[IMPALAHyper]):
    Hyper = IMPALAHyper
    name = "impala"

    def setup(self) -> None:
        super().setup()
        self.optim = rollout_optimizer(self)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Section 4.2. The factor rho is in the advantages already."""
        scale = (batch["weights"] > 0).sum() if self.hp.reduction == "sum" else 1.0
        new, aux = rollout_step(self, state, batch, scale)
        return self.remember(new), aux
