"""Proximal policy optimisation (Schulman et al. 2017), clipped objective, for discrete, multi-discrete, multi-binary
and continuous actions.

Details that its published scores depend on (Engstrom et al. 2020; Huang et al. 2022): orthogonal initialisation,
advantages normalised per minibatch, Adam eps 1e-5, gradient clipping, a state-independent log-std; actor and critic
share their layers on images and are separate on vectors (`shared_trunk`). Optional, as in OpenAI's code: value clipping
(`clip_range_vf`, the larger of both errors as in CleanRL; Stable-Baselines3 takes the clipped one alone) and an early
stop at a KL divergence (`target_kl`): the updates that are left are computed and discarded, so nothing waits for the
device.

Deviations: behaviour log-probabilities and values are recomputed in one batch when the rollout is complete (the
parameters have not changed, so they are the same numbers) instead of being stored step by step; observation statistics
are updated once for each rollout, after it was used.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Hyper, OnPolicyHyper, Positive, SharedTrunkFields, constant
from rl_training.algorithms.policy_gradient.base import PolicyGradient
from rl_training.data.storage import Batch
from rl_training.ops.distributions import Distribution
from rl_training.ops.losses import weighted_mean, weighted_normalise
from rl_training.ops.tree import tree_map


class PPOHyper(SharedTrunkFields, OnPolicyHyper):
    n_steps: int = Field(256, ge=1)
    """Steps of each environment in one rollout."""
    batch_size: int = Field(64, ge=1)
    """Transitions in one update; must divide n_steps x num_envs."""
    clip_range: Positive = constant(0.2)
    """How far the probability ratio may move before its gradient stops; a number or a schedule."""
    ent_coef: Positive = constant(0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    vf_coef: float = Field(0.5, ge=0.0)
    """Weight of the value loss, the mean squared error (as in Stable-Baselines3; CleanRL halves the error, so its 0.5
    is 0.25 here)."""
    clip_range_vf: Positive | None = None
    """How far a value may move from that of the rollout before its gradient stops; a number or a schedule; empty: any
    distance."""
    target_kl: float | None = Field(None, gt=0.0)
    """Skip the remaining updates on a rollout once the KL divergence exceeds 1.5 times this value; empty: never.
    """
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


def value_error(values: Tensor, batch: Batch, clip: Tensor | float | None) -> Tensor:
    """The squared error of each value. With `clip`, the larger of two errors: that of the value, and that of the value
    after it was moved by at most `clip` from the value of the rollout."""
    returns: Tensor = batch["returns"]
    error = (values - returns) ** 2
    if clip is None:
        return error
    old = returns - batch["advantages"]  # generalised advantages: returns = advantages + values
    moved = torch.clamp(values - old, -clip, clip)  # type: ignore[arg-type]  # floats or tensors
    return torch.maximum(error, (old + moved - returns) ** 2)


P = TypeVar("P", bound=PPOHyper)


class PPO(PolicyGradient[P]):
    Hyper: ClassVar[type[Hyper]] = PPOHyper
    name = "ppo"
    kind_defaults = {
        **PolicyGradient.kind_defaults,
        "images": {  # Schulman et al. 2017, table 5; Huang et al. 2022
            "n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4, "clip_range": 0.1,
            "ent_coef": 0.01,
        },
    }  # fmt: skip

    def rollout_extra(self) -> dict[str, Tensor]:
        """`stopped`: 1 once the policy has moved too far in this rollout."""
        return {} if self.hp.target_kl is None else {"stopped": torch.zeros((), device=self.device)}

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One update of policy and critic on a minibatch."""
        hp, weights, advantages = self.hp, batch["weights"], batch["advantages"]
        if hp.normalize_advantage:
            advantages = weighted_normalise(advantages, weights)
        clip, ent_coef = hp.clip_range(state.progress), hp.ent_coef(state.progress)
        clip_vf = None if hp.clip_range_vf is None else hp.clip_range_vf(state.progress)

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out, values = self.evaluate({"policy": params}, batch)
            policy = clipped_objective(self.dist, out, batch, advantages, clip)
            value = weighted_mean(value_error(values, batch, clip_vf), weights)
            metrics = {
                "policy_loss": policy.loss,
                "value_loss": value,
                "entropy": policy.entropy,
                "approx_kl": policy.kl,
                "clip_fraction": weighted_mean(((policy.ratio - 1.0).abs() > clip).to(torch.float32), weights),
                "value_mean": weighted_mean(values, weights),
            }
            return policy.loss + hp.vf_coef * value - ent_coef * policy.entropy, metrics  # Eq. 9

        new, total, metrics, grad_norm = self.descend_with_norm(state, "policy", loss)
        new = new._replace(step=state.step + 1)
        if hp.target_kl is not None:
            new = self.stop(state, new, metrics["approx_kl"] > 1.5 * hp.target_kl)
            metrics = {**metrics, "stopped": new.extra["stopped"]}
        return new, Aux({"loss": total, **metrics, "grad_norm": grad_norm})

    def stop(self, old: TrainState, new: TrainState, too_far: Tensor) -> TrainState:
        """The new state; without its changes if the policy is too far from that of the rollout, or was before. The step
        counts either way, because the order of minibatches depends on it."""
        stopped = torch.maximum(old.extra["stopped"], too_far.to(torch.float32))
        params, opt = tree_map(
            lambda before, after: torch.where(stopped > 0, before, after), (old.params, old.opt), (new.params, new.opt)
        )
        return new._replace(params=params, opt=opt, extra={**new.extra, "stopped": stopped})
