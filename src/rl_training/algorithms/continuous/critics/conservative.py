"""Critics that are pushed down where the policy goes and up on the data: CQL(H) (Kumar et al. 2020), the floor of
Cal-QL (Nakamoto et al. 2023), and the batches of COMBO (Yu et al. 2021).

The soft maximum over actions, log of the integral of exp Q, is estimated with uniform actions and actions near the
policy's at s and at s', each weighted by its density (CQL, appendix F).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.continuous.critics.base import Critic, CriticFields, CriticReport, Owner
from rl_training.algorithms.continuous.critics.wrapper import Wrapper, WrapperOptions
from rl_training.data.storage import Batch
from rl_training.ops import rng
from rl_training.ops.tree import tree_map


class ConservativeFields(CriticFields):
    cql_alpha: float = Field(10.0, ge=0.0)
    """Weight of the conservative term."""
    num_actions: int = Field(10, ge=1)
    """Actions of each kind in the estimate of the soft maximum."""
    backup_entropy: bool = False
    """Keep SAC's entropy bonus in the target."""


class ConservativeOptions(ConservativeFields, WrapperOptions):
    kind: Literal["conservative"] = "conservative"

    def build(self, owner: Owner) -> Critic:
        return ConservativeCritic(self.base.build(owner), self)


class CalibratedOptions(ConservativeOptions):
    """Cal-QL's critics. They read the data's returns, which only a dataset has, so they are not a kind to choose."""

    def build(self, owner: Owner) -> Critic:
        return ConservativeCritic(self.base.build(owner), self, calibrated=True)


class ConservativeCritic(Wrapper):
    """`calibrated`: values of the policy's actions are not pushed below the return that the data reached."""

    draws = True

    def __init__(self, base: Critic, options: ConservativeFields, calibrated: bool = False) -> None:
        super().__init__(base)
        self.options, self.calibrated, self.draws = options, calibrated, True

    def soft_maximum(self, params: Tensor, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """log of the integral of exp Q(s, a) over the actions, by importance sampling: [E, B]."""
        count, dim, propose = self.options.num_actions, self.owner.spec.action.dim, self.owner.propose
        here, log_here = propose(state, batch["obs"], rng.fold(key, 0), count)
        there, log_there = propose(state, batch["next_obs"], rng.fold(key, 1), count)
        uniform = 2.0 * rng.uniform(rng.fold(key, 2), tuple(here.shape)) - 1.0
        actions = torch.cat([here, there, uniform])  # [3N, B, A]
        density = torch.cat([log_here, log_there, torch.full_like(log_here, -dim * math.log(2.0))])  # [3N, B]
        rows = len(actions)
        obs = tree_map(lambda x: x.unsqueeze(0).expand(rows, *x.shape).flatten(0, 1), batch["obs"])
        q = self.values(params, obs, actions.flatten(0, 1)).view(-1, rows, here.shape[1])  # [E, 3N, B]
        if self.calibrated:
            q = torch.cat([torch.maximum(q[:, : 2 * count], batch["returns"]), q[:, 2 * count :]], 1)
        return torch.logsumexp(q - density.detach(), 1) - math.log(rows)

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, CriticReport]:
        bonus = bonus if self.options.backup_entropy else None
        loss, report = self.base.loss(params, state, batch, next_action, bonus, key)
        soft = self.soft_maximum(params, state, batch, rng.fold(key, 2))  # [E, B]
        policy, data = soft.sum(0), len(soft) * report.q  # sums over the critics: [B]
        if "real" in batch:  # COMBO: down where the model goes, up on the data; each the mean of its own rows
            real = batch["real"].to(data.dtype)
            policy, data = policy * (1.0 - real) / (1.0 - real).mean(), data * real / real.mean()
        return loss + self.options.cql_alpha * (policy - data), report  # Eq. 4
