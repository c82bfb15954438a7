"""Implicit Q-learning (Kostrikov et al. 2022): an expectile of Q over the data's actions takes the place of the
maximum, so no action outside the data is ever evaluated; the policy is a regression on the data, weighted by
exponential advantages.

`ImplicitQ` is the update for actions of any kind; discrete_iql.py uses it too. XQL replaces `value_loss`. `iql_online`
continues in the environment (paper, section 5.3).

Deviations: all three losses use the networks before the update, as in CORL, whose scores are the reference, so that the
advantage of V's loss is also the policy's, which saves a pass (in the authors' code the policy and Q use the new V);
online, a fixed share of each batch is from the dataset, where the paper adds new transitions to one buffer.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import ContinuousControl, ContinuousFields
from rl_training.algorithms.continuous.critics.base import regression
from rl_training.algorithms.hyper import Hyper, OfflineHyper, Positive, Widths, constant
from rl_training.algorithms.prior_data import FineTuneFields
from rl_training.data.storage import Batch
from rl_training.models.offline import IQLModel
from rl_training.ops.losses import expectile_loss, weighted_mean, weighted_means
from rl_training.ops.optim import polyak
from rl_training.ops.schedules import Schedule
from rl_training.spec import EnvSpec


class ImplicitFields(Hyper):
    """Settings of the update, for actions of any kind."""

    hidden_sizes: Widths = (256, 256)
    """Widths of the hidden layers of policy, critics and value."""
    actor_learning_rate: Positive = Field(default_factory=lambda: Schedule(kind="cosine", start=3e-4, end=0.0))
    """Step size of the policy; a number or a schedule (paper: cosine to 0)."""
    expectile: float = Field(0.7, gt=0.0, lt=1.0)
    """V is this expectile of Q over the data's actions; towards 1 it nears the maximum."""
    beta: float = Field(3.0, gt=0.0)
    """Inverse temperature of the policy's weights exp(beta x advantage)."""
    max_weight: float = Field(100.0, gt=0.0)
    """Largest of these weights."""
    num_critics: int = Field(2, ge=1)
    """Critics, whose smallest value counts."""
    tau: float = Field(0.005, gt=0.0, le=1.0)
    """Share of the critics that each target update takes over."""


class IQLFields(ImplicitFields, ContinuousFields):
    layer_norm: bool = False
    """LayerNorm in the critics."""


class IQLHyper(IQLFields, OfflineHyper):
    """Settings of IQL on a dataset alone."""


class IQLOnlineHyper(IQLFields, FineTuneFields):
    actor_learning_rate: Positive = constant(3e-4)
    """Step size of the policy; a number or a schedule."""


def advantage_weights(advantage: Tensor, beta: float, max_weight: float) -> Tensor:
    """min(exp(beta A), max_weight), without an overflow on the way."""
    return (beta * advantage).clamp(max=20.0).exp().clamp(max=max_weight)


def iql_loss(
    q: Tensor, target_q: Tensor, value: Tensor, next_value: Tensor, log_prob: Tensor, batch: Batch, *,
    expectile: float = 0.7, beta: float = 3.0, max_weight: float = 100.0,
) -> dict[str, Tensor]:  # fmt: skip
    """The three losses and means over the batch, from q [E, B] of the critics at (s, a), the target critics' minimum
    [B], V(s), V(s') and log pi(a|s) [B]. Each loss has a gradient for its own network only."""
    weights = batch["weights"]
    advantage = (target_q - value).detach()
    target = (batch["rewards"] + batch["discounts"] * next_value).detach()
    policy_weight = advantage_weights(advantage, beta, max_weight)
    return {
        "value_loss": weighted_mean(expectile_loss(target_q.detach() - value, expectile), weights),  # Eq. 5
        "critic_loss": weighted_mean((q - target).square().sum(0), weights),  # Eq. 6
        "actor_loss": weighted_mean(-policy_weight * log_prob, weights),  # Eq. 7
        **weighted_means(
            {"advantage_mean": advantage, "weight_mean": policy_weight, "q_value_mean": q.detach().mean(0),
             "value_mean": value.detach(), "target_mean": target}, weights,
        ),
    }  # fmt: skip


J = TypeVar("J", bound=ImplicitFields)
Q = TypeVar("Q", bound=IQLFields)


class ImplicitQ(Algorithm[J]):
    """The three updates. Subclasses define the networks `actor`, `critic` and `value`, the policy's distribution, and
    how to call the critics."""

    targets = ("critic",)
    dist: Any

    def q(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Values of the actions by every critic: [E, B]."""
        raise NotImplementedError

    def log_prob(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """log pi(a|s): [B]."""
        log_prob: Tensor = self.dist.log_prob(self.nets["actor"](params, obs), actions)
        return log_prob

    def value_loss(self, difference: Tensor, weights: Tensor) -> Tensor:
        """Loss of V for Q - V, per sample (Eq. 5). Rows of weight 0 do not count."""
        return expectile_loss(difference, self.hp.expectile)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, nets, weights = self.hp, self.nets, batch["weights"]
        obs, actions = batch["obs"], batch["actions"]
        target_q = self.q(state.target["critic"], obs, actions).amin(0)  # [B]

        def value_loss(params: Tensor) -> tuple[Tensor, Tensor]:
            advantage = target_q - nets["value"](params, obs)
            return weighted_mean(self.value_loss(advantage, weights), weights), advantage

        next_value = nets["value"](state.params["value"], batch["next_obs"])
        state, loss_v, advantage = self.descend(state, "value", value_loss)
        policy_weight = advantage_weights(advantage, hp.beta, hp.max_weight)

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[()]]:  # Eq. 7
            return weighted_mean(-policy_weight * self.log_prob(params, obs, actions), weights), ()

        state, loss_pi, _ = self.descend(state, "actor", actor_loss, hp.actor_learning_rate(state.progress))
        target = batch["rewards"] + batch["discounts"] * next_value
        critic_loss = regression(lambda params: self.q(params, obs, actions), target, weights)  # Eq. 6
        state, loss_q, (q, error) = self.descend(state, "critic", critic_loss)
        slow = polyak(state.target["critic"], state.params["critic"], hp.tau)
        state = state._replace(target={"critic": slow}, step=state.step + 1)
        means = {"advantage_mean": advantage, "weight_mean": policy_weight, "q_value_mean": q, "target_mean": target}
        metrics = {"critic_loss": loss_q, "value_loss": loss_v, "actor_loss": loss_pi, **weighted_means(means, weights)}
        return state, Aux(metrics, error)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        value: Tensor = self.nets["value"](state.params["value"], obs)
        return value


class IQL(ImplicitQ[Q], ContinuousControl[Q]):
    Hyper: ClassVar[type[Hyper]] = IQLHyper
    name = "iql"

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            IQLModel(
                spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation, layer_norm=hp.layer_norm
            )
        )

    def q(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        q: Tensor = self.nets["critic"](params, obs, actions)
        return q


class IQLOnline(IQL[IQLOnlineHyper]):
    Hyper = IQLOnlineHyper
    name = "iql_online"
