"""Searches over sequences of actions in [-1, 1], with a fixed number of iterations: plain tensor code.

CEM (Rubinstein 1999; Chua et al. 2018, section 5.2): sample plans, keep the best, move mean and std towards them.
iCEM (Pinneri et al. 2020) adds time-correlated noise, keeps some elites from one iteration to the next, and includes
the mean itself in the plans of the last iteration. MPPI weighs its elites by their scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rl_training.ops import rng

Score = Callable[[Tensor, Tensor], Tensor]  # (plans [B, N, H, A], key) -> returns [B, N]


def noise_colouring_matrix(horizon: int, beta: float) -> Tensor:
    """The matrix [H, H] that turns white noise over time into unit-variance noise with power spectrum 1 / f^beta."""
    basis, time = [], torch.arange(horizon, dtype=torch.float64)
    for k in range(horizon // 2 + 1):
        scale = max(k, 1) ** (-0.5 * beta)
        basis.append(scale * torch.cos(2.0 * math.pi * k * time / horizon))
        if 0 < k < horizon / 2:
            basis.append(scale * torch.sin(2.0 * math.pi * k * time / horizon))
    matrix = torch.stack(basis)  # [H, H]: one row per frequency and phase
    return (matrix / matrix.square().sum(0).sqrt()).to(torch.float32)


@dataclass(frozen=True)
class CEM:
    """A planner and its settings."""

    horizon: int
    actions: int  # dimensions of one action
    population: int = 200
    elites: int = 20
    iterations: int = 5
    momentum: float = 0.1  # weight of the old mean and std in each update
    deviation: float = 0.5  # std of the first iteration
    keep: float = 0.0  # share of the elites added to the next iteration's plans (iCEM: 0.3)

    def plan(self, score: Score, mean: Tensor, key: Tensor, colour: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Improve a first guess [B, H, A]: (mean of the last elites [B, H, A], their mean score [B])."""
        batch, count = mean.shape[0], self.population
        deviation = torch.full_like(mean, self.deviation)
        kept = round(self.keep * self.elites)
        survivors: Tensor | None = None
        value = mean.new_zeros(batch)
        for i in range(self.iterations):
            noise = rng.normal(rng.fold(key, 2 * i), (batch, count, self.actions, self.horizon))
            if colour is not None:
                noise = noise @ colour
            plans = mean.unsqueeze(1) + deviation.unsqueeze(1) * noise.transpose(-1, -2)
            extra = [] if survivors is None or not kept else [survivors[:, :kept]]
            if self.keep and i == self.iterations - 1:
                extra.append(mean.unsqueeze(1))
            plans = torch.cat([*extra, plans], 1).clamp(-1.0, 1.0)
            returns = score(plans, rng.fold(key, 2 * i + 1))  # [B, N]
            best = torch.topk(returns, self.elites, dim=-1)
            chosen = best.indices.view(batch, -1, 1, 1).expand(-1, -1, self.horizon, self.actions)
            survivors = plans.gather(1, chosen)  # [B, elites, H, A], best first
            new_mean, new_deviation = survivors.mean(1), survivors.std(1, correction=0)
            mean = self.momentum * mean + (1.0 - self.momentum) * new_mean
            deviation = self.momentum * deviation + (1.0 - self.momentum) * new_deviation
            value = best.values.mean(-1)
        return mean, value


def shift_plan(plan: Tensor) -> Tensor:
    """Move a plan [B, H, A] one step ahead in time; the last action is repeated."""
    return torch.cat([plan[:, 1:], plan[:, -1:]], 1)


class Elites(NamedTuple):
    """The best plans of an iteration of MPPI, and the Gaussian fitted to them."""

    plans: Tensor  # [B, K, H, A]
    weights: Tensor  # [B, K]; they sum to 1
    mean: Tensor  # [B, H, A]
    std: Tensor  # [B, H, A]


@dataclass(frozen=True)
class MPPI:
    """Model-predictive path integral control with elites (Williams et al. 2015; TD-MPC, Hansen et al. 2022, Eq. 4): the
    better an elite scores, the more it weighs in the next iteration's mean and std."""

    horizon: int
    actions: int  # dimensions of one action
    population: int = 512
    elites: int = 64
    iterations: int = 6
    min_std: float = 0.05
    max_std: float = 2.0  # also the std of the first iteration
    temperature: float = 0.5  # weights are softmax(temperature x score)

    def fit(self, plans: Tensor, scores: Tensor) -> Elites:
        """The elites of plans [B, N, H, A] with scores [B, N]."""
        best = torch.topk(scores, self.elites, dim=-1)
        chosen = best.indices.view(-1, self.elites, 1, 1).expand(-1, -1, self.horizon, self.actions)
        plans = plans.gather(1, chosen)
        weights = (self.temperature * best.values).softmax(-1)
        share = weights.view(-1, self.elites, 1, 1)
        mean = (share * plans).sum(1)
        std = (share * (plans - mean.unsqueeze(1)).square()).sum(1).sqrt()
        return Elites(plans, weights, mean, std.clamp(self.min_std, self.max_std))

    def plan(self, score: Score, mean: Tensor, given: Tensor, key: Tensor) -> Elites:
        """Improve a first guess [B, H, A]. The plans `given` [B, P, H, A] take part in every iteration."""
        std = torch.full_like(mean, self.max_std)
        drawn = (mean.shape[0], self.population - given.shape[1], self.horizon, self.actions)
        for i in range(self.iterations):
            noise = rng.normal(rng.fold(key, 2 * i), drawn)
            plans = torch.cat([given, (mean.unsqueeze(1) + std.unsqueeze(1) * noise).clamp(-1.0, 1.0)], 1)
            found = self.fit(plans, score(plans, rng.fold(key, 2 * i + 1)))
            mean, std = found.mean, found.std
        return found

    def sample(self, found: Elites, key: Tensor) -> Tensor:
        """The first action of an elite drawn by its weight, with noise of the fitted std: [B, A]."""
        weights, std = found.weights, found.std[:, 0]
        number = (weights.log() + rng.gumbel(rng.fold(key, 0), tuple(weights.shape))).argmax(-1)
        action = found.plans[:, :, 0].gather(1, number.view(-1, 1, 1).expand(-1, 1, self.actions)).squeeze(1)
        return (action + std * rng.normal(rng.fold(key, 1), tuple(std.shape))).clamp(-1.0, 1.0)
