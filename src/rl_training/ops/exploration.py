"""Exploration: epsilon-greedy for discrete actions; for continuous ones, unit-variance noise with one of three
correlations over time.

An algorithm multiplies the noise by its own scale: a fixed standard deviation (DDPG, TD3, NAF, D4PG) or the one its
policy learned (SAC and its variants, MPO). The state of the process between two steps is a tree, the *carry*. The
runtime keeps one carry per environment and resets it to `init` when an episode ends.

gaussian  independent at every step
ou        Ornstein-Uhlenbeck (Lillicrap et al. 2016, section 7), x' = (1 - theta) x + sqrt(1 - (1 - theta)^2) n: scaled
          so that the stationary variance is 1. The paper's sigma 0.2 at theta 0.15 is a scale of 0.38 here.
gsde      state-dependent (Raffin et al. 2021, Eq. 5): a random linear function of the policy's last hidden layer,
          redrawn every episode or every few steps. The same state gives the same noise. Deviation from the paper: the
          features are scaled to length 1, so that the noise has variance 1 in every state. The policy keeps its own
          learned std in place of the paper's separate matrix, and the distribution used for learning is unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_training.ops import rng
from rl_training.ops.action_masks import forbid, random_allowed

Kind = Literal["gaussian", "ou", "gsde"]
Carry = Any


@dataclass(frozen=True)
class Exploration:
    """A noise process over `dim`-dimensional actions."""

    kind: Kind
    dim: int
    features: int = 0  # gsde: width of the features
    theta: float = 0.15  # ou: share of the noise that decays in one step
    period: int = -1  # gsde: steps between two draws; -1: once per episode

    def init(self, batch: int) -> Carry:
        """The carry at the start of an episode."""
        if self.kind == "ou":
            return {"noise": torch.zeros(batch, self.dim)}
        if self.kind == "gsde":
            return {"age": torch.zeros(batch, dtype=torch.int64), "matrix": torch.zeros(batch, self.features, self.dim)}
        return ()

    def noise(self, carry: Carry, key: Tensor, batch: int, features: Tensor | None = None) -> tuple[Carry, Tensor]:
        """(carry, noise [B, A])."""
        if self.kind == "gaussian":
            return carry, rng.normal(key, (batch, self.dim))
        if self.kind == "ou":
            keep = 1.0 - self.theta
            noise = keep * carry["noise"] + math.sqrt(1.0 - keep**2) * rng.normal(key, (batch, self.dim))
            return {"noise": noise}, noise
        if features is None:
            raise ValueError("state-dependent exploration (gsde) needs the policy's features; pass features=...")
        age = carry["age"]
        due = age == 0 if self.period < 1 else age % self.period == 0
        drawn = rng.normal(key, (batch, self.features, self.dim))
        matrix = torch.where(due.view(-1, 1, 1), drawn, carry["matrix"])
        direction = features / torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp(min=1e-8)
        return {"age": age + 1, "matrix": matrix}, (direction.unsqueeze(-2) @ matrix).squeeze(-2)


def epsilon_greedy(q: Tensor, epsilon: Tensor | float, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """Actions [B] for values [B, A]: the best one, or with probability epsilon a uniform one, of those allowed."""
    greedy = forbid(q, mask).argmax(-1)
    draw = rng.uniform(key, (2, greedy.shape[0]))
    random = (draw[1] * q.shape[-1]).to(torch.int64) if mask is None else random_allowed(draw[1], mask)
    return torch.where(draw[0] < epsilon, random, greedy)


def falling_epsilon(progress: Tensor, initial: float, final: float, fraction: float) -> Tensor:
    """Epsilon, which falls linearly over the first `fraction` of training and stays."""
    return initial + torch.clamp(progress / max(fraction, 1e-8), max=1.0) * (final - initial)
