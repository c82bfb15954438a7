"""Soft actor-critic (Haarnoja et al. 2018b): twin critics, squashed-Gaussian actor, automatic temperature.

Deviations: none from the second paper; critics are one batched ensemble, and the actor uses the critics just updated.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Batch, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OffPolicyHyper
from rl_training.envs.spec import EnvSpec
from rl_training.errors import UserError
from rl_training.models.continuous import SACModel
from rl_training.ops import rng
from rl_training.ops.distributions import SquashedGaussian
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer, periodic


class SACHyper(OffPolicyHyper):
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of actor and critics."""
    learning_starts: int = Field(100, ge=0)
    """Environment steps with random actions before the first update."""
    tau: float = Field(0.005, gt=0.0, le=1.0)
    """Share of the online critics that each target update takes over."""
    target_update_interval: int = Field(1, ge=1)
    """Gradient steps between target updates."""
    ent_coef: float | Literal["auto"] = "auto"
    """Entropy temperature; auto tunes it towards the target entropy."""
    ent_coef_init: float = Field(1.0, gt=0.0)
    """Temperature at the start when it is tuned."""
    target_entropy: float | Literal["auto"] = "auto"
    """Entropy that the tuning aims at; auto is minus the number of action dimensions."""

    @field_validator("ent_coef")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and value < 0.0:
            raise ValueError("must be 'auto' or at least 0")
        return value


class SAC(Algorithm[SACHyper]):
    Hyper = SACHyper
    name = "sac"
    actions = ("box",)
    targets = ("critic",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return self.named_networks(SACModel(spec, self.hp.hidden_sizes, activation=self.hp.activation))

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        if not spec.action.bounded:
            raise UserError(f"{self.name} needs a bounded action space; {spec.env_id} has an unbounded {spec.action}")

    def setup(self) -> None:
        hp = self.hp
        self.adam = self.optimizer()
        self.alpha_adam = Optimizer()
        self.dist = SquashedGaussian(self.spec.action.dim)
        self.target_entropy = -float(self.spec.action.dim) if hp.target_entropy == "auto" else float(hp.target_entropy)

    def init_extra(self) -> dict[str, Any]:
        start = self.hp.ent_coef_init if self.hp.ent_coef == "auto" else max(float(self.hp.ent_coef), 1e-12)
        return {"log_alpha": torch.tensor(math.log(start))}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        log_alpha = torch.zeros((), device=self.device)
        return {**super().init_optimizers(params), "log_alpha": self.alpha_adam.init(log_alpha)}

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, actor, critic, weights = self.hp, self.nets["actor"], self.nets["critic"], batch["weights"]
        rate = hp.learning_rate(state.progress)
        obs, next_obs = batch["obs"], batch["next_obs"]
        alpha = torch.exp(state.extra["log_alpha"])

        # Soft Bellman target, Eq. 3 and 5.
        next_action, next_log_prob = self.dist.sample_and_log_prob(
            actor(state.params["actor"], next_obs), rng.fold(key, 0)
        )
        next_q = critic(state.target["critic"], next_obs, next_action).amin(0)  # [E, B] -> [B]
        target = batch["rewards"] + batch["discounts"] * (next_q - alpha * next_log_prob)

        def critic_loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            q = critic(params, obs, batch["actions"])  # [E, B]
            error = q - target
            return weighted_mean(0.5 * (error**2).sum(0), weights), (q.mean(0), error.abs().mean(0))

        loss_q, (q, error), grads = value_and_grad(critic_loss, state.params["critic"])
        critic_params, critic_opt = self.adam.update(grads, state.opt["critic"], state.params["critic"], rate)

        def actor_loss(params: Tensor) -> tuple[Tensor, Tensor]:  # Eq. 7
            action, log_prob = self.dist.sample_and_log_prob(actor(params, obs), rng.fold(key, 1))
            return weighted_mean(alpha * log_prob - critic(critic_params, obs, action).amin(0), weights), log_prob

        loss_pi, log_prob, grads = value_and_grad(actor_loss, state.params["actor"])
        actor_params, actor_opt = self.adam.update(grads, state.opt["actor"], state.params["actor"], rate)

        entropy = -weighted_mean(log_prob, weights)
        log_alpha, alpha_opt = state.extra["log_alpha"], state.opt["log_alpha"]
        if hp.ent_coef == "auto":  # gradient of Eq. 18 with respect to log alpha
            gradient = alpha * (entropy - self.target_entropy)
            log_alpha, alpha_opt = self.alpha_adam.update(gradient, alpha_opt, log_alpha, rate)

        step = state.step + 1
        slow = periodic(state.target["critic"], critic_params, step, hp.target_update_interval, hp.tau)
        state = state._replace(
            params={"actor": actor_params, "critic": critic_params},
            target={"critic": slow},
            opt={"actor": actor_opt, "critic": critic_opt, "log_alpha": alpha_opt},
            extra={"log_alpha": log_alpha},
            step=step,
        )
        metrics = {
            "critic_loss": loss_q,
            "actor_loss": loss_pi,
            "ent_coef": alpha,
            "entropy": entropy,
            "q_value_mean": weighted_mean(q, weights),
            "target_mean": weighted_mean(target, weights),
        }
        return state, Aux(metrics, error)

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        out = self.nets["actor"](state.params["actor"], obs)
        return carry, self.dist.sample(out, key) if explore else self.dist.mode(out), {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Smaller critic's value of the deterministic action: the return, without the entropy bonus of this step."""
        _, action, _ = self.select_action(state, (), obs, torch.zeros((), dtype=torch.int64), explore=False)
        return self.nets["critic"](state.params["critic"], obs, action).amin(0)  # type: ignore[no-any-return]
