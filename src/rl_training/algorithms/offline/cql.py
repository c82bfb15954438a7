"""Conservative Q-learning, CQL(H) (Kumar et al. 2020), and Cal-QL (Nakamoto et al. 2023): SAC on a dataset whose
critics are pushed down where the policy goes and up on the data.

The soft maximum over actions, log of the integral of exp Q, is estimated with uniform actions and actions of the policy
at s and at s', each weighted by its density (appendix F). Cal-QL: the values of policy actions are not pushed below the
return that the data reached from that state.
Deviations: the penalty's weight is fixed, not tuned by a Lagrange multiplier; the estimate is divided by the number of
samples, so that it is the integral itself (a constant in the loss). `cal_ql_online` goes on in the environment; the
returns of its own episodes are a floor once they have ended.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.sac import SAC, CriticReport, SACFields
from rl_training.algorithms.hyper import Hyper, OfflineHyper, Positive, Widths, constant
from rl_training.algorithms.prior_data import FineTuneFields
from rl_training.data.storage import Batch
from rl_training.ops import rng


class CQLFields(SACFields):
    """The conservative critics."""

    actor_learning_rate: Positive = constant(3e-5)
    """Step size of policy and temperature; a number or a schedule."""
    cql_alpha: float = Field(10.0, ge=0.0)
    """Weight of the conservative term."""
    num_actions: int = Field(10, ge=1)
    """Actions of each kind in the estimate of the soft maximum."""
    backup_entropy: bool = False
    """Keep SAC's entropy bonus in the target."""


class CQLHyper(CQLFields, OfflineHyper):
    """On a dataset alone."""

    hidden_sizes: Widths = (256, 256, 256)
    """Widths of the hidden layers of actor and critics."""


class CalQLOnlineHyper(CQLFields, FineTuneFields):
    """On a dataset and in the environment."""

    hidden_sizes: Widths = (256, 256, 256)
    """Widths of the hidden layers of actor and critics."""


class CQL(SAC):
    Hyper: ClassVar[type[Hyper]] = CQLHyper
    name = "cql"
    if TYPE_CHECKING:
        hp: CQLFields

    @property
    def members(self) -> int:
        return int(self.nets["critic"].module.members)  # type: ignore[arg-type]

    def actor_rate(self, state: TrainState, rate: Tensor | float) -> Tensor | float:
        return self.hp.actor_learning_rate(state.progress)

    def proposals(self, actor: Tensor, obs: Obs, key: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of the policy and their log-densities: [N, B, A], [N, B]."""
        out = self.nets["actor"](actor, obs)
        out = out.expand(self.hp.num_actions, *out.shape)
        return self.dist.sample_and_log_prob(out, key)

    def floor(self, q: Tensor, batch: Batch) -> Tensor:
        """Values of the policy's actions [E, N, B] as the penalty takes them."""
        return q

    def soft_maximum(self, params: Tensor, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """log of the integral of exp Q(s, a) over the actions, by importance sampling: [E, B]."""
        count, dim, obs = self.hp.num_actions, self.spec.action.dim, batch["obs"]
        here, log_here = self.proposals(state.params["actor"], obs, rng.fold(key, 0))
        there, log_there = self.proposals(state.params["actor"], batch["next_obs"], rng.fold(key, 1))
        uniform = 2.0 * rng.uniform(rng.fold(key, 2), tuple(here.shape)) - 1.0
        actions = torch.cat([here, there, uniform])  # [3N, B, A]
        density = torch.cat([log_here, log_there, torch.full_like(log_here, -dim * math.log(2.0))])  # [3N, B]
        rows = len(actions)
        repeated = obs.unsqueeze(0).expand(rows, *obs.shape).flatten(0, 1)
        q = self.q_values(params, repeated, actions.flatten(0, 1), None).view(self.members, rows, -1)  # [E, 3N, B]
        q = torch.cat([self.floor(q[:, : 2 * count], batch), q[:, 2 * count :]], 1)
        return torch.logsumexp(q - density.detach(), 1) - math.log(rows)

    def critic_loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor, key: Tensor
    ) -> tuple[Tensor, CriticReport]:
        if not self.hp.backup_entropy:
            bonus = torch.zeros_like(bonus)
        loss, report = super().critic_loss(params, state, batch, next_action, bonus, key)
        gap = self.soft_maximum(params, state, batch, rng.fold(key, 2)).sum(0)  # of all critics: [B]
        data = self.members * report.q  # the sum over the critics
        if "real" in batch:  # COMBO: down where the model goes, up on the data; each the mean of its own rows
            real = batch["real"].to(data.dtype)
            gap, data = gap * (1.0 - real) / (1.0 - real).mean(), data * real / real.mean()
        return loss + self.hp.cql_alpha * (gap - data), report  # Eq. 4


class CalQL(CQL):
    name = "cal_ql"
    dataset_columns = ("returns",)

    def floor(self, q: Tensor, batch: Batch) -> Tensor:
        return torch.maximum(q, batch["returns"])


class CalQLOnline(CalQL):
    Hyper = CalQLOnlineHyper
    name = "cal_ql_online"
