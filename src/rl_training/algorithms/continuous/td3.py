"""Twin delayed deep deterministic policy gradient, TD3 (Fujimoto et al. 2018), and DDPG (Lillicrap et al. 2016), also
with remote actors (Ape-X, Horgan et al. 2018).

DDPG is the same update with one critic, no delay and no smoothing. The setting `critic` replaces the critics by another
kind; beside renormalised ones the actor has no target network either, as in CrossQ. TD3+BC and ReBRAC give it a
`Regularizer`, which holds the policy to the actions of a dataset. On images, actor and critics have an encoder each, as
in sac.py, or share one (`shared_encoder`).

Deviations: in TD3, the actor learns at updates 1, 3, 5, ... instead of 2, 4, 6, ...; in DDPG, noise is Gaussian by
default (`exploration: ou` is the paper's), there is no weight decay, and the critic sees the action in its first layer.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import (
    ActorCriticFields,
    ContinuousControl,
    DeterministicFields,
    DeterministicHyper,
    delayed,
)
from rl_training.algorithms.continuous.critics.base import POLICY, CriticOptions, Extra, Owner
from rl_training.algorithms.continuous.critics.ensemble import TwinOptions
from rl_training.algorithms.continuous.critics.setting import CriticSetting
from rl_training.algorithms.continuous.shared import SharedEncoderFields, make_networks
from rl_training.algorithms.hyper import Hyper
from rl_training.data.storage import Batch
from rl_training.ops import rng
from rl_training.ops.distributions import SquashedGaussian
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec

PROPOSAL_DEVIATION = 0.2  # of the actions that conservative critics draw near the policy's, before the tanh


class TD3Fields(DeterministicFields, ActorCriticFields):
    """Settings of TD3 on any kind of data."""

    num_critics: int = Field(2, ge=1)
    """Twin critics, whose smallest value is the target."""
    policy_delay: int = Field(2, ge=1)
    """Gradient steps of the critics for each one of the actor and the targets."""
    target_policy_noise: float = Field(0.2, ge=0.0)
    """Standard deviation of the noise on the target's actions."""
    target_noise_clip: float = Field(0.5, ge=0.0)
    """The noise on the target's actions is clipped to this size."""

    def critic_options(self) -> CriticOptions:
        """The kind of critics that these settings ask for."""
        return TwinOptions()


class TD3Hyper(TD3Fields, SharedEncoderFields, DeterministicHyper):
    """Settings of TD3 with replay."""

    critic: CriticSetting = TwinOptions()
    """Kind of critics: a name such as `quantile`, or a name with options: `{kind: quantile, num_quantiles: 25}`."""
    layer_norm: bool = False
    """LayerNorm in the critics."""

    def critic_options(self) -> CriticOptions:
        return self.critic.with_layer_norm(self.layer_norm)


class Regularizer:
    """How a policy is held to the actions of a dataset. This one does not hold it."""

    def next_bonus(self, batch: Batch, next_action: Tensor) -> Tensor | None:
        """What is added to the value of the next action: [B]."""
        return None

    def policy_loss(self, value: Tensor, action: Tensor, batch: Batch) -> Tensor:
        """What the actor lowers, given the value of its action: [B]."""
        return -value


D = TypeVar("D", bound=TD3Fields)


class TD3(ContinuousControl[D]):
    Hyper: ClassVar[type[Hyper]] = TD3Hyper
    name = "td3"
    targets: tuple[str, ...] = ("actor", "critic")
    climbs: ClassVar[Literal["smallest", "first"]] = "first"  # the policy follows the first critic (Algorithm 1)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp, options = self.hp, self.hp.critic_options()

        def model(seen: EnvSpec) -> nn.Module:
            return options.model(seen, actor_outputs=1, num_critics=hp.num_critics, **hp.architecture())

        return self.named_networks(make_networks(hp, spec, self.name, model, options.kind, options.can_share))

    def setup(self) -> None:
        super().setup()
        self.critic = self.hp.critic_options().build(Owner(self, self.propose, 1.0, self.climbs, self.encoder))
        self.targets = () if self.critic.renormalised else ("actor", "critic")
        self.dist = SquashedGaussian(self.spec.action.dim)
        self.regularizer = Regularizer()

    def init_extra(self) -> Extra:
        return {**super().init_extra(), **self.actor_net.init_extra(), **self.critic.init_extra()}

    def propose(self, state: TrainState, obs: Obs, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Actions near the policy's and their log-densities: [N, B, A], [N, B]."""
        mean = self.actor_net(state.params["actor"], state.extra, obs)
        out = torch.cat([mean, torch.full_like(mean, math.log(PROPOSAL_DEVIATION))], -1)
        return self.dist.sample_and_log_prob(out.expand(count, *out.shape), key)

    def target_action(self, params: Tensor, extra: Extra, next_obs: Obs, key: Tensor) -> Tensor:
        """The target actor's action, smoothed by clipped noise (Eq. 14)."""
        action, hp = torch.tanh(self.actor_net(params, extra, next_obs)), self.hp
        if not hp.target_policy_noise:
            return action
        noise = hp.target_policy_noise * rng.normal(key, tuple(action.shape))
        return torch.clamp(action + noise.clamp(-hp.target_noise_clip, hp.target_noise_clip), -1.0, 1.0)

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        """`actor`: are policy and targets due? None asks `policy_delay`, at the cost of computing them every time."""
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        state, batch, metrics, error = self.critic_step(state, self.read_next(state, batch), key)
        if actor is not False:
            improved, more = self.policy_step(state, batch, key)
            state = improved if actor else delayed(state.step, self.hp.policy_delay, improved, state)
            metrics |= more
        return state._replace(step=state.step + 1), Aux(metrics, error)

    def critic_step(
        self, state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        """The state with new critics, the batch as the policy reads it, metrics, and the error of every sample."""
        actor = state.target.get("actor", state.params["actor"])
        next_action = self.target_action(actor, state.extra, batch["next_obs"], key)
        bonus = self.regularizer.next_bonus(batch, next_action)
        return self.critic.update(state, batch, next_action, bonus, key)

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor]]:
        """The state with new policy and targets, and metrics."""
        obs, weights, extra = batch["obs"], batch["weights"], state.extra
        critic, stream = state.params["critic"], self.critic.stream(key, POLICY)

        def actor_loss(params: Tensor) -> tuple[Tensor, Extra]:
            out, renewed = self.actor_net.learn(params, extra, obs, weights)
            action = torch.tanh(out)
            value = self.critic.policy_value(critic, extra, obs, action, stream)
            return weighted_mean(self.regularizer.policy_loss(value, action, batch), weights), renewed

        state, loss, renewed = self.descend(state, "actor", actor_loss)
        return self.follow(state._replace(extra={**extra, **renewed})), {"actor_loss": loss}

    def follow(self, state: TrainState) -> TrainState:
        """The state with target networks that have moved towards the others."""
        slow = {name: polyak(old, state.params[name], self.hp.tau) for name, old in state.target.items()}
        return state._replace(target=slow)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critics' value of the deterministic action."""
        seen = self.read(state, obs)
        return self.critic.value(state.params["critic"], state.extra, seen, self.greedy(state, obs))
