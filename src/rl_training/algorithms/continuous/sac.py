"""Soft actor-critic (Haarnoja et al. 2018b): twin critics, squashed-Gaussian actor, automatic temperature. With large
residual networks (models/residual.py), normalised observations and weight decay it is SimBa (Lee et al. 2024).

The setting `critic` replaces the twin critics by another kind. REDQ, DroQ, TQC, CrossQ, RLPD, CQL, Cal-QL and EDAC are
this class with a kind of critic and settings of their own.
On images, actor and critics have an encoder each, as in Stable-Baselines3: the actor's loss trains the actor's, and the
critics' loss trains theirs, which all critics of the ensemble share. With `shared_encoder` there is one (shared.py).

Deviations: the actor uses the critics just updated. In SimBa, the statistics of observations are those of the replayed
batches instead of those of each observation once, and what they normalise is cut off at 10 deviations; log-deviations
are clamped to [-5, 2] instead of squashed into [-10, 2]; there are two critics and gamma 0.99 by default, where the
authors have one critic if no episode terminates, and choose gamma by the length of episodes (the presets follow them).
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import ActorCriticFields, ContinuousControl, ContinuousHyper, delayed
from rl_training.algorithms.continuous.critics.base import POLICY, CriticOptions, Extra, Owner
from rl_training.algorithms.continuous.critics.ensemble import TwinOptions
from rl_training.algorithms.continuous.critics.setting import CriticSetting
from rl_training.algorithms.continuous.shared import SharedEncoderFields, make_networks
from rl_training.algorithms.hyper import Hyper, Temperature
from rl_training.data.storage import Batch
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer, periodic
from rl_training.ops.schedules import Schedule
from rl_training.spec import EnvSpec


class SACFields(ActorCriticFields):
    """Settings of SAC on any kind of data."""

    target_update_interval: int = Field(1, ge=1)
    """Gradient steps between target updates."""
    policy_delay: int = Field(1, ge=1)
    """Gradient steps of the critics for each one of actor and temperature."""
    ent_coef: Temperature = "auto"
    """Entropy temperature; auto tunes it towards the target entropy."""
    ent_coef_init: float = Field(1.0, gt=0.0)
    """Temperature at the start when it is tuned."""
    target_entropy: float | Literal["auto"] = "auto"
    """Entropy that the tuning aims at; auto is `entropy_per_action` times the number of action dimensions."""
    entropy_per_action: float = -1.0
    """Entropy for each action dimension that the tuning aims at, where `target_entropy` is auto."""

    def critic_options(self) -> CriticOptions:
        """The kind of critics that these settings ask for."""
        return TwinOptions()

    def actor_rate(self) -> Schedule:
        """Step size of actor and temperature."""
        return self.learning_rate


class SACReplayHyper(SACFields, SharedEncoderFields, ContinuousHyper):
    """Settings of SAC with replay."""


class SACHyper(SACReplayHyper):
    critic: CriticSetting = TwinOptions()
    """Kind of critics: a name such as `quantile`, or a name with options: `{kind: quantile, num_quantiles: 25}`."""
    layer_norm: bool = False
    """LayerNorm in the critics."""

    def critic_options(self) -> CriticOptions:
        return self.critic.with_layer_norm(self.layer_norm)


S = TypeVar("S", bound=SACFields)


class SAC(ContinuousControl[S]):
    Hyper: ClassVar[type[Hyper]] = SACHyper
    name = "sac"
    squash = "tanh"
    targets: tuple[str, ...] = ("critic",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp, options = self.hp, self.hp.critic_options()

        def model(seen: EnvSpec) -> nn.Module:
            return options.model(seen, actor_outputs=2, **hp.architecture())

        return self.named_networks(make_networks(hp, spec, self.name, model, options.kind, options.can_share))

    def setup(self) -> None:
        super().setup()
        hp, dim = self.hp, self.spec.action.dim
        self.alpha_adam = Optimizer()
        target = hp.target_entropy
        self.target_entropy = hp.entropy_per_action * dim if target == "auto" else float(target)
        self.critic = hp.critic_options().build(Owner(self, self.propose, 0.5, "smallest", self.encoder))
        self.targets = () if self.critic.renormalised else ("critic",)
        self.actor_rate = hp.actor_rate()

    def init_extra(self) -> Extra:
        start = self.hp.ent_coef_init if self.hp.ent_coef == "auto" else max(float(self.hp.ent_coef), 1e-12)
        log_alpha = torch.tensor(math.log(start))
        own = {"log_alpha": log_alpha, **super().init_extra()}
        return {**own, **self.actor_net.init_extra(), **self.critic.init_extra()}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        log_alpha = torch.zeros((), device=self.device)
        return {**super().init_optimizers(params), "log_alpha": self.alpha_adam.init(log_alpha)}

    def propose(self, state: TrainState, obs: Obs, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Actions of the policy and their log-densities: [N, B, A], [N, B]."""
        out = self.actor_net(state.params["actor"], state.extra, obs)
        return self.dist.sample_and_log_prob(out.expand(count, *out.shape), key)

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        """`actor`: is the policy due? None asks `policy_delay`, at the cost of computing it every time."""
        hp = self.hp
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        state, batch, metrics, error = self.critic_step(state, self.read_next(state, batch), key)
        if actor is not False:
            improved, more = self.policy_step(state, batch, key)
            state = improved if actor else delayed(state.step, hp.policy_delay, improved, state)
            metrics |= more
        step, critic = state.step + 1, state.params["critic"]
        slow = {k: periodic(v, critic, step, hp.target_update_interval, hp.tau) for k, v in state.target.items()}
        return state._replace(target=slow, step=step), Aux(metrics, error)

    def critic_step(
        self, state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        """The state with new critics, the batch as the policy reads it, metrics, and the error of every sample."""
        alpha = torch.exp(state.extra["log_alpha"])
        next_action, next_log_prob = self.dist.sample_and_log_prob(
            self.actor_net(state.params["actor"], state.extra, batch["next_obs"]), rng.fold(key, 0)
        )
        bonus = -alpha * next_log_prob  # of the soft value, Eq. 3
        state, batch, metrics, error = self.critic.update(state, batch, next_action, bonus, key)
        return state, batch, {**metrics, "ent_coef": alpha}, error

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor]]:
        """The state with new policy and temperature, and metrics."""
        obs, weights, extra = batch["obs"], batch["weights"], state.extra
        rate, stream = self.actor_rate(state.progress), self.critic.stream(key, POLICY)
        alpha = torch.exp(extra["log_alpha"])

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Extra]]:  # Eq. 7
            out, renewed = self.actor_net.learn(params, extra, obs, weights)
            action, log_prob = self.dist.sample_and_log_prob(out, rng.fold(key, 1))
            value = self.critic.policy_value(state.params["critic"], extra, obs, action, stream)
            return weighted_mean(alpha * log_prob - value, weights), (log_prob, renewed)

        state, loss, (log_prob, renewed) = self.descend(state, "actor", actor_loss, rate)
        entropy = -weighted_mean(log_prob, weights)
        log_alpha, alpha_opt = extra["log_alpha"], state.opt["log_alpha"]
        if self.hp.ent_coef == "auto":  # gradient of Eq. 18 with respect to log alpha
            gradient = alpha * (entropy - self.target_entropy)
            log_alpha, alpha_opt = self.alpha_adam.update(gradient, alpha_opt, log_alpha, rate)
        opt, extra = {**state.opt, "log_alpha": alpha_opt}, {**extra, **renewed, "log_alpha": log_alpha}
        return state._replace(opt=opt, extra=extra), {"actor_loss": loss, "entropy": entropy}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critics' value of the deterministic action: the return, without the entropy bonus of this step."""
        seen = self.read(state, obs)
        return self.critic.value(state.params["critic"], state.extra, seen, self.greedy(state, obs))
