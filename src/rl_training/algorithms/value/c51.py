"""C51 (Bellemare et al. 2017): the distribution of the return as probabilities of fixed atoms. Rainbow (Hessel et al.
2018) is this class with every option of DQN switched on.

Priorities are the Kullback-Leibler divergences, as in Rainbow. By default the support is found in training
(algorithms/support.py); the presets for Atari state the paper's [-10, 10], which suits clipped rewards.

Deviations: defaults for small tasks (Adam at 1e-3).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.support import Support, SupportFields
from rl_training.algorithms.value.dqn import DQN, TD, DQNHyper, Params
from rl_training.algorithms.value.target_rules import take, under
from rl_training.data.storage import Batch
from rl_training.models.value import C51QNetwork
from rl_training.ops.categorical import log_softmax_and_softmax, project


class C51Hyper(SupportFields, DQNHyper):
    """Settings of C51."""


class C51DQN(DQN[C51Hyper]):
    Hyper = C51Hyper
    name = "c51_dqn"
    network_class: ClassVar[type[nn.Module]] = C51QNetwork
    sizes = ("num_atoms", "v_min", "v_max")

    def setup(self) -> None:
        super().setup()
        number, low, high = (self.options[name] for name in self.sizes)
        self.support = Support(number, low, high, self.hp.gamma**self.hp.n_step, self.device)

    def init_extra(self) -> dict[str, Any]:
        return {**super().init_extra(), **self.support.init_extra()}

    def reads(self, state: TrainState) -> Params:
        bounds = self.support.bounds(state.extra)
        return state.params if bounds is None else {**state.params, "support": bounds}

    def atoms(self, params: Params | None = None) -> Tensor:
        return self.support.atoms(params.get("support") if params else None)

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Probabilities [B, A, N] and their means."""
        probs = log_softmax_and_softmax(self.outputs(params, obs, key))[1]
        return probs, (probs * self.atoms(params)).sum(-1)

    def backup(self, params: Params, returns: Tensor, policy: Tensor, rewards: Tensor, discounts: Tensor) -> Tensor:
        """Projection of the shifted distribution onto the atoms, Algorithm 1: [B, N]."""
        return project(under(returns, policy), rewards, discounts, self.atoms(params))

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        return self.cross_entropy(params, self.outputs(params, batch["obs"], key), target, expected, batch)

    def cross_entropy(self, params: Params, logits: Tensor, target: Tensor, expected: Tensor, batch: Batch) -> TD:
        """The loss of logits [B, A, N] against target probabilities [B, N]."""
        logits = take(logits, batch["actions"])  # [B, N]
        log_probs, probs = log_softmax_and_softmax(logits)
        loss = -(target * log_probs).sum(-1)  # cross entropy
        divergence = loss + torch.special.xlogy(target, target).sum(-1)  # minus the entropy of the target
        atoms = self.atoms(params)
        q, projected = (probs * atoms).sum(-1), (target * atoms).sum(-1)
        # The projection clips, so the expectation is that of the projected distribution.
        return TD(loss, q, projected, divergence.clamp(min=0.0), {"clip": projected - expected})

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        state, metrics, td = self.q_step(self.support.hold_rewards(state, batch), batch, key)
        state, clipped = self.support.widen(state, td.parts["clip"], batch["weights"])
        return state, Aux({**metrics, "target_clipped": clipped}, td.priority)

    def advice(self, metrics: dict[str, float]) -> str | None:
        return self.support.warning(self.name, metrics.get("train/target_clipped", 0.0))
