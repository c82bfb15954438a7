"""Proximal policy optimisation (Schulman et al. 2017), clipped objective, for discrete, multi-discrete, multi-binary
and continuous actions.

Details that its published scores depend on (Engstrom et al. 2020; Huang et al. 2022): orthogonal initialisation,
advantages normalised per minibatch, separate actor and critic, Adam eps 1e-5, gradient clipping, a state-independent
log-std. Deviations: behaviour log-probabilities and values are recomputed in one batch when the rollout is complete
(the parameters have not changed, so they are the same numbers) instead of being stored step by step; observation
statistics are updated once a rollout, after it was used.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Batch, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OnPolicyHyper, Positive, constant
from rl_training.envs.spec import ArraySpec, EnvSpec
from rl_training.errors import UserError
from rl_training.models.policy import ActorCritic
from rl_training.ops import distributions
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean, weighted_normalise
from rl_training.ops.normalise import init_moments, normalise, update_moments
from rl_training.ops.returns import gae, reverse_scan
from rl_training.ops.tree import tree_map


class PPOHyper(OnPolicyHyper):
    clip_range: Positive = constant(0.2)
    """How far the probability ratio may move before its gradient stops; a number or a schedule."""
    ent_coef: Positive = constant(0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""
    normalize_advantage: bool = True
    """Standardise the advantages of each minibatch."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""


class PPO(Algorithm[PPOHyper]):
    Hyper = PPOHyper
    name = "ppo"
    actions = ("discrete", "multi_discrete", "multi_binary", "box")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        outputs = distributions.for_action(spec.action).size
        return {"policy": ActorCritic(spec, outputs, hp.hidden_sizes, hp.activation, hp.log_std_init)}

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return {"policy": network}

    def setup(self) -> None:
        self.adam = self.optimizer()
        self.dist = distributions.for_action(self.spec.action)
        if self.hp.normalize_observations and not _is_vector(self.spec):
            raise UserError("normalize_observations needs a vector observation; images are scaled by the network")

    def init_extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self.hp.normalize_observations:
            extra["observations"] = init_moments((self.spec.obs_dim,))
        if self.hp.normalize_rewards:
            extra["returns"] = {**init_moments(), "running": torch.zeros(self.num_envs)}
        return extra

    def _normalised(self, state: TrainState, obs: Obs) -> Obs:
        return normalise(state.extra["observations"], obs) if self.hp.normalize_observations else obs

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """Advantages, returns and behaviour log-probabilities of a rollout [T, N, ...], cut into `samples`."""
        hp, actions = self.hp, rollout["actions"]
        weights = rollout["valid"].to(torch.float32)
        terminated = rollout["terminated"].to(torch.float32)
        continues = (1.0 - terminated) * (1.0 - rollout["truncated"].to(torch.float32))
        seen = {**rollout, **{k: self._normalised(state, rollout[k]) for k in ("obs", "next_obs")}}
        out, values, next_values = self.outlook(state.params["policy"], seen)
        extra = dict(state.extra)
        rewards = rollout["rewards"]
        if hp.normalize_rewards:
            extra["returns"], rewards = self._scaled_rewards(extra["returns"], rewards, continues, weights)
        discounts = hp.gamma * (1.0 - terminated)
        advantages, returns = gae(rewards, values, next_values, discounts, continues, hp.gae_lambda)
        if hp.normalize_observations:
            raw = rollout["obs"].flatten(0, 1)
            extra["observations"] = update_moments(extra["observations"], raw, weights.flatten())
        batch = {
            "obs": seen["obs"], "actions": actions, "advantages": advantages, "returns": returns,
            "log_probs": self.dist.log_prob(out, actions), "weights": weights,
        }  # fmt: skip
        return state._replace(extra=extra), self.samples(batch, rollout)

    def outlook(self, params: Tensor, rollout: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(policy outputs, values, values of the next observations) of a rollout, [T, N, ...] each."""
        net, shape = self.nets["policy"], rollout["rewards"].shape
        obs, next_obs = (tree_map(lambda x: x.flatten(0, 1), rollout[k]) for k in ("obs", "next_obs"))
        out, values = net(params, obs)
        return out.unflatten(0, shape), values.view(shape), net(params, next_obs, "value").view(shape)

    def samples(self, batch: Batch, rollout: Batch) -> Batch:
        """The rows that minibatches are drawn from: here transitions, [T, N, ...] -> [T * N, ...]."""
        return tree_map(lambda x: x.flatten(0, 1), batch)

    def evaluate(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(policy outputs, values) of a minibatch."""
        out, values = self.nets["policy"](params, batch["obs"])
        return out, values

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

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, weights = self.hp, batch["weights"]
        advantages = batch["advantages"]
        if hp.normalize_advantage:
            advantages = weighted_normalise(advantages, weights)
        clip = hp.clip_range(state.progress)
        ent_coef = hp.ent_coef(state.progress)

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out, values = self.evaluate(params, batch)
            log_ratio = self.dist.log_prob(out, batch["actions"]) - batch["log_probs"]
            ratio = torch.exp(log_ratio)
            clipped = torch.clamp(ratio, 1.0 - clip, 1.0 + clip)  # type: ignore[arg-type]  # floats or tensors
            policy = weighted_mean(-torch.minimum(advantages * ratio, advantages * clipped), weights)  # Eq. 7
            value = weighted_mean((values - batch["returns"]) ** 2, weights)
            entropy = weighted_mean(self.dist.entropy(out), weights)
            metrics = {
                "policy_loss": policy,
                "value_loss": value,
                "entropy": entropy,
                "approx_kl": weighted_mean(ratio - 1.0 - log_ratio, weights),
                "clip_fraction": weighted_mean(((ratio - 1.0).abs() > clip).to(torch.float32), weights),
                "value_mean": weighted_mean(values, weights),
            }
            return policy + hp.vf_coef * value - ent_coef * entropy, metrics  # Eq. 9

        total, metrics, grads = value_and_grad(loss, state.params["policy"])
        params, opt = self.adam.update(
            grads, state.opt["policy"], state.params["policy"], hp.learning_rate(state.progress)
        )
        state = state._replace(params={"policy": params}, opt={"policy": opt}, step=state.step + 1)
        return state, Aux({"loss": total, **metrics})

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        out = self.nets["policy"](state.params["policy"], self._normalised(state, obs), "policy")
        return carry, self.dist.sample(out, key) if explore else self.dist.mode(out), {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        values: Tensor = self.nets["policy"](state.params["policy"], self._normalised(state, obs), "value")
        return values


def _is_vector(spec: EnvSpec) -> bool:
    return isinstance(spec.observation, ArraySpec) and len(spec.observation.shape) == 1
