"""What the algorithms with a discriminator share: settings, the cross-entropy with an absorbing state, and the gradient
penalty. gail.py explains absorbing states."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.hyper import Hyper, Positive, Widths, constant
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean

_ORDER, _ENDED, _SHARE = 71, 72, 73  # random streams

Inputs = tuple[Tensor, ...]  # of the network: one row for each transition and one for the absorbing state, [B + 1, ...]


class DiscriminatorFields(Hyper):
    discriminator_hidden_sizes: Widths = (64, 64)
    """Widths of the discriminator's hidden layers."""
    discriminator_learning_rate: Positive = constant(3e-4)
    """Step size of the discriminator's optimiser; a number or a schedule."""
    gradient_penalty: float = Field(0.0, ge=0.0)
    """Weight of the penalty that draws the discriminator's gradient towards length 1 (WGAN-GP; 10 in DAC); 0: off."""
    absorbing_states: bool = True
    """Episodes that terminate go on in an absorbing state. Without it the reward pays for surviving."""

    @model_validator(mode="after")
    def _discounted(self) -> DiscriminatorFields:
        if self.absorbing_states and self.gamma >= 1.0:
            raise ValueError("gamma must be below 1: an absorbing state is never left, so its return would be infinite")
        return self

    @property
    def absorbing_steps(self) -> float:
        """Discounted steps that a terminated episode spends in the absorbing state."""
        return self.gamma / (1.0 - self.gamma) if self.absorbing_states else 0.0


def with_absorbing(obs: Tensor, actions: Tensor) -> Inputs:
    """Observations and encoded actions with one more row for the absorbing state, and the flag that marks it."""
    flag = torch.cat([obs.new_zeros(obs.shape[0]), obs.new_ones(1)])
    return F.pad(obs, (0, 0, 0, 1)), F.pad(actions, (0, 0, 0, 1)), flag


def cross_entropy(logits: Tensor, absorbing: Tensor, labels: Tensor, mass: Tensor) -> Tensor:
    """-y log D - (1 - y) log(1 - D) of each row [B], with `mass` [B] absorbing steps for each real one."""
    error = F.softplus(logits) - labels * logits
    return (error + mass * (F.softplus(absorbing) - labels * absorbing)) / (1.0 + mass)


def gradient_penalty(
    network: Callable[..., Tensor], inputs: Inputs, labels: Tensor, weights: Tensor, mass: Tensor, key: Tensor
) -> Tensor:
    """Mean of (|gradient of the logit| - 1)^2 at random points between rows of the policy and of the expert (Gulrajani
    et al. 2017, Eq. 3). As many rows as belong to the absorbing state, m / (1 + m), are replaced by it.

    The policy's rows, in random order, are paired with the expert's, if half of the batch are the expert's. A pair with
    a row of weight 0 is ignored.
    """
    rows = labels.shape[0]
    half = rows // 2
    order = torch.argsort((labels > 0.5).to(torch.float32) + rng.uniform(rng.fold(key, _ORDER), (rows,)))
    own, expert = order[:half], order[half : 2 * half]
    ended = rng.uniform(rng.fold(key, _ENDED), (rows,)) < mass / (1.0 + mass)
    share = rng.uniform(rng.fold(key, _SHARE), (rows,))[own]

    def between(x: Tensor) -> Tensor:
        column = (-1, *[1] * (x.ndim - 1))
        x = torch.where(ended.view(column), x[-1:], x[:-1])
        return torch.lerp(x[own], x[expert], share.view(column))

    def total(*points: Tensor) -> Tensor:
        return network(*points).sum()

    points = tuple(between(x) for x in inputs)
    gradients = torch.func.grad(total, argnums=tuple(range(len(points))))(*points)
    squared = torch.stack([g.square().flatten(1).sum(1) if g.ndim > 1 else g.square() for g in gradients]).sum(0)
    return weighted_mean(((squared + 1e-12).sqrt() - 1.0).square(), weights[own] * weights[expert])


def penalised(
    loss: Tensor, weight: float, network: Callable[..., Tensor], inputs: Inputs, labels: Tensor, weights: Tensor,
    mass: Tensor, key: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """(the loss with the gradient penalty, its metric), if it has a weight. The loss is the mean over both sides, which
    is half of the sum that published weights refer to."""
    if not weight:
        return loss, {}
    penalty = gradient_penalty(network, inputs, labels, weights, mass, key)
    return loss + 0.5 * weight * penalty, {"gradient_penalty": penalty}
