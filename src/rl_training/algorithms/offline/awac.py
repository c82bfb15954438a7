"""Advantage-weighted regression on a dataset with learned critics: AWAC (Nair et al. 2020) and CRR (Wang et al. 2020).

The policy is a regression on the data's actions with weights from A = Q(s, a) - V(s), where V is the mean (CRR also:
the maximum) of Q over actions of the policy. AWAC: exp(A / lambda) with one action; CRR: exp or A > 0, four actions.
`awac_online` continues in the environment, as the paper's AWAC does, with a fixed share of each batch from the dataset.

Deviations: weights are clipped (20 in CRR's paper, 100 here for AWAC as in CORL) and not normalised over the batch; CRR
has scalar critics, not distributional ones.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import ContinuousControl, ContinuousFields
from rl_training.algorithms.continuous.critics.base import regression
from rl_training.algorithms.hyper import Hyper, OfflineHyper
from rl_training.algorithms.offline.iql import advantage_weights
from rl_training.algorithms.prior_data import FineTuneFields
from rl_training.data.storage import Batch
from rl_training.models.offline import AWACModel
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean, weighted_means
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec


class AWACFields(ContinuousFields):
    weighting: Literal["exp", "binary"] = "exp"
    """exp: exp(A / temperature); binary: 1 where A > 0, else 0."""
    baseline: Literal["mean", "max"] = "mean"
    """V(s): mean or maximum of Q over the sampled actions."""
    num_actions: int = Field(1, ge=1)
    """Actions sampled from the policy to estimate V(s)."""
    temperature: float = Field(1.0, gt=0.0)
    """lambda: with a smaller one the advantages count more."""
    max_weight: float = Field(100.0, gt=0.0)
    """Largest weight."""
    num_critics: int = Field(2, ge=1)
    """Critics, whose smallest value counts."""


class AWACHyper(AWACFields, OfflineHyper):
    """Settings of AWAC on a dataset alone."""


class AWACOnlineHyper(AWACFields, FineTuneFields):
    """Settings of AWAC on a dataset and in the environment."""


class AWAC(ContinuousControl[AWACFields]):
    Hyper: ClassVar[type[Hyper]] = AWACHyper
    name = "awac"
    targets = ("critic",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            AWACModel(spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation)
        )

    def q(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Smallest critic's value: [B]."""
        q: Tensor = self.nets["critic"](params, obs, actions)
        return q.amin(0)

    def sample(self, actor: Tensor, obs: Obs, key: Tensor) -> Tensor:
        return self.dist.sample(self.nets["actor"](actor, obs), key).clamp(-1.0, 1.0)

    def baseline(self, actor: Tensor, critic: Tensor, obs: Obs, key: Tensor) -> Tensor:
        """V(s), estimated with sampled actions: [B]."""
        draws = [
            self.q(critic, obs, self.sample(actor, obs, rng.fold(key, number))) for number in range(self.hp.num_actions)
        ]
        values = torch.stack(draws)
        return values.mean(0) if self.hp.baseline == "mean" else values.amax(0)

    def policy_weights(self, advantage: Tensor) -> Tensor:
        if self.hp.weighting == "binary":
            return (advantage > 0).to(advantage.dtype)
        return advantage_weights(advantage, 1.0 / self.hp.temperature, self.hp.max_weight)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        obs, actions, weights = batch["obs"], batch["actions"], batch["weights"]
        next_action = self.sample(state.params["actor"], batch["next_obs"], rng.fold(key, 0))
        next_q = self.q(state.target["critic"], batch["next_obs"], next_action)
        target = batch["rewards"] + batch["discounts"] * next_q
        critic_loss = regression(lambda params: self.nets["critic"](params, obs, actions), target, weights)
        state, loss_q, (q, error) = self.descend(state, "critic", critic_loss)
        critic = state.params["critic"]
        value = self.baseline(state.params["actor"], critic, obs, rng.fold(key, 1))
        advantage = self.q(critic, obs, actions) - value
        policy_weight = self.policy_weights(advantage)

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[()]]:  # AWAC Eq. 13, CRR Eq. 2
            log_prob = self.dist.log_prob(self.nets["actor"](params, obs), actions)
            return weighted_mean(-policy_weight * log_prob, weights), ()

        state, loss_pi, _ = self.descend(state, "actor", actor_loss)
        slow = polyak(state.target["critic"], critic, self.hp.tau)
        state = state._replace(target={"critic": slow}, step=state.step + 1)
        means = {"advantage_mean": advantage, "weight_mean": policy_weight, "q_value_mean": q, "target_mean": target}
        return state, Aux({"critic_loss": loss_q, "actor_loss": loss_pi, **weighted_means(means, weights)}, error)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        return self.q(state.params["critic"], obs, self.greedy(state, obs))


class AWACOnline(AWAC):
    Hyper = AWACOnlineHyper
    name = "awac_online"
