"""Twin delayed deep deterministic policy gradient, TD3 (Fujimoto et al. 2018), and DDPG (Lillicrap et al. 2016).

DDPG is the same update with one critic, no delay and no smoothing.
Deviations from TD3: the actor learns at updates 1, 3, 5, ... instead of 2, 4, 6, ... From DDPG: Gaussian noise by
default (`exploration: ou` is the paper's), no weight decay, and the critic sees the action in its first layer.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import (
    Behaviour,
    ContinuousControl,
    DeterministicFields,
    DeterministicHyper,
    delayed,
)
from rl_training.algorithms.hyper import Hyper
from rl_training.data.storage import Batch
from rl_training.models.control import EnsembleCritic, TD3Model
from rl_training.ops import rng
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec


class TD3Fields(DeterministicFields):
    num_critics: int = Field(2, ge=1)
    """Critics, whose smallest value is the target."""
    policy_delay: int = Field(2, ge=1)
    """Gradient steps of the critics for each one of the actor and the targets."""
    target_policy_noise: float = Field(0.2, ge=0.0)
    """Standard deviation of the noise on the target's actions."""
    target_noise_clip: float = Field(0.5, ge=0.0)
    """That noise is clipped to this size."""


class TD3Hyper(TD3Fields, DeterministicHyper):
    """TD3 with replay."""


class TD3(ContinuousControl[TD3Fields]):
    Hyper: ClassVar[type[Hyper]] = TD3Hyper
    name = "td3"
    targets = ("actor", "critic")

    # --- what TD3+BC and ReBRAC replace --------------------------------------------------------------------------

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            TD3Model(spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation)
        )

    def policy(self, params: Tensor, obs: Obs) -> Tensor:
        """mu(s) in [-1, 1]: [B, A]."""
        return torch.tanh(self.nets["actor"](params, obs))

    def target_action(self, params: Tensor, next_obs: Obs, key: Tensor) -> Tensor:
        """The target actor's action, smoothed by clipped noise (Eq. 14)."""
        action, hp = self.policy(params, next_obs), self.hp
        if not hp.target_policy_noise:
            return action
        noise = hp.target_policy_noise * rng.normal(key, tuple(action.shape))
        return torch.clamp(action + noise.clamp(-hp.target_noise_clip, hp.target_noise_clip), -1.0, 1.0)

    def next_q(self, params: Tensor, batch: Batch, next_action: Tensor) -> Tensor:
        """Value to bootstrap from: [B]."""
        q: Tensor = self.nets["critic"](params, batch["next_obs"], next_action)
        return q.amin(0)  # [E, B] -> [B]

    def policy_loss(self, critic: Tensor, batch: Batch, action: Tensor) -> Tensor:
        """What the actor lowers, per sample (Algorithm 1: the first critic alone): [B]."""
        return -self.first_q(critic, batch["obs"], action)

    # --- shared --------------------------------------------------------------------------------------------------

    def first_q(self, params: Tensor, obs: Obs, action: Tensor) -> Tensor:
        """Value by the first critic: [B]. Our own ensemble does not compute the others for it."""
        critic = self.nets["critic"]
        only = {"members": slice(0, 1)} if isinstance(critic.module, EnsembleCritic) else {}
        q: Tensor = critic(params, obs, action, **only)
        return q[0]

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        """`actor`: are policy and targets due? None asks `policy_delay`, at the cost of computing them every time."""
        state, metrics, error = self.critic_step(state, batch, key)
        if actor is not False:
            improved, more = self.policy_step(state, batch)
            state = improved if actor else delayed(state.step, self.hp.policy_delay, improved, state)
            metrics |= more
        return state._replace(step=state.step + 1), Aux(metrics, error)

    def critic_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor], Tensor]:
        """The state with new critics, metrics, and the error of every sample."""
        critic, obs, weights = self.nets["critic"], batch["obs"], batch["weights"]
        next_action = self.target_action(state.target["actor"], batch["next_obs"], key)
        next_q = self.next_q(state.target["critic"], batch, next_action)
        target = batch["rewards"] + batch["discounts"] * next_q

        def critic_loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            q = critic(params, obs, batch["actions"])  # [E, B]
            error = q - target
            return weighted_mean((error**2).sum(0), weights), (q.mean(0), error.abs().mean(0))

        loss, (q, error), grads = value_and_grad(critic_loss, state.params["critic"])
        rate = self.hp.learning_rate(state.progress)
        params, opt = self.adam.update(grads, state.opt["critic"], state.params["critic"], rate)
        state = state._replace(params={**state.params, "critic": params}, opt={**state.opt, "critic": opt})
        metrics = {
            "critic_loss": loss,
            "q_value_mean": weighted_mean(q, weights),
            "target_mean": weighted_mean(target, weights),
        }
        return state, metrics, error

    def policy_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Tensor]]:
        """The state with new policy and targets, and metrics."""
        hp, critic = self.hp, state.params["critic"]

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[()]]:
            action = self.policy(params, batch["obs"])
            return weighted_mean(self.policy_loss(critic, batch, action), batch["weights"]), ()

        loss, _, grads = value_and_grad(actor_loss, state.params["actor"])
        rate = hp.learning_rate(state.progress)
        actor, opt = self.adam.update(grads, state.opt["actor"], state.params["actor"], rate)
        slow = {
            "actor": polyak(state.target["actor"], actor, hp.tau),
            "critic": polyak(state.target["critic"], critic, hp.tau),
        }
        params = {**state.params, "actor": actor}
        return state._replace(params=params, target=slow, opt={**state.opt, "actor": opt}), {"actor_loss": loss}

    def behaviour(self, state: TrainState, obs: Obs) -> Behaviour:
        out, features = self.nets["actor"](state.params["actor"], obs, True)
        return Behaviour(torch.tanh(out), self.hp.exploration_noise(state.progress), features)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Smallest critic's value of the deterministic action."""
        q: Tensor = self.nets["critic"](state.params["critic"], obs, self.greedy(state, obs))
        return q.amin(0)
