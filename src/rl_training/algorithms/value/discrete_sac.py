"""Soft actor-critic for discrete actions (Christodoulou 2019): expectations over actions are taken exactly.
On images the actor and each critic have their own encoder, as in CleanRL.

Deviations: target entropy 0.89 log A instead of 0.98 and Adam's epsilon 1e-4, as in CleanRL, whose published scores
this follows; the actor uses the critics just updated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import (
    AugmentFields,
    ObservationFields,
    OffPolicyHyper,
    Positive,
    Temperature,
    constant,
)
from rl_training.algorithms.observations import ObservationReader, augmentation
from rl_training.data.storage import Batch
from rl_training.envs.masks import split_mask
from rl_training.models.value import DiscreteSACModel
from rl_training.ops import rng
from rl_training.ops.action_masks import count_allowed, forbid
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer, periodic
from rl_training.spec import EnvSpec

Params = dict[str, Tensor]


class DiscreteSACHyper(ObservationFields, AugmentFields, OffPolicyHyper):
    learning_rate: Positive = constant(3e-4)
    """Step size of actor, critics and temperature; a number or a schedule."""
    batch_size: int = Field(64, ge=1)
    buffer_size: int = Field(100_000, ge=1)
    adam_eps: float = Field(1e-4, gt=0.0)
    tau: float = Field(0.005, gt=0.0, le=1.0)
    """Share of the online critics that each target update takes over."""
    target_update_interval: int = Field(1, ge=1)
    """Gradient steps between target updates."""
    layer_norm: bool = False
    """LayerNorm after the hidden layers of the critics."""
    num_critics: int = Field(2, ge=1)
    """Critics, of which the smallest value counts."""
    ent_coef: Temperature = "auto"
    """Entropy temperature; auto tunes it towards the target entropy."""
    ent_coef_init: float = Field(1.0, gt=0.0)
    """Temperature at the start when it is tuned."""
    target_entropy_scale: float = Field(0.89, ge=0.0, le=1.0)
    """Entropy that the tuning aims at, as a share of that of the uniform policy."""


class DiscreteSAC(Algorithm[DiscreteSACHyper]):
    Hyper = DiscreteSACHyper
    name = "discrete_sac"
    actions = ("discrete",)
    masks = True
    targets = ("critic",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        model = DiscreteSACModel(spec.unmasked, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation,
                                 layer_norm=hp.layer_norm)  # fmt: skip
        return self.named_networks(model)

    def setup(self) -> None:
        self.reader = ObservationReader(
            self.spec, self.hp.normalize_observations, augmentation(self.spec, self.hp, self.name)
        )
        self.alpha_adam = Optimizer(eps=self.hp.adam_eps)
        self.target_entropy = self.hp.target_entropy_scale * math.log(self.spec.action.n)  # if every action is allowed

    def init_extra(self) -> dict[str, Any]:
        start = self.hp.ent_coef_init if self.hp.ent_coef == "auto" else max(float(self.hp.ent_coef), 1e-12)
        return {"log_alpha": torch.tensor(math.log(start)), **self.reader.init_extra()}

    def init_optimizers(self, params: Params) -> dict[str, dict[str, Tensor]]:
        log_alpha = torch.zeros((), device=self.device)
        return {**super().init_optimizers(params), "log_alpha": self.alpha_adam.init(log_alpha)}

    def logits(self, params: Tensor, obs: Obs) -> Tensor:
        """Of the policy, [B, A]; forbidden actions have probability 0."""
        seen, mask = split_mask(obs, self.spec.masked)
        return forbid(self.nets["actor"](params, seen), mask)

    def log_policy(self, params: Tensor, obs: Obs) -> Tensor:
        return self.logits(params, obs).log_softmax(-1)  # [B, A]

    def critics(self, params: Tensor, obs: Obs) -> Tensor:
        """Every critic's values of all actions: [E, B, A]."""
        q: Tensor = self.nets["critic"](params, split_mask(obs, self.spec.masked)[0])
        return q

    def entropy_goal(self, obs: Obs) -> Tensor | float:
        """A share of the entropy of the uniform policy over the allowed actions."""
        mask = split_mask(obs, self.spec.masked)[1]
        return self.target_entropy if mask is None else self.hp.target_entropy_scale * count_allowed(mask).log()

    def q_values(self, params: Params, obs: Obs, key: Tensor | None = None) -> Tensor:
        """The smallest critic's value of every action, future entropy bonuses included: [B, A]."""
        return self.critics(params["critic"], obs).amin(0)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, critic, weights = self.hp, self.critics, batch["weights"]
        state, batch = self.reader.learn(state, batch, weights, key)
        obs, next_obs = batch["obs"], batch["next_obs"]
        alpha = torch.exp(state.extra["log_alpha"])

        # Soft state value by the exact expectation, Eq. 10; soft Bellman target, Eq. 3.
        next_log_policy = self.log_policy(state.params["actor"], next_obs)
        next_q = critic(state.target["critic"], next_obs).amin(0)  # [E, B, A] -> [B, A]
        next_value = (next_log_policy.exp() * (next_q - alpha * next_log_policy)).sum(-1)
        target = batch["rewards"] + batch["discounts"] * next_value

        def critic_loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            every = critic(params, obs)  # [E, B, A]
            index = batch["actions"].view(1, -1, 1).expand(every.shape[0], -1, 1)
            q = every.gather(-1, index).squeeze(-1)  # [E, B]
            error = q - target
            return weighted_mean(0.5 * (error**2).sum(0), weights), (q.mean(0), error.abs().mean(0))

        state, loss_q, (q, error) = self.descend(state, "critic", critic_loss)
        values = critic(state.params["critic"], obs).amin(0)  # [B, A]

        def actor_loss(params: Tensor) -> tuple[Tensor, Tensor]:  # Eq. 12
            log_policy = self.log_policy(params, obs)
            policy = log_policy.exp()
            loss = (policy * (alpha * log_policy - values)).sum(-1)
            return weighted_mean(loss, weights), -(policy * log_policy).sum(-1)

        state, loss_pi, entropies = self.descend(state, "actor", actor_loss)
        entropy = weighted_mean(entropies, weights)
        log_alpha, alpha_opt = state.extra["log_alpha"], state.opt["log_alpha"]
        if hp.ent_coef == "auto":  # gradient of Eq. 11 with respect to log alpha
            gradient = alpha * weighted_mean(entropies - self.entropy_goal(obs), weights)
            rate = hp.learning_rate(state.progress)
            log_alpha, alpha_opt = self.alpha_adam.update(gradient, alpha_opt, log_alpha, rate)

        step = state.step + 1
        slow = periodic(state.target["critic"], state.params["critic"], step, hp.target_update_interval, hp.tau)
        opt, extra = {**state.opt, "log_alpha": alpha_opt}, {**state.extra, "log_alpha": log_alpha}
        state = state._replace(target={"critic": slow}, opt=opt, extra=extra, step=step)
        metrics = {
            "critic_loss": loss_q,
            "actor_loss": loss_pi,
            "ent_coef": alpha,
            "entropy": entropy,
            "q_value_mean": weighted_mean(q, weights),
            "target_mean": weighted_mean(target, weights),
            "td_error_mean": weighted_mean(error, weights),
        }
        return state, Aux(metrics, error)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        logits = self.logits(state.params["actor"], self.reader.normalised(state.extra, obs))
        if explore:
            logits = logits + rng.gumbel(key, tuple(logits.shape))
        return carry, logits.argmax(-1), {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The smaller critic's value of the deterministic action."""
        _, action, _ = self.select_action(state, (), obs, torch.zeros((), dtype=torch.int64), explore=False)
        return self.action_values(state, obs).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def action_values(self, state: TrainState, obs: Obs, **options: Any) -> Tensor:
        return self.q_values(state.params, self.reader.normalised(state.extra, obs))
