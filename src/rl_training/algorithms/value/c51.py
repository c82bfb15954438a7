"""C51 (Bellemare et al. 2017): the distribution of the return as probabilities of fixed atoms. Rainbow (Hessel et al.
2018) is this class with every option of DQN switched on.

Priorities are the Kullback-Leibler divergences, as in Rainbow. Deviations: defaults for small tasks (Adam at 1e-3); the
support is [-10, 10] as in the paper, which suits clipped Atari rewards: set v_min and v_max to the range of returns.
"""

from __future__ import annotations

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Obs
from rl_training.algorithms.value.dqn import DQN, TD, DQNHyper, Params
from rl_training.algorithms.value.target_rules import take, under
from rl_training.data.storage import Batch
from rl_training.models.value import C51QNetwork
from rl_training.ops.categorical import log_softmax_and_softmax, project, support


class C51Hyper(DQNHyper):
    num_atoms: int = Field(51, ge=2)
    """Values that the distribution of the return is spread over."""
    v_min: float = -10.0
    """The lowest of them."""
    v_max: float = 10.0
    """The highest of them."""

    @model_validator(mode="after")
    def _ordered(self) -> C51Hyper:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min = {self.v_min:g} must be below v_max = {self.v_max:g}")
        return self


class C51DQN(DQN[C51Hyper]):
    Hyper = C51Hyper
    name = "c51_dqn"
    network_class = C51QNetwork
    sizes = ("num_atoms", "v_min", "v_max")

    def atoms(self) -> Tensor:
        n, low, high = (self.options[name] for name in self.sizes)
        return support(low, high, n, self.device)  # made on the spot: a constant of the graph, not another input

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Probabilities [B, A, N] and their means."""
        probs = log_softmax_and_softmax(self.nets["q"](params["q"], obs, self.noise(key)))[1]
        return probs, (probs * self.atoms()).sum(-1)

    def backup(self, returns: Tensor, policy: Tensor, rewards: Tensor, discounts: Tensor) -> Tensor:
        """Projection of the shifted distribution onto the atoms, Algorithm 1: [B, N]."""
        return project(under(returns, policy), rewards, discounts, self.atoms())

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        logits = take(self.nets["q"](params["q"], batch["obs"], self.noise(key)), batch["actions"])  # [B, N]
        log_probs, probs = log_softmax_and_softmax(logits)
        loss = -(target * log_probs).sum(-1)  # cross entropy
        divergence = loss + torch.special.xlogy(target, target).sum(-1)  # minus the entropy of the target
        atoms = self.atoms()
        q = (probs * atoms).sum(-1)
        # The projection clips, so the expectation is that of the projected distribution.
        return TD(loss, q, (target * atoms).sum(-1), divergence.clamp(min=0.0), {})
