"""Proximal policy optimisation (Schulman et al. 2017), clipped objective, for discrete, multi-discrete, multi-binary
and continuous actions.

Details that its published scores depend on (Engstrom et al. 2020; Huang et al. 2022): orthogonal initialisation,
advantages normalised per minibatch, separate actor and critic, Adam eps 1e-5, gradient clipping, a state-independent
log-std. Deviations: behaviour log-probabilities and values are recomputed in one batch when the rollout is complete
(the parameters have not changed, so they are the same numbers) instead of being stored step by step; observation
statistics are updated once for each rollout, after it was used.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import OnPolicyHyper, Positive, constant
from rl_training.algorithms.policy_gradient.base import PolicyGradient
from rl_training.data.storage import Batch
from rl_training.ops.distributions import Distribution
from rl_training.ops.losses import weighted_mean, weighted_normalise


class PPOHyper(OnPolicyHyper):
    clip_range: Positive = constant(0.2)
    """How far the probability ratio may move before its gradient stops; a number or a schedule."""
    ent_coef: Positive = constant(0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss."""
    normalize_advantage: bool = True
    """Standardise the advantages of each minibatch."""


class Clipped(NamedTuple):
    """The clipped objective of a minibatch."""

    loss: Tensor  # the mean of Eq. 7, negated
    entropy: Tensor
    kl: Tensor  # an estimate of how far the policy has moved
    ratio: Tensor  # [B]


def clipped_objective(
    dist: Distribution, out: Tensor, batch: Batch, advantages: Tensor, clip: Tensor | float
) -> Clipped:
    weights, mask = batch["weights"], batch.get("mask")
    log_ratio = dist.log_prob(out, batch["actions"], mask) - batch["log_probs"]
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1.0 - clip, 1.0 + clip)  # type: ignore[arg-type]  # floats or tensors
    loss = weighted_mean(-torch.minimum(advantages * ratio, advantages * clipped), weights)  # Eq. 7
    entropy = weighted_mean(dist.entropy(out, mask), weights)
    return Clipped(loss, entropy, weighted_mean(ratio - 1.0 - log_ratio, weights), ratio)


P = TypeVar("P", bound=PPOHyper)


def ppo_step(algorithm: PolicyGradient[P], state: TrainState, batch: Batch) -> tuple[TrainState, Aux]:
    """One update of policy and critic on a minibatch."""
    hp, weights, advantages = algorithm.hp, batch["weights"], batch["advantages"]
    if hp.normalize_advantage:
        advantages = weighted_normalise(advantages, weights)
    clip, ent_coef = hp.clip_range(state.progress), hp.ent_coef(state.progress)

    def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out, values = algorithm.evaluate({"policy": params}, batch)
        policy = clipped_objective(algorithm.dist, out, batch, advantages, clip)
        value = weighted_mean((values - batch["returns"]) ** 2, weights)
        metrics = {
            "policy_loss": policy.loss,
            "value_loss": value,
            "entropy": policy.entropy,
            "approx_kl": policy.kl,
            "clip_fraction": weighted_mean(((policy.ratio - 1.0).abs() > clip).to(torch.float32), weights),
            "value_mean": weighted_mean(values, weights),
        }
        return policy.loss + hp.vf_coef * value - ent_coef * policy.entropy, metrics  # Eq. 9

    state, total, metrics = algorithm.descend(state, "policy", loss)
    return state, Aux({"loss": total, **metrics})


class PPO(PolicyGradient[PPOHyper]):
    Hyper = PPOHyper
    name = "ppo"

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        return ppo_step(self, state, batch)
