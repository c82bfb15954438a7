"""BRO, bigger, regularised, optimistic (Nauman et al. 2024): SAC with two large residual quantile critics, whose mean
is used instead of their minimum, weight decay, resets, and a second policy that explores.

The second policy shifts the mean of the first towards actions on which the critics disagree: it climbs the mean of the
critics plus `optimism` times their disagreement, kept near the first one by a KL penalty. Both weights are tuned so
that the KL divergence for each action dimension approaches `kl_target`. Evaluation uses the first policy alone.

The defaults are those of BRO (Fast), with two updates for each environment step. The full BRO takes ten:
`gradient_steps: 10` and `reset_at: [125000, 475000, 2475000, 4975000, 7475000]`.

Deviations: resets are counted in gradient steps, so they come at the authors' environment steps only with one
environment and the default `learning_starts`; the quantile loss is averaged over critics and quantiles instead of
summed, which changes nothing but the meaning of `adam_eps`; log-deviations are clamped to [-5, 2] as in our SAC,
instead of squashed into [-10, 2].
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Choice, Obs, TrainState, Tree
from rl_training.algorithms.continuous.critics.base import CriticOptions, Extra
from rl_training.algorithms.continuous.critics.quantile import QuantileFields, QuantileOptions
from rl_training.algorithms.continuous.sac import SAC, SACReplayHyper
from rl_training.algorithms.hyper import Widths
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.control import Explorer
from rl_training.models.residual import Network
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer
from rl_training.spec import EnvSpec

_LOG_LOW, _LOG_HIGH = -10.0, 7.5  # bounds of the logarithms of the two tuned weights
_EXPLORE = 4  # random stream within an update; SAC uses 0 and 1, its critics 2 and 3


class BROHyper(QuantileFields, SACReplayHyper):
    network: Network = "bro"
    hidden_sizes: Widths = (256,)
    critic_hidden_sizes: Widths | None = (512, 512)
    num_quantiles: int = Field(100, ge=1)
    top_quantiles_to_drop_per_net: int = Field(0, ge=0)
    average_critics: bool = True
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "adamw"
    weight_decay: float = Field(1e-4, ge=0.0)
    batch_size: int = Field(128, ge=1)
    learning_starts: int = Field(2_500, ge=0)
    gradient_steps: int = Field(2, ge=-1)
    reset_at: tuple[int, ...] = (25_000,)
    entropy_per_action: float = -0.5
    kl_target: float = Field(0.05, gt=0.0)
    """KL divergence of the exploring policy from the other one, for each action dimension, that the tuning aims at."""
    std_multiplier: float = Field(0.75, gt=0.0)
    """Standard deviation of the exploring policy, as a share of the other one's."""
    optimism_init: float = Field(1.0, gt=0.0, lt=1_000.0)
    """Weight of the critics' disagreement at the start."""
    kl_weight_init: float = Field(0.25, gt=0.0, lt=1_000.0)
    """Weight of the KL penalty at the start."""
    dual_learning_rate: float = Field(3e-5, gt=0.0)
    """Step size of the weights of the disagreement and of the KL penalty."""

    def critic_options(self) -> CriticOptions:
        return QuantileOptions.of(self)


def bounded(raw: Tensor) -> Tensor:
    """A positive weight whose logarithm stays within bounds."""
    return torch.exp(_LOG_LOW + (_LOG_HIGH - _LOG_LOW) * 0.5 * (1.0 + torch.tanh(raw)))


def unbounded(weight: float) -> float:
    """The inverse of `bounded`."""
    return math.atanh(2.0 * (math.log(weight) - _LOG_LOW) / (_LOG_HIGH - _LOG_LOW) - 1.0)


def upper_value(values: Tensor, optimism: Tensor) -> Tensor:
    """Mean of the critics plus `optimism` times their mean absolute deviation from it, quantile by quantile, and then
    the mean of the quantiles: [E, B, M] -> [B]. For two critics that deviation is |Q1 - Q2| / 2."""
    mean = values.mean(0)
    return (mean + optimism * (values - mean).abs().mean(0)).mean(-1)


class BRO(SAC[BROHyper]):
    Hyper = BROHyper
    name = "bro"

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return {**super().networks(spec), "explorer": Explorer(spec, hp.hidden_sizes, hp.activation, hp.network)}

    def setup(self) -> None:
        if "explorer" not in self.nets:
            raise UserError(f"{self.name} needs a model with three networks: actor, critic and explorer")
        super().setup()
        self.alpha_adam = self.dual_adam = Optimizer(beta1=0.5)

    def init_extra(self) -> Extra:
        """`duals`: weight of the disagreement and of the KL penalty, before `bounded`: [2]."""
        start = [unbounded(self.hp.optimism_init), unbounded(self.hp.kl_weight_init)]
        return {**super().init_extra(), "duals": torch.tensor(start)}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {**super().init_optimizers(params), "duals": self.dual_adam.init(torch.zeros(2, device=self.device))}

    def shifted(self, params: Tensor, obs: Obs, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shift, mean and deviation of the exploring policy, before the tanh, from the outputs of the actor."""
        mean, log_std = self.dist.split(out)
        shift = self.nets["explorer"](params, obs, mean)
        return shift, mean + shift, self.hp.std_multiplier * log_std.exp()

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor]]:
        """Both policies, each from the critics just updated."""
        state, metrics = super().policy_step(state, batch, key)
        hp, obs, weights, extra = self.hp, batch["obs"], batch["weights"], state.extra
        out = self.actor_net(state.params["actor"], extra, obs)
        log_std = self.dist.split(out)[1]
        noise = rng.normal(rng.fold(key, _EXPLORE), tuple(log_std.shape))
        optimism, kl_weight = bounded(extra["duals"]).unbind(-1)

        def explorer_loss(params: Tensor) -> tuple[Tensor, Tensor]:
            shift, mean, deviation = self.shifted(params, obs, out)
            values = self.critic.net(state.params["critic"], obs, torch.tanh(mean + deviation * noise))
            kl = 0.5 * (shift * torch.exp(-log_std)).square().sum(-1)  # without the multiplier, deviations are equal
            return weighted_mean(kl_weight * kl - upper_value(values, optimism), weights), kl

        state, loss, kl = self.descend(state, "explorer", explorer_loss, self.actor_rate(state.progress))
        excess = weighted_mean(kl, weights) / self.spec.action.dim - hp.kl_target
        # Gradients of optimism x excess and of -kl_weight x excess with respect to the values before `bounded`.
        slope = bounded(extra["duals"]) * 0.5 * (_LOG_HIGH - _LOG_LOW) * (1.0 - torch.tanh(extra["duals"]).square())
        gradient = slope * torch.stack([excess, -excess])
        duals, opt = self.dual_adam.update(gradient, state.opt["duals"], extra["duals"], hp.dual_learning_rate)
        state = state._replace(opt={**state.opt, "duals": opt}, extra={**extra, "duals": duals})
        more = {"explorer_loss": loss, "optimism": optimism, "kl_weight": kl_weight, "kl": excess + hp.kl_target}
        return state, {**metrics, **more}

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        if not explore:
            return super().select_action(state, carry, obs, key, explore=False)
        seen = self.reader.normalised(state.extra, obs)
        out, features = self.actor_net(state.params["actor"], state.extra, seen, True)
        _, mean, deviation = self.shifted(state.params["explorer"], seen, out)
        carry, noise = self.exploration.noise(carry, key, mean.shape[0], features)
        return carry, torch.tanh(mean + deviation * noise), {}
