"""PPO with an intrinsic reward: random network distillation, RND (Burda et al. 2019), or the intrinsic curiosity
module, ICM (Pathak et al. 2017).

The bonus is an object of its own (algorithms/bonuses.py). Rewards of the environment and intrinsic rewards have a value
function and a discount each; the policy follows the weighted sum of both advantages (RND, section 2.3). Intrinsic
returns go on when an episode ends, unless `episodic_bonus` is set, so that a policy does not avoid risks only because
novelty ends with the episode. Intrinsic rewards are divided by the running deviation of their discounted return
(`normalize_bonus`, section 2.4). `icm` is the same class with the settings of its paper: one discount, episodic
returns, and rewards that are simply added.

Deviations: the intrinsic value has a network of its own instead of a second head on the policy's; advantages are
standardised per minibatch, as in PPO; moments of observations are updated with each rollout before it is rewarded,
instead of beginning with a phase of random actions; images are not reduced to their last frame; no recurrent policy;
ReLU instead of leaky ReLU in the networks of the bonus; ICM with PPO instead of A3C, with normalised observations, and
with the mean squared error for continuous actions.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.bonuses import BONUSES, Bonus, BonusFields
from rl_training.algorithms.policy_gradient.ppo import PPO, PPOHyper
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.policy import Critic
from rl_training.ops import rng
from rl_training.ops.losses import explained_variance, weighted_mean
from rl_training.ops.returns import gae, init_returns, scale_by_returns
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec


class CuriousHyper(BonusFields, PPOHyper):
    gamma: float = Field(0.999, ge=0.0, le=1.0)
    """Discount factor of the environment's rewards."""
    intrinsic_gamma: float = Field(0.99, ge=0.0, le=1.0)
    """Discount factor of the intrinsic rewards."""
    extrinsic_coef: float = Field(2.0, ge=0.0)
    """Weight of the advantage of the environment's rewards."""
    intrinsic_coef: float = Field(1.0, ge=0.0)
    """Weight of the advantage of the intrinsic rewards."""
    episodic_bonus: bool = False
    """Intrinsic returns end where episodes end, instead of going on in the next episode."""
    normalize_bonus: bool = True
    """Divide intrinsic rewards by the running deviation of their discounted return."""


class CuriousPPO(PPO[CuriousHyper]):
    Hyper = CuriousHyper
    name = "rnd"

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp, seen = self.hp, spec.unmasked
        return {
            **super().networks(spec),
            "intrinsic_critic": Critic(seen, hp.hidden_sizes, hp.activation, hp.cnn),
            "bonus": self.make_bonus(spec).network(),
        }

    def make_bonus(self, spec: EnvSpec) -> Bonus:
        return BONUSES[self.hp.bonus](self.hp, spec)

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return dict(network.named_children())

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        if self.hp.clip_range_vf is not None:
            raise UserError(
                f"{self.name} cannot clip values (clip_range_vf): two advantages do not determine the old values"
            )

    def setup(self) -> None:
        super().setup()
        self.bonus = self.make_bonus(self.spec)
        # No decay: it would move the random network, which gets no gradient.
        self.bonus_optim = self.optimizer(eps=1e-8, max_grad_norm=None, weight_decay=0.0)

    def init_extra(self) -> dict[str, Any]:
        extra = {**super().init_extra(), "bonus_observations": self.bonus.init_extra()}
        if self.hp.normalize_bonus:
            extra["bonus_returns"] = init_returns(self.num_envs)
        return extra

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """PPO's batch, with the weighted sum of both advantages, and what the intrinsic critic and the bonus learn."""
        hp = self.hp
        new, batch = super().prepare(state, rollout, key)
        weights = rollout["valid"].to(torch.float32)
        raw = {name: self.reader.split(rollout[name])[0].flatten(0, 1) for name in self.bonus.columns}
        moments = self.bonus.learn(state.extra["bonus_observations"], raw["next_obs"], weights.flatten())
        rows = self.bonus.rows(moments, {**raw, "actions": rollout["actions"].flatten(0, 1)})
        rewards = weights * self.bonus.reward(self.nets["bonus"], state.params["bonus"], rows).view(weights.shape)
        extra = {**new.extra, "bonus_observations": moments}

        terminated, truncated = (rollout[name].to(torch.float32) for name in ("terminated", "truncated"))
        followed = weights * torch.cat([weights[1:], torch.ones_like(weights[:1])])  # a transition follows, in time
        continues = followed * (1.0 - terminated) * (1.0 - truncated) if hp.episodic_bonus else followed
        discounts = hp.intrinsic_gamma * (1.0 - terminated if hp.episodic_bonus else torch.ones_like(weights))
        if hp.normalize_bonus:
            extra["bonus_returns"], rewards = scale_by_returns(
                state.extra["bonus_returns"], rewards, continues, weights, hp.intrinsic_gamma
            )
        values, next_values = self.intrinsic_values(state, batch["obs"], rollout, followed)
        advantages, returns = gae(rewards, values, next_values, discounts, continues, hp.gae_lambda)
        extrinsic, intrinsic = batch["advantages"], advantages.flatten()
        more = {
            "advantages": hp.extrinsic_coef * extrinsic + hp.intrinsic_coef * intrinsic,
            "extrinsic_advantages": extrinsic, "intrinsic_returns": returns.flatten(),
            "intrinsic_rewards": rewards.flatten(), **{f"bonus_{name}": obs for name, obs in raw.items()},
        }  # fmt: skip
        return new._replace(extra=extra), {**batch, **more}

    def intrinsic_values(self, state: TrainState, obs: Any, rollout: Batch, followed: Tensor) -> tuple[Tensor, Tensor]:
        """(values, values of what comes next), [T, N] each. Where intrinsic returns go on after an episode, what comes
        next is the first observation of the next one."""
        net, flat, shape = self.nets["intrinsic_critic"], state.params["intrinsic_critic"], followed.shape
        next_obs = self.reader.read(state.extra, rollout["next_obs"])[0]
        values = net(flat, obs).view(shape)
        next_values = net(flat, tree_map(lambda x: x.flatten(0, 1), next_obs)).view(shape)
        if self.hp.episodic_bonus:
            return values, next_values
        later = torch.cat([values[1:], next_values[-1:]])
        return values, torch.where(followed > 0.0, later, next_values)

    def rollout_metrics(self, batch: Batch) -> dict[str, Tensor]:
        weights, returns = batch["weights"], batch["returns"]
        values = returns - batch["extrinsic_advantages"]
        return {
            "explained_variance": explained_variance(values, returns, weights),
            "intrinsic_reward_mean": weighted_mean(batch["intrinsic_rewards"], weights),
        }

    # --- updates -----------------------------------------------------------------------------------------------------

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One update of PPO, one of the intrinsic critic, and one of the bonus."""
        hp, weights = self.hp, batch["weights"]
        new, aux = super().train_step(state, batch, key)

        def critic_loss(params: Tensor) -> tuple[Tensor, Tensor]:
            error = (self.nets["intrinsic_critic"](params, batch["obs"]) - batch["intrinsic_returns"]) ** 2
            value = weighted_mean(error, weights)
            return hp.vf_coef * value, value

        new, _, value_loss = self.descend(new, "intrinsic_critic", critic_loss)
        rows = self.bonus.rows(
            state.extra["bonus_observations"],
            {"actions": batch["actions"], **{name: batch[f"bonus_{name}"] for name in self.bonus.columns}},
        )
        new, metrics = self.bonus.step(self, self.bonus_optim, new, rows, weights, rng.fold(key, 1))
        metrics |= {"intrinsic_value_loss": value_loss}
        return new, Aux({**aux.metrics, **metrics}, aux.priority)
