"""Inverse soft Q-learning, IQ-Learn (Garg et al. 2021): one Q-function stands for the reward and for the policy that is
soft-optimal under it, so nothing is adversarial.

A Q-function and the soft value V of its policy imply the reward r(s, a) = Q(s, a) - gamma V(s'). With
phi(x) = x - x^2 / (4 alpha), which comes from a chi-square regulariser of the reward, the expert's Q-function maximises

    E_expert[phi(r)] - (1 - gamma) E[V(s_0)].

The second expectation can be taken over the initial states (`v0`), or over any states as E[V(s) - gamma V(s')]
(`value`), because the sum telescopes. Continuous actions: V(s) = min Q(s, a) - temperature x log pi(a|s) with an action
of SAC's actor, which learns as in SAC. Discrete actions: V is the soft maximum, as in soft Q-learning.

`iq_learn` also collects transitions of its own, which give the second expectation more states; `iq_learn_offline` has
the expert's alone.

Deviations: as in the authors' code, `v0` takes all of the expert's states for initial ones, which is valid because no
policy depends on where episodes start, and the actor learns at a lower rate than the critics. Online, the quadratic
part of phi is the mean over both kinds of rows, at the actions that were taken (the code draws new ones in the policy's
rows). `discrete_iq_learn` explores with epsilon instead of sampling from the soft policy.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.continuous.base import ContinuousHyper
from rl_training.algorithms.continuous.critics.base import CriticOptions
from rl_training.algorithms.continuous.critics.ensemble import TwinOptions
from rl_training.algorithms.continuous.sac import SAC, SACFields
from rl_training.algorithms.hyper import Hyper, OfflineHyper, Positive, Temperature, constant
from rl_training.algorithms.prior_data import ExpertFields
from rl_training.algorithms.value.dqn import DQN, TD, DQNFields, DQNHyper
from rl_training.algorithms.value.target_rules import TargetRule, take
from rl_training.data.storage import Batch
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import periodic
from rl_training.ops.schedules import Schedule

_POLICY_ACTION = 4  # random stream of the actions in V(s); SAC and its critics use 0 to 3


class IQFields(Hyper):
    """Settings of the objective."""

    chi2_alpha: float = Field(0.5, gt=0.0)
    """alpha in phi(x) = x - x^2 / (4 alpha): larger values allow larger rewards."""
    value_term: Literal["value", "value_expert", "v0"] = "value"
    """Second term: V(s) - gamma V(s') over all rows (value) or over the expert's (value_expert), or (1 - gamma) V(s)
    over the expert's (v0)."""
    regularize_policy: bool = True
    """The quadratic part of phi also covers the policy's own rows; there are none offline."""
    use_target: bool = True
    """V(s') is the target network's, a constant; off: the gradient also flows through V(s')."""


def iq_loss(
    q: Tensor, value: Tensor, next_value: Tensor, batch: Batch, *, gamma: float, chi2_alpha: float = 0.5,
    value_term: str = "value", regularize_policy: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """(the loss of the critics, the implied reward of each row [B] and metrics) from q [E, B] of the critics at (s, a)
    and the soft values of s and s' [B]. Rows are the expert's if there is no column `labels`."""
    weights = batch["weights"]
    expert = weights * batch["labels"] if "labels" in batch else weights
    ahead = batch["discounts"] * next_value
    rewards = q - ahead  # [E, B]
    penalty = rewards.square().mean(0) / (4.0 * chi2_alpha)
    first = weighted_mean(rewards.mean(0), expert) - weighted_mean(penalty, weights if regularize_policy else expert)
    if value_term == "v0":
        second = (1.0 - gamma) * weighted_mean(value, expert)
    else:
        second = weighted_mean(value - ahead, weights if value_term == "value" else expert)
    loss = second - first  # minus the objective
    reward = rewards.mean(0)
    metrics = {"critic_loss": loss, "expert_reward": weighted_mean(reward, expert), "value_term": second}
    return loss, {"reward": reward, **{name: x.detach() for name, x in metrics.items()}}


# --- continuous actions ----------------------------------------------------------------------------------------------


class IQLearnFields(IQFields, SACFields):
    ent_coef: Temperature = 0.01
    actor_learning_rate: Positive = constant(3e-5)
    """Step size of policy and temperature; a number or a schedule."""
    num_critics: int = Field(2, ge=1)
    """Critics, whose smallest value counts (the authors have one on HalfCheetah)."""
    layer_norm: bool = False
    """LayerNorm in the critics."""

    def critic_options(self) -> CriticOptions:
        return TwinOptions.of(self)

    def actor_rate(self) -> Schedule:
        return self.actor_learning_rate


class IQLearnHyper(IQLearnFields, ContinuousHyper, ExpertFields):
    """Settings of IQ-Learn in the environment."""


class IQLearnOfflineHyper(IQLearnFields, OfflineHyper):
    """Settings of IQ-Learn on an expert's data alone."""


I = TypeVar("I", bound=IQLearnFields)  # noqa: E741


class IQLearn(SAC[I]):
    """SAC with another loss of the critics."""

    Hyper: ClassVar[type[Hyper]] = IQLearnHyper
    name = "iq_learn"

    def critic_step(
        self, state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        hp, critic, obs, next_obs = self.hp, self.critic, batch["obs"], batch["next_obs"]
        alpha = torch.exp(state.extra["log_alpha"])

        def act(obs: Any, stream: int) -> tuple[Tensor, Tensor]:
            out = self.actor_net(state.params["actor"], state.extra, obs)
            action, log_prob = self.dist.sample_and_log_prob(out, rng.fold(key, stream))
            return action, -alpha * log_prob

        (action, bonus), (next_action, next_bonus) = act(obs, _POLICY_ACTION), act(next_obs, 0)

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            q = critic.values(params, obs, batch["actions"])  # [E, B]
            value = critic.values(params, obs, action).amin(0) + bonus
            slow = state.target["critic"] if hp.use_target else params
            next_value = critic.values(slow, next_obs, next_action).amin(0) + next_bonus
            loss, parts = iq_loss(
                q, value, next_value, batch, gamma=hp.gamma, chi2_alpha=hp.chi2_alpha, value_term=hp.value_term,
                regularize_policy=hp.regularize_policy,
            )  # fmt: skip
            return loss, {**parts, "q_value_mean": weighted_mean(q.mean(0), batch["weights"])}

        after, _, parts, grad_norm = self.descend_with_norm(state, "critic", loss)
        reward = parts.pop("reward")
        return after, batch, {**parts, "grad_norm": grad_norm, "ent_coef": alpha}, reward.abs()


class IQLearnOffline(IQLearn[IQLearnOfflineHyper]):
    Hyper = IQLearnOfflineHyper
    name = "iq_learn_offline"


# --- discrete actions ------------------------------------------------------------------------------------------------


class DiscreteIQFields(IQFields, DQNFields):
    learning_rate: Positive = constant(1e-4)
    max_grad_norm: float = Field(0.0, ge=0.0)
    target_rule: TargetRule = "soft"
    rule_temperature: float = Field(0.01, gt=0.0)
    """Temperature of the soft maximum."""
    use_target: bool = False

    @model_validator(mode="after")
    def _soft(self) -> DiscreteIQFields:
        if self.target_rule != "soft" or self.double or self.hysteretic != 1.0:
            raise ValueError("the value of a state is its soft maximum: leave target_rule, double and hysteretic")
        return self


class DiscreteIQLearnHyper(DiscreteIQFields, DQNHyper, ExpertFields):
    """Settings of IQ-Learn with discrete actions in the environment."""


class DiscreteIQLearnOfflineHyper(DiscreteIQFields, OfflineHyper):
    """Settings of IQ-Learn with discrete actions on an expert's data alone."""


K = TypeVar("K", bound=DiscreteIQFields)


class DiscreteIQLearn(DQN[K]):
    """Soft Q-learning with another loss."""

    Hyper: ClassVar[type[Hyper]] = DiscreteIQLearnHyper
    name = "discrete_iq_learn"
    masks = False  # datasets have no masks
    kind_defaults = {}

    def q_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor], TD]:
        hp, temperature = self.hp, self.hp.rule_temperature
        keys = (rng.fold(key, 0), rng.fold(key, 1)) if self.noisy else (None, None)

        def soft_maximum(values: Tensor) -> Tensor:
            return temperature * torch.logsumexp(values / temperature, -1)

        def loss(q_params: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            online = {"q": q_params}
            values = self.q_values(online, batch["obs"], keys[0])  # [B, A]
            q = take(values, batch["actions"])
            next_values = self.q_values(state.target if hp.use_target else online, batch["next_obs"], keys[1])
            loss, parts = iq_loss(
                q.unsqueeze(0), soft_maximum(values), soft_maximum(next_values), batch, gamma=hp.gamma,
                chi2_alpha=hp.chi2_alpha, value_term=hp.value_term, regularize_policy=hp.regularize_policy,
            )  # fmt: skip
            return loss, (q, parts)

        after, _, (q, parts), grad_norm = self.descend_with_norm(state, "q", loss)
        step, reward = state.step + 1, parts.pop("reward")
        slow = periodic(state.target["q"], after.params["q"], step, self.target_every, hp.tau)
        metrics = {**parts, "q_value_mean": weighted_mean(q, batch["weights"]), "grad_norm": grad_norm}
        return after._replace(target={"q": slow}, step=step), metrics, TD(reward, q, q - reward, reward.abs(), {})


class DiscreteIQLearnOffline(DiscreteIQLearn[DiscreteIQLearnOfflineHyper]):
    Hyper = DiscreteIQLearnOfflineHyper
    name = "discrete_iq_learn_offline"
