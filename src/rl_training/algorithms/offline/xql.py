"""Extreme Q-learning, XQL (Garg et al. 2023): IQL whose value is fitted by Gumbel regression, so that V is the soft
maximum of Q over the data's actions at a temperature, instead of an expectile.

Deviations: none known. The exponent is clipped (7 in the authors' code), and its gradient there is 0.
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


def gumbel_loss(difference: Tensor, temperature: float, max_exponent: float) -> Tensor:
    """exp(z) - z - 1 with z = difference / temperature, clipped (Eq. 9)."""
    z = (difference / temperature).clamp(max=max_exponent)
    return torch.exp(z) - z - 1.0


class XQL(IQL[XQLHyper]):
    Hyper = XQLHyper
    name = "xql"

    def value_loss(self, difference: Tensor) -> Tensor:
        return gumbel_loss(difference, self.hp.temperature, self.hp.max_exponent)
