"""ACKTR, actor-critic with a Kronecker-factored trust region (Wu et al. 2017): A2C with natural gradients.

One update on each whole rollout. The gradient of policy, value and entropy is multiplied by the inverse of the Fisher
matrix, which K-FAC approximates by two small matrices for each layer, and the step is shortened to a bound on the KL
divergence. The Fisher matrix is that of the policy, with actions sampled anew, and of a value with Gaussian noise.
Settings are those of Stable-Baselines 2.

Deviations: separate actor and critic networks on vectors (`shared_trunk`); generalised advantages, which with
`gae_lambda` 1 are the paper's n-step returns; inverses are computed at a fixed interval (`kfac_update`) instead of in a
thread of their own; damping is split between the two factors (Martens and Grosse 2015, section 6.3); the critic of
continuous actions has the same trust region as its policy, not one of its own. The noise of the value has a deviation
of 0.5, as in the authors' code (paper: 1); with 1, some seeds never found the first reward of Acrobot. Elsewhere their
code differs and this is the paper: no ten plain gradient steps at the start, and a step of sqrt(2 delta / slope)
instead of sqrt(delta / slope).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Positive, constant
from rl_training.algorithms.phases import RolloutPhase
from rl_training.algorithms.policy_gradient.a2c import RolloutLossHyper, rollout_step
from rl_training.algorithms.policy_gradient.base import PolicyGradient
from rl_training.data.storage import Batch
from rl_training.models.factored import FactoredNet
from rl_training.models.torsos import blank_observations
from rl_training.ops import kfac, rng
from rl_training.ops.optim import Optimizer, OptState, clip_by_norm


class ACKTRHyper(RolloutLossHyper):
    learning_rate: Positive = constant(0.25)
    """Largest step along the natural gradient (eta_max); a number or a schedule."""
    n_steps: int = Field(20, ge=1)
    """Steps of each environment in one rollout, which is one update."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Bias-variance trade-off of the advantage estimate; 1: n-step returns."""
    ent_coef: Positive = constant(0.01)
    vf_coef: float = Field(0.25, ge=0.0)
    max_grad_norm: float = Field(0.0, ge=0.0)
    """Gradients are scaled down to this norm before the natural gradient is computed; 0 switches it off."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "sgd"
    """Natural gradients are followed by plain steps with momentum: sgd is the only choice."""
    kfac_clip: float = Field(0.001, gt=0.0)
    """Bound on the KL divergence of one step (the trust region's radius delta)."""
    kfac_damping: float = Field(0.01, gt=0.0)
    """Multiple of the identity added to the Fisher matrix."""
    kfac_decay: float = Field(0.99, ge=0.0, lt=1.0)
    """Smoothing of the factors of the Fisher matrix."""
    kfac_update: int = Field(1, ge=1)
    """Updates between two inversions of the factors."""
    kfac_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Share of the previous step in the next one."""
    vf_fisher_coef: float = Field(1.0, gt=0.0)
    """Weight of the squared noise of the value in the Fisher matrix; 1: a Gaussian with a deviation of 0.5."""

    @model_validator(mode="after")
    def _fits(self) -> ACKTRHyper:
        if self.optimizer != "sgd":
            raise ValueError(f"optimizer = {self.optimizer} cannot follow natural gradients: leave it out")
        return self


@dataclass(frozen=True, kw_only=True)
class NaturalSteps(Optimizer):
    """Steps along the natural gradient: within the trust region, with momentum."""

    net: FactoredNet
    bound: float
    momentum: float

    def init(self, params: Tensor) -> OptState:
        factors = kfac.pack([(torch.eye(i), torch.eye(o)) for i, o in self.net.sizes]).to(params.device)
        return {
            "count": torch.zeros((), device=params.device),  # values in the averages of the factors
            "factors": factors,
            "inverses": factors.clone(),
            "velocity": torch.zeros_like(params),
            "step_size": torch.zeros((), device=params.device),
        }

    def update(
        self, grads: Tensor, state: OptState, params: Tensor, learning_rate: Tensor | float
    ) -> tuple[Tensor, OptState]:
        grads = clip_by_norm(grads + self.weight_decay * params, self.max_grad_norm)
        natural = kfac.precondition(self.net.matrices(grads), state["inverses"], self.net.sizes)
        direction = self.net.flatten(natural)
        step_size = kfac.trusted_rate(learning_rate, direction.dot(grads), self.bound)
        velocity = torch.lerp(step_size * direction, state["velocity"], self.momentum)
        return params - velocity, {**state, "velocity": velocity, "step_size": step_size}


class ACKTR(PolicyGradient[ACKTRHyper]):
    Hyper = ACKTRHyper
    name = "acktr"

    def setup(self) -> None:
        super().setup()
        hp = self.hp
        self.factored = FactoredNet(self.name, self.modules["policy"], blank_observations(self.spec.unmasked))
        self.factored.net.to(self.device)
        self.optim = NaturalSteps(
            net=self.factored, bound=hp.kfac_clip, momentum=hp.kfac_momentum, weight_decay=hp.weight_decay,
            max_grad_norm=hp.max_grad_norm or None,
        )  # fmt: skip

    def rollout_phases(self) -> tuple[RolloutPhase, ...]:
        if self.hp.kfac_update == 1:
            return super().rollout_phases()
        return (
            RolloutPhase("factors", self.factor_step, learns=False),
            RolloutPhase("inverses", self.inverse_step, every=self.hp.kfac_update, at_start=True, learns=False),
            RolloutPhase("update", self.natural_step),
        )

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """All phases, one after the other."""
        state, _ = self.factor_step(state, batch, key)
        state, inverted = self.inverse_step(state, batch, key)
        state, aux = self.natural_step(state, batch, key)
        return state, Aux({**aux.metrics, **inverted.metrics})

    def factor_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Update the running averages of the factors with this rollout (section 3.1)."""
        hp, dist, weights, mask = self.hp, self.dist, batch["weights"], batch.get("mask")

        def score(output: tuple[Tensor, Tensor]) -> Tensor:
            """log p(a, v | s) for sampled actions and values."""
            out, values = output
            actions = dist.sample(out.detach(), rng.fold(key, 0), mask)
            sampled = values.detach() + rng.normal(rng.fold(key, 1), tuple(values.shape))
            return (dist.log_prob(out, actions, mask) - hp.vf_fisher_coef * (sampled - values) ** 2).sum()

        signals = self.factored.signals(state.params["policy"], batch["obs"], len(weights), score)
        factors = kfac.pack([(kfac.covariance(a, weights), kfac.covariance(g, weights)) for a, g in signals])
        opt = state.opt["policy"]
        count = opt["count"] + 1.0
        average = kfac.running_average(opt["factors"], factors, count, hp.kfac_decay)
        return self._with(state, count=count, factors=average), Aux({"factor_norm": torch.linalg.vector_norm(average)})

    def inverse_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        inverses = kfac.damped_inverses(state.opt["policy"]["factors"], self.factored.sizes, self.hp.kfac_damping)
        norm = torch.linalg.vector_norm(inverses)
        return self._with(state, inverses=inverses), Aux({"inverse_norm": norm})

    def natural_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        state, aux = rollout_step(self, state, batch)
        return state, Aux({**aux.metrics, "step_size": state.opt["policy"]["step_size"].clone()})

    def _with(self, state: TrainState, **changes: Tensor) -> TrainState:
        """The state with some tensors of the optimiser replaced."""
        return state._replace(opt={**state.opt, "policy": {**state.opt["policy"], **changes}})
