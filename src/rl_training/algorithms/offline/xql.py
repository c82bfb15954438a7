"""Extreme Q-learning, XQL (Garg et al. 2023): IQL whose value is fitted by Gumbel regression, so that V is the soft
maximum of Q over the data's actions at a temperature, instead of an expectile.

As in the authors' code, the exponent is clipped at 7, where its gradient is 0, and the loss of a batch is divided by
the exponential of its largest exponent.

Deviations: those of IQL.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.offline.iql import IQL, IQLHyper


class XQLHyper(IQLHyper):
    temperature: float = Field(2.0, gt=0.0)
    """beta of the paper; with a smaller one V is closer to the maximum of Q."""
    max_exponent: float = Field(7.0, gt=0.0)
    """(Q - V) / temperature is clipped to this value."""


def gumbel_loss(difference: Tensor, temperature: float, max_exponent: float, weights: Tensor | None = None) -> Tensor:
    """exp(z) - z - 1 with z = difference / temperature, clipped (Eq. 9).

    With `weights` it is divided by exp(m), a constant for the gradient: m is the largest z of the rows with weight, at
    least -1.
    """
    z = (difference / temperature).clamp(max=max_exponent)
    if weights is None:
        return torch.exp(z) - z - 1.0
    largest = torch.where(weights > 0, z.detach(), -1.0).amax(-1, keepdim=True).clamp(min=-1.0)
    return torch.exp(z - largest) - (z + 1.0) * torch.exp(-largest)


class XQL(IQL[XQLHyper]):
    Hyper = XQLHyper
    name = "xql"

    def value_loss(self, difference: Tensor, weights: Tensor) -> Tensor:
        return gumbel_loss(difference, self.hp.temperature, self.hp.max_exponent, weights)
