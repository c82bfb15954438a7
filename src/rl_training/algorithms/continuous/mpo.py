"""Maximum a posteriori policy optimisation, MPO (Abdolmaleki et al. 2018; decoupled form: arXiv 1812.02256).

E-step: actions of the target policy are weighted by softmax(Q / temperature). M-step: the policy is fitted to them,
with a KL penalty each for how far its mean and its deviation move away from the target policy. Temperature and
penalties are learned dual variables.

Deviations: the policy is a tanh-squashed Gaussian, handled before the tanh, where KL and likelihood ratios are equal;
the states of the E-step are the batch's next states, so that the same sampled actions also serve the critic's target;
one-step or n-step returns instead of Retrace.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import ContinuousControl, ContinuousHyper
from rl_training.algorithms.continuous.critics.base import regression
from rl_training.data.storage import Batch
from rl_training.models.control import SACModel
from rl_training.ops import rng
from rl_training.ops.distributions import DiagGaussian
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer, periodic
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec


class MPOHyper(ContinuousHyper):
    tau: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the online networks that each target update takes over; 1 copies them."""
    target_update_interval: int = Field(100, ge=1)
    """Gradient steps between target updates."""
    num_critics: int = Field(1, ge=1)
    """Critics, whose smallest value counts."""
    num_samples: int = Field(20, ge=1)
    """Actions sampled in each state."""
    epsilon: float = Field(0.1, gt=0.0)
    """Bound on the KL of the weighted actions to the target policy; the temperature enforces it."""
    epsilon_mean: float = Field(2.5e-3, gt=0.0)
    """Bound on the KL by the mean, for each action dimension."""
    epsilon_std: float = Field(1e-6, gt=0.0)
    """Bound on the KL by the deviation, for each action dimension."""
    dual_learning_rate: float = Field(1e-2, gt=0.0)
    """Step size of the dual variables."""
    init_temperature: float = Field(10.0, gt=0.0)
    """Temperature at the start."""
    init_alpha_mean: float = Field(10.0, gt=0.0)
    """Penalty on the KL by the mean at the start."""
    init_alpha_std: float = Field(1000.0, gt=0.0)
    """Penalty on the KL by the deviation at the start."""


def temperature_loss(q: Tensor, temperature: Tensor, epsilon: float) -> Tensor:
    """The dual g(eta) = eta epsilon + eta log mean_a exp(Q / eta), per state: [N, B] -> [B] (first paper, Eq. 9)."""
    log_mean_exp = torch.logsumexp(q / temperature, 0) - math.log(q.shape[0])
    return temperature * (epsilon + log_mean_exp)


def gaussian_kls(mean: Tensor, log_std: Tensor, old_mean: Tensor, old_log_std: Tensor) -> tuple[Tensor, Tensor]:
    """KL(old || new) of each dimension if only the mean changes, and if only the deviation changes."""
    by_mean = 0.5 * ((mean - old_mean) * torch.exp(-old_log_std)).square()
    by_std = log_std - old_log_std + 0.5 * (torch.exp(2.0 * (old_log_std - log_std)) - 1.0)
    return by_mean, by_std


class MPO(ContinuousControl[MPOHyper]):
    Hyper = MPOHyper
    name = "mpo"
    squash = "tanh"
    targets = ("actor", "critic")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            SACModel(spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation)
        )

    def setup(self) -> None:
        super().setup()
        self.dual_adam = Optimizer()
        self.normal = DiagGaussian(self.spec.action.dim)

    def init_extra(self) -> dict[str, Any]:
        """Duals before their softplus: temperature, then mean and deviation penalties of each dimension: [1 + 2 A]."""
        hp, dim = self.hp, self.spec.action.dim
        start = torch.tensor([hp.init_temperature] + [hp.init_alpha_mean] * dim + [hp.init_alpha_std] * dim)
        return {**super().init_extra(), "duals": start + torch.log(-torch.expm1(-start))}  # the inverse of softplus

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        duals = torch.zeros(1 + 2 * self.spec.action.dim, device=self.device)
        return {**super().init_optimizers(params), "duals": self.dual_adam.init(duals)}

    def split_duals(self, duals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(temperature [], alpha_mean [A], alpha_std [A]), all positive."""
        positive, dim = F.softplus(duals) + 1e-8, self.spec.action.dim
        return positive[0], positive[1 : 1 + dim], positive[1 + dim :]

    def sampled_q(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Values of N actions in each state: [N, B, A] -> [N, B]."""
        count, batch = actions.shape[:2]
        repeated = tree_map(lambda x: x.expand(count, *x.shape).flatten(0, 1), obs)
        q: Tensor = self.nets["critic"](params, repeated, actions.flatten(0, 1))  # [E, N B]
        return q.amin(0).view(count, batch)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, actor, critic = self.hp, self.nets["actor"], self.nets["critic"]
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        next_obs, weights, rate = batch["next_obs"], batch["weights"], hp.learning_rate(state.progress)

        old_mean, old_log_std = self.dist.split(actor(state.target["actor"], next_obs))  # [B, A]
        noise = rng.normal(key, (hp.num_samples, *old_mean.shape))
        pre_tanh = old_mean + old_log_std.exp() * noise  # [N, B, A]
        sampled_q = self.sampled_q(state.target["critic"], next_obs, pre_tanh.tanh())
        target = batch["rewards"] + batch["discounts"] * sampled_q.mean(0)
        critic_loss = regression(lambda p: critic(p, batch["obs"], batch["actions"]), target, weights, 0.5)
        state, loss_q, (q, error) = self.descend(state, "critic", critic_loss)

        def policy_loss(params: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            temperature, alpha_mean, alpha_std = self.split_duals(params["duals"])
            share = torch.softmax(sampled_q / temperature.detach(), 0)  # [N, B], the E-step
            mean, log_std = self.dist.split(actor(params["actor"], next_obs))
            new_mean = self.normal.log_prob(torch.cat([mean, old_log_std], -1), pre_tanh)  # [N, B]
            new_std = self.normal.log_prob(torch.cat([old_mean, log_std], -1), pre_tanh)
            fit = -(share * (new_mean + new_std)).sum(0)
            kl_mean, kl_std = gaussian_kls(mean, log_std, old_mean, old_log_std)  # [B, A]
            penalty = (alpha_mean.detach() * kl_mean + alpha_std.detach() * kl_std).sum(-1)
            dual = (
                temperature_loss(sampled_q, temperature, hp.epsilon)
                + (alpha_mean * (hp.epsilon_mean - kl_mean.detach())).sum(-1)
                + (alpha_std * (hp.epsilon_std - kl_std.detach())).sum(-1)
            )
            report = {
                "actor_loss": weighted_mean(fit + penalty, weights),
                "dual_loss": weighted_mean(dual, weights),
                "temperature": temperature,
                "kl_mean": weighted_mean(kl_mean.sum(-1), weights),
                "kl_std": weighted_mean(kl_std.sum(-1), weights),
                "policy_std": weighted_mean(log_std.exp().mean(-1), weights),
            }
            return report["actor_loss"] + report["dual_loss"], report

        learned = {"actor": state.params["actor"], "duals": state.extra["duals"]}
        _, report, grads_pi = value_and_grad(policy_loss, learned)
        actor_params, actor_opt = self.optim.update(grads_pi["actor"], state.opt["actor"], learned["actor"], rate)
        duals, dual_opt = self.dual_adam.update(
            grads_pi["duals"], state.opt["duals"], learned["duals"], hp.dual_learning_rate
        )
        step, params = state.step + 1, {**state.params, "actor": actor_params}
        state = state._replace(
            params=params,
            target={
                k: periodic(v, params[k], step, hp.target_update_interval, hp.tau) for k, v in state.target.items()
            },
            opt={**state.opt, "actor": actor_opt, "duals": dual_opt},
            extra={**state.extra, "duals": duals},
            step=step,
        )
        means = {"q_value_mean": weighted_mean(q, weights), "target_mean": weighted_mean(target, weights)}
        return state, Aux({"critic_loss": loss_q, **report, **means}, error)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critic's value of the deterministic action."""
        seen = self.reader.normalised(state.extra, obs)
        q: Tensor = self.nets["critic"](state.params["critic"], seen, self.greedy(state, obs))
        return q.amin(0)
