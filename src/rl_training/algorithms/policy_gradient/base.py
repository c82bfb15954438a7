"""What the policy-gradient algorithms share: the policy and its critic, normalisers, advantages of a rollout, acting.

Behaviour log-probabilities and values are computed in one batch when the rollout is complete (the parameters have not
changed, so they are the same numbers) instead of being stored step by step; observation statistics are updated once a
rollout, after it was used. An environment's action mask is read from the observation and kept beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Obs, Phase, TrainState, Tree, check_normalisable
from rl_training.algorithms.hyper import Positive, RolloutHyper, constant
from rl_training.data.storage import Batch
from rl_training.envs.masks import split_mask
from rl_training.models.policy import Actor, ActorCritic, Critic
from rl_training.ops import distributions
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.returns import gae, reverse_scan
from rl_training.ops.running_stats import init_moments, normalise, update_moments
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

R = TypeVar("R", bound=RolloutHyper)
Params = dict[str, Tensor]


class Rollout(NamedTuple):
    """A rollout as advantages are computed from it: [T, N, ...] each."""

    obs: Obs
    actions: Tensor
    mask: Tensor | None
    log_probs: Tensor  # under the current policy
    rewards: Tensor
    values: Tensor
    next_values: Tensor
    discounts: Tensor
    continues: Tensor


class PolicyGradient(Algorithm[R]):
    """Subclasses define `train_step`."""

    actions = ("discrete", "multi_discrete", "multi_binary", "box")
    masks = True

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        outputs = distributions.for_action(spec.action).size
        return {"policy": ActorCritic(spec.unmasked, outputs, hp.hidden_sizes, hp.activation, hp.log_std_init)}

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return {"policy": network}

    def setup(self) -> None:
        self.optim = self.optimizer()
        self.dist = distributions.for_action(self.spec.action)
        check_normalisable(self.spec, self.hp.normalize_observations)

    def init_extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self.hp.normalize_observations:
            extra["observations"] = init_moments((self.spec.unmasked.obs_dim,))
        if self.hp.normalize_rewards:
            extra["returns"] = {**init_moments(), "running": torch.zeros(self.num_envs)}
        return extra

    def phases(self) -> tuple[Phase, ...]:
        """Epochs of minibatches where the algorithm has such settings, else one update on the whole rollout."""
        hp: Any = self.hp
        return (
            Phase("update", self.train_step, "rollout", times=getattr(hp, "n_epochs", 1),
                  batch_size=hp.batch_size // hp.chunk if "batch_size" in type(hp).model_fields else None),
        )  # fmt: skip

    # --- the networks ----------------------------------------------------------------------------------------------

    def policy_out(self, params: Params, obs: Obs) -> Tensor:
        """What the action distribution reads: [B, size]."""
        out: Tensor = self.nets["policy"](params["policy"], obs, "policy")
        return out

    def values(self, params: Params, obs: Obs) -> Tensor:
        values: Tensor = self.nets["policy"](params["policy"], obs, "value")
        return values

    def outputs(self, params: Params, obs: Obs) -> tuple[Tensor, Tensor]:
        """Both of them."""
        out, values = self.nets["policy"](params["policy"], obs)
        return out, values

    # --- rollouts --------------------------------------------------------------------------------------------------

    def split(self, obs: Obs) -> tuple[Obs, Tensor | None]:
        """(the observation without its mask, the mask of allowed actions if there is one)"""
        return split_mask(obs, self.spec.masked)

    def normalised(self, state: TrainState, obs: Obs) -> Obs:
        return normalise(state.extra["observations"], obs) if self.hp.normalize_observations else obs

    def observed(self, state: TrainState, obs: Obs) -> tuple[Obs, Tensor | None]:
        """(what the networks read, the mask of allowed actions if there is one)"""
        rest, mask = self.split(obs)
        return self.normalised(state, rest), mask

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """Advantages, returns and behaviour log-probabilities of a rollout [T, N, ...], cut into `samples`."""
        hp, actions, rewards = self.hp, rollout["actions"], rollout["rewards"]
        weights = rollout["valid"].to(torch.float32)
        terminated = rollout["terminated"].to(torch.float32)
        continues = (1.0 - terminated) * (1.0 - rollout["truncated"].to(torch.float32))
        continues = continues * torch.cat([weights[1:], torch.ones_like(weights[:1])])  # up to a row that is none
        raw, mask = self.split(rollout["obs"])
        obs, (next_obs, _) = self.normalised(state, raw), self.observed(state, rollout["next_obs"])
        out, values, next_values = self.outlook(state.params, {**rollout, "obs": obs, "next_obs": next_obs})
        extra = dict(state.extra)
        if hp.normalize_rewards:
            extra["returns"], rewards = self._scaled_rewards(extra["returns"], rewards, continues, weights)
        log_probs = self.dist.log_prob(out, actions, mask)
        discounts = hp.gamma * (1.0 - terminated)
        advantages, returns = self.advantages(
            state, Rollout(obs, actions, mask, log_probs, rewards, values, next_values, discounts, continues)
        )
        if hp.normalize_observations:
            extra["observations"] = update_moments(extra["observations"], raw.flatten(0, 1), weights.flatten())
        batch = {
            "obs": obs, "actions": actions, "advantages": advantages, "returns": returns, "log_probs": log_probs,
            "weights": weights, **({} if mask is None else {"mask": mask}),
        }  # fmt: skip
        return state._replace(extra=extra), self.samples(batch, rollout)

    def outlook(self, params: Params, rollout: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(policy outputs, values, values of the next observations) of a rollout, [T, N, ...] each."""
        shape = rollout["rewards"].shape
        obs, next_obs = (tree_map(lambda x: x.flatten(0, 1), rollout[k]) for k in ("obs", "next_obs"))
        out, values = self.outputs(params, obs)
        return out.view(*shape, *out.shape[1:]), values.view(shape), self.values(params, next_obs).view(shape)

    def samples(self, batch: Batch, rollout: Batch) -> Batch:
        """The rows that minibatches are drawn from: here transitions, [T, N, ...] -> [T * N, ...]."""
        return tree_map(lambda x: x.flatten(0, 1), batch)

    def evaluate(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """(policy outputs, values) of a minibatch."""
        return self.outputs(params, batch["obs"])

    def advantages(self, state: TrainState, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(advantages, targets of the critic), [T, N] each."""
        return gae(
            rollout.rewards, rollout.values, rollout.next_values, rollout.discounts, rollout.continues,
            self.hp.gae_lambda,
        )  # fmt: skip

    def _scaled_rewards(
        self, returns: dict[str, Tensor], rewards: Tensor, continues: Tensor, weights: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Rewards over the running deviation of the discounted return, which is followed per environment."""
        first = returns["running"].unsqueeze(0)
        decays = self.hp.gamma * torch.cat([torch.ones_like(first), continues[:-1]])  # into row t from row t - 1
        increments = torch.cat([rewards[:1] + decays[:1] * first, rewards[1:]])
        running = reverse_scan(increments.flip(0), decays.flip(0)).flip(0)  # R_t = r_t + gamma c_{t-1} R_{t-1}
        moments = update_moments(
            {k: returns[k] for k in ("mean", "var", "count")}, running.flatten(), weights.flatten()
        )
        scaled = torch.clamp(rewards * torch.rsqrt(moments["var"] + 1e-8), -10.0, 10.0)
        return {**moments, "running": running[-1] * continues[-1]}, scaled

    # --- acting ----------------------------------------------------------------------------------------------------

    def behaviour(self, state: TrainState) -> Params:
        """The parameters that collect."""
        return state.params

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        seen, mask = self.observed(state, obs)
        if explore:
            return carry, self.dist.sample(self.policy_out(self.behaviour(state), seen), key, mask), {}
        return carry, self.dist.mode(self.policy_out(state.params, seen), mask), {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        return self.values(state.params, self.observed(state, obs)[0])


class TwoNetworks(PolicyGradient[R]):
    """Actor and critic with a parameter vector each, for algorithms that step them apart."""

    actor_class: ClassVar[type[Actor]] = Actor

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp, outputs = self.hp, distributions.for_action(spec.action).size
        return {
            "actor": self.actor_class(spec.unmasked, outputs, hp.hidden_sizes, hp.activation, hp.log_std_init),
            "critic": Critic(spec.unmasked, hp.hidden_sizes, hp.activation),
        }

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return dict(network.named_children())

    def policy_out(self, params: Params, obs: Obs) -> Tensor:
        out: Tensor = self.nets["actor"](params["actor"], obs)
        return out

    def values(self, params: Params, obs: Obs) -> Tensor:
        values: Tensor = self.nets["critic"](params["critic"], obs)
        return values

    def outputs(self, params: Params, obs: Obs) -> tuple[Tensor, Tensor]:
        return self.policy_out(params, obs), self.values(params, obs)


class WholeRolloutHyper(RolloutHyper):
    """One update on each rollout."""

    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "rmsprop"
    """Rule that turns gradients into steps."""
    rmsprop_alpha: float = Field(0.99, gt=0.0, lt=1.0)
    """Smoothing of the squared gradients (rmsprop)."""
    ent_coef: Positive = constant(0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""


W = TypeVar("W", bound=WholeRolloutHyper)


class WholeRollout(PolicyGradient[W]):
    """One step along the plain policy gradient on each whole rollout (A2C, IMPALA)."""

    def setup(self) -> None:
        super().setup()
        if self.hp.optimizer == "rmsprop":
            self.optim = self.optimizer(beta2=self.hp.rmsprop_alpha)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, weights, mask = self.hp, batch["weights"], batch.get("mask")
        ent_coef = hp.ent_coef(state.progress)

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out, values = self.outputs({"policy": params}, batch["obs"])
            log_probs = self.dist.log_prob(out, batch["actions"], mask)
            policy = weighted_mean(-batch["advantages"] * log_probs, weights)
            value = weighted_mean((values - batch["returns"]) ** 2, weights)
            entropy = weighted_mean(self.dist.entropy(out, mask), weights)
            metrics = {"policy_loss": policy, "value_loss": value, "entropy": entropy}
            return policy + hp.vf_coef * value - ent_coef * entropy, metrics

        old = state.params["policy"]
        total, metrics, grads = value_and_grad(loss, old)
        params, opt = self.optim.update(grads, state.opt["policy"], old, hp.learning_rate(state.progress))
        state = state._replace(params={"policy": params}, opt={"policy": opt}, step=state.step + 1)
        return state, Aux({"loss": total, **metrics})
