"""What the policy-gradient algorithms share: the policy and its critic, normalisers, advantages of a rollout, acting.

Behaviour log-probabilities and values are computed in one batch when the rollout is complete, instead of being stored
step by step; the parameters have not changed, so they are the same numbers. Observation statistics are updated once for
each rollout, after it was used. An action mask is split off the observation and stored beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OnPolicyHyper, RolloutHyper
from rl_training.algorithms.observations import ObservationReader, check_cnn
from rl_training.algorithms.phases import RolloutPhase
from rl_training.data.storage import Batch
from rl_training.models.policy import Actor, ActorCritic, Critic
from rl_training.ops import distributions
from rl_training.ops.losses import explained_variance
from rl_training.ops.returns import gae, init_returns, scale_by_returns
from rl_training.ops.running_stats import update_moments
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

R = TypeVar("R", bound=RolloutHyper)
Params = dict[str, Tensor]


class Rollout(NamedTuple):
    """What advantages are computed from: [T, N, ...] each."""

    obs: Obs
    actions: Tensor
    mask: Tensor | None
    log_probs: Tensor  # under the current policy
    rewards: Tensor
    values: Tensor
    next_values: Tensor
    discounts: Tensor
    continues: Tensor
    behaviour_log_probs: Tensor | None = None  # stored when the actions were chosen


class PolicyGradient(Algorithm[R]):
    """Subclasses define `train_step`.

    Actor and critic are one network, `policy`, so that one gradient step moves both. With `separate` they are two,
    `actor` and `critic`, for algorithms that step them apart.
    """

    actions = ("discrete", "multi_discrete", "multi_binary", "box")
    masks = True
    kind_defaults = {"continuous": {"normalize_observations": True, "normalize_rewards": True}}
    separate: ClassVar[bool] = False
    policy_class: ClassVar[type[nn.Module]] = ActorCritic
    actor_class: ClassVar[type[Actor]] = Actor  # of separate networks

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp, seen = self.hp, spec.unmasked
        layers = (seen, distributions.for_action(spec.action).size, hp.hidden_sizes, hp.activation, hp.log_std_init)
        if not self.separate:
            return {"policy": self.policy_class(*layers, hp.cnn, self.shared_trunk, **self.policy_options())}
        actor = self.actor_class(*layers, hp.cnn)
        return {"actor": actor, "critic": Critic(seen, hp.hidden_sizes, hp.activation, hp.cnn)}

    def policy_options(self) -> dict[str, Any]:
        """More arguments of `policy_class`."""
        return {}

    @property
    def shared_trunk(self) -> bool:
        """Whether actor and critic are two heads on the same layers."""
        chosen = getattr(self.hp, "shared_trunk", False)
        return self.spec.has_images if chosen is None else chosen

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        check_cnn(spec, self.hp)

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return super().named_networks(network) if self.separate else {"policy": network}

    def setup(self) -> None:
        self.dist = distributions.for_action(self.spec.action)
        self.reader = ObservationReader(self.spec, self.hp.normalize_observations)

    def init_extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {**self.reader.init_extra(), **self.rollout_extra()}
        if self.hp.normalize_rewards:
            extra["returns"] = init_returns(self.num_envs)
        return extra

    def rollout_extra(self) -> dict[str, Tensor]:
        """State that is reset with each rollout."""
        return {}

    def rollout_phases(self) -> tuple[RolloutPhase, ...]:
        """Epochs of minibatches where the settings have them, else one update on the whole rollout."""
        hp = self.hp
        if isinstance(hp, OnPolicyHyper):
            rows = hp.batch_size // hp.chunk
            return (RolloutPhase("update", self.train_step, times=hp.n_epochs, batch_size=rows),)
        return (RolloutPhase("update", self.train_step),)

    # --- the networks ----------------------------------------------------------------------------------------------

    def policy_out(self, params: Params, obs: Obs) -> Tensor:
        """The input of the action distribution: [B, size]."""
        net, part = ("actor", ()) if self.separate else ("policy", ("policy",))
        out: Tensor = self.nets[net](params[net], obs, *part)
        return out

    def values(self, params: Params, obs: Obs) -> Tensor:
        net, part = ("critic", ()) if self.separate else ("policy", ("value",))
        values: Tensor = self.nets[net](params[net], obs, *part)
        return values

    def outputs(self, params: Params, obs: Obs) -> tuple[Tensor, Tensor]:
        """Both of them."""
        if self.separate:
            return self.policy_out(params, obs), self.values(params, obs)
        out, values = self.nets["policy"](params["policy"], obs)
        return out, values

    # --- rollouts --------------------------------------------------------------------------------------------------

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """Advantages, returns and behaviour log-probabilities of a rollout [T, N, ...], cut into `samples`."""
        hp, actions, rewards = self.hp, rollout["actions"], rollout["rewards"]
        weights = rollout["valid"].to(torch.float32)
        terminated = rollout["terminated"].to(torch.float32)
        continues = (1.0 - terminated) * (1.0 - rollout["truncated"].to(torch.float32))
        continues = continues * torch.cat([weights[1:], torch.ones_like(weights[:1])])  # stop before an invalid row
        raw, mask = self.reader.split(rollout["obs"])
        obs, (next_obs, _) = (
            self.reader.normalised(state.extra, raw),
            self.reader.read(state.extra, rollout["next_obs"]),
        )
        out, values, next_values = self.outlook(state.params, {**rollout, "obs": obs, "next_obs": next_obs})
        extra = {**state.extra, **self.rollout_extra()}
        if hp.normalize_rewards:
            extra["returns"], rewards = scale_by_returns(
                extra["returns"], rewards, continues, weights, hp.gamma, clip=10.0
            )
        log_probs = self.dist.log_prob(out, actions, mask)
        discounts = hp.gamma * (1.0 - terminated)
        stored = rollout.get("behaviour_log_probs")
        advantages, returns = self.advantages(
            state, Rollout(obs, actions, mask, log_probs, rewards, values, next_values, discounts, continues, stored)
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

    def rollout_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """How well the critic predicted the returns of the rollout; the targets of V-trace are no such returns."""
        if type(self).advantages is not PolicyGradient.advantages:
            return {}
        returns, advantages, weights = (batch[name].flatten() for name in ("returns", "advantages", "weights"))
        return {"explained_variance": explained_variance(returns - advantages, returns, weights)}

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

    # --- acting ----------------------------------------------------------------------------------------------------

    def behaviour(self, state: TrainState) -> Params:
        """The parameters of the policy that collects."""
        return state.params

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        seen, mask = self.reader.read(state.extra, obs)
        if explore:
            return carry, self.dist.sample(self.policy_out(self.behaviour(state), seen), key, mask), {}
        return carry, self.dist.mode(self.policy_out(state.params, seen), mask), {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        return self.values(state.params, self.reader.read(state.extra, obs)[0])
