"""Soft actor-critic (Haarnoja et al. 2018b): twin critics, squashed-Gaussian actor, automatic temperature.

Deviations: none from the second paper; critics are one batched ensemble, and the actor uses the critics just updated.
REDQ, DroQ, TQC and CrossQ are this class with other critics: they replace the methods under "the critics".
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import (
    Behaviour,
    ContinuousControl,
    ContinuousFields,
    ContinuousHyper,
    delayed,
)
from rl_training.algorithms.hyper import Hyper, Temperature
from rl_training.data.storage import Batch
from rl_training.models.control import SACModel
from rl_training.ops import rng
from rl_training.ops.distributions import SquashedGaussian
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer, periodic
from rl_training.spec import EnvSpec

Extra = dict[str, Any]


class SACFields(ContinuousFields):
    target_update_interval: int = Field(1, ge=1)
    """Gradient steps between target updates."""
    policy_delay: int = Field(1, ge=1)
    """Gradient steps of the critics for each one of actor and temperature."""
    ent_coef: Temperature = "auto"
    """Entropy temperature; auto tunes it towards the target entropy."""
    ent_coef_init: float = Field(1.0, gt=0.0)
    """Temperature at the start when it is tuned."""
    target_entropy: float | Literal["auto"] = "auto"
    """Entropy that the tuning aims at; auto is minus the number of action dimensions."""


class SACHyper(SACFields, ContinuousHyper):
    """SAC with replay."""


class CriticReport(NamedTuple):
    """What a critic's loss tells beside its value, per sample."""

    q: Tensor  # [B]
    error: Tensor  # absolute: the priority
    target: Tensor
    extra: Extra  # entries of `state.extra` that the pass renewed


class SAC(ContinuousControl[SACFields]):
    Hyper: ClassVar[type[Hyper]] = SACHyper
    name = "sac"
    squash = "tanh"
    targets: ClassVar[tuple[str, ...]] = ("critic",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return self.named_networks(SACModel(spec, self.hp.hidden_sizes, activation=self.hp.activation))

    def setup(self) -> None:
        super().setup()
        hp = self.hp
        self.alpha_adam = Optimizer()
        self.dist = SquashedGaussian(self.spec.action.dim)
        self.target_entropy = -float(self.spec.action.dim) if hp.target_entropy == "auto" else float(hp.target_entropy)

    def init_extra(self) -> Extra:
        start = self.hp.ent_coef_init if self.hp.ent_coef == "auto" else max(float(self.hp.ent_coef), 1e-12)
        return {"log_alpha": torch.tensor(math.log(start))}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        log_alpha = torch.zeros((), device=self.device)
        return {**super().init_optimizers(params), "log_alpha": self.alpha_adam.init(log_alpha)}

    # --- the critics: what REDQ, TQC and CrossQ replace ----------------------------------------------------------

    def q_values(self, params: Tensor, obs: Obs, actions: Tensor, key: Tensor | None) -> Tensor:
        """Values by every critic: [E, B]."""
        q: Tensor = self.nets["critic"](params, obs, actions)
        return q

    def next_q(self, params: Tensor, next_obs: Obs, next_action: Tensor, key: Tensor) -> Tensor:
        """Value to bootstrap from, without the entropy bonus: [B]."""
        return self.q_values(params, next_obs, next_action, key).amin(0)

    def critic_loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor, key: Tensor
    ) -> tuple[Tensor, CriticReport]:
        """Loss per sample; `bonus` is the entropy term -alpha log pi(a'|s') of the soft value."""
        next_q = self.next_q(state.target["critic"], batch["next_obs"], next_action, rng.fold(key, 0))
        target = batch["rewards"] + batch["discounts"] * (next_q + bonus)  # soft Bellman target, Eq. 3 and 5
        q = self.q_values(params, batch["obs"], batch["actions"], rng.fold(key, 1))  # [E, B]
        error = q - target
        return 0.5 * (error**2).sum(0), CriticReport(q.mean(0), error.abs().mean(0), target, {})

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        """The value that the policy climbs: [B]."""
        return self.q_values(params, obs, action, key).amin(0)

    def policy(self, params: Tensor, extra: Extra, obs: Obs, with_features: bool = False) -> Any:
        """Output of the actor when it acts."""
        return self.nets["actor"](params, obs, with_features)

    def learning_policy(self, params: Tensor, extra: Extra, obs: Obs, weights: Tensor) -> tuple[Tensor, Extra]:
        """Output of the actor when it learns, and entries of `state.extra` that the pass renewed."""
        return self.policy(params, extra, obs), {}

    def actor_rate(self, state: TrainState, rate: Tensor | float) -> Tensor | float:
        """Step size of actor and temperature, given that of the critics."""
        return rate

    # --- shared --------------------------------------------------------------------------------------------------

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        """`actor`: is the policy due? None asks `policy_delay`, at the cost of computing it every time."""
        hp = self.hp
        state, metrics, error = self.critic_step(state, batch, key)
        if actor is not False:
            improved, more = self.policy_step(state, batch, key)
            state = improved if actor else delayed(state.step, hp.policy_delay, improved, state)
            metrics |= more
        step, critic = state.step + 1, state.params["critic"]
        slow = {k: periodic(v, critic, step, hp.target_update_interval, hp.tau) for k, v in state.target.items()}
        return state._replace(target=slow, step=step), Aux(metrics, error)

    def critic_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor], Tensor]:
        """The state with new critics, metrics, and the error of every sample."""
        weights, alpha = batch["weights"], torch.exp(state.extra["log_alpha"])
        next_action, next_log_prob = self.dist.sample_and_log_prob(
            self.policy(state.params["actor"], state.extra, batch["next_obs"]), rng.fold(key, 0)
        )
        bonus = -alpha * next_log_prob

        def critic_loss(params: Tensor) -> tuple[Tensor, CriticReport]:
            loss, report = self.critic_loss(params, state, batch, next_action, bonus, rng.fold(key, 2))
            return weighted_mean(loss, weights), report

        loss, report, grads = value_and_grad(critic_loss, state.params["critic"])
        rate = self.hp.learning_rate(state.progress)
        critic, opt = self.adam.update(grads, state.opt["critic"], state.params["critic"], rate)
        metrics = {
            "critic_loss": loss,
            "ent_coef": alpha,
            "q_value_mean": weighted_mean(report.q, weights),
            "target_mean": weighted_mean(report.target, weights),
        }
        state = state._replace(
            params={**state.params, "critic": critic},
            opt={**state.opt, "critic": opt},
            extra={**state.extra, **report.extra},
        )
        return state, metrics, report.error

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor]]:
        """The state with new policy and temperature, and metrics."""
        obs, weights, extra = batch["obs"], batch["weights"], state.extra
        rate = self.actor_rate(state, self.hp.learning_rate(state.progress))
        alpha = torch.exp(extra["log_alpha"])

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Extra]]:  # Eq. 7
            out, renewed = self.learning_policy(params, extra, obs, weights)
            action, log_prob = self.dist.sample_and_log_prob(out, rng.fold(key, 1))
            value = self.policy_value(state.params["critic"], extra, obs, action, rng.fold(key, 3))
            return weighted_mean(alpha * log_prob - value, weights), (log_prob, renewed)

        loss, (log_prob, renewed), grads = value_and_grad(actor_loss, state.params["actor"])
        actor, actor_opt = self.adam.update(grads, state.opt["actor"], state.params["actor"], rate)

        entropy = -weighted_mean(log_prob, weights)
        log_alpha, alpha_opt = extra["log_alpha"], state.opt["log_alpha"]
        if self.hp.ent_coef == "auto":  # gradient of Eq. 18 with respect to log alpha
            gradient = alpha * (entropy - self.target_entropy)
            log_alpha, alpha_opt = self.alpha_adam.update(gradient, alpha_opt, log_alpha, rate)
        state = state._replace(
            params={**state.params, "actor": actor},
            opt={**state.opt, "actor": actor_opt, "log_alpha": alpha_opt},
            extra={**extra, **renewed, "log_alpha": log_alpha},
        )
        return state, {"actor_loss": loss, "entropy": entropy}

    def behaviour(self, state: TrainState, obs: Obs) -> Behaviour:
        out, features = self.policy(state.params["actor"], state.extra, obs, True)
        mean, log_std = self.dist.split(out)
        return Behaviour(mean, log_std.exp(), features)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critics' value of the deterministic action: the return, without the entropy bonus of this step."""
        return self.policy_value(state.params["critic"], state.extra, obs, self.greedy(state, obs), None)
