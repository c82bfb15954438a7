"""Critics that add a penalty to the loss of another kind of critic.

`conservative`: values are pushed down where the policy goes and up on the data: CQL(H) (Kumar et al. 2020), the floor
of Cal-QL (Nakamoto et al. 2023), and the batches of COMBO (Yu et al. 2021). The soft maximum over actions, log of the
integral of exp Q, is estimated with uniform actions and actions near the policy's at s and at s', each weighted by its
density (CQL, appendix F).
`diverse`: the critics' gradients with respect to the action are kept apart (EDAC, An et al. 2021), so that the minimum
of fewer of them is pessimistic enough.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.critics.base import (
    Critic,
    CriticFields,
    CriticOptions,
    Extra,
    Owner,
    Report,
    one_of,
)
from rl_training.algorithms.continuous.critics.ensemble import DropoutOptions, SubsetOptions, TwinOptions
from rl_training.algorithms.continuous.critics.quantile import QuantileOptions
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

BaseKinds = TwinOptions | SubsetOptions | DropoutOptions | QuantileOptions
BaseCritic = Annotated[BaseKinds, Field(discriminator="kind"), one_of(BaseKinds)]


class PenalisedOptions(CriticOptions):
    can_share: ClassVar[bool] = False
    base: BaseCritic = TwinOptions()
    """The critics that the penalty is added to: twin, subset, dropout or quantile, with their own options."""

    def network(self) -> dict[str, Any]:
        return self.base.network()

    def build_base(self, owner: Owner) -> Critic:
        """The critics without the penalty. Their squared errors count fully, without SAC's 1/2, so that the penalty's
        weight means the same as in CORL and in TD3."""
        return self.base.build(owner._replace(error_weight=1.0))


class PenalisedCritic(Critic):
    """All but `loss` is the wrapped critic's."""

    def __init__(self, base: Critic) -> None:
        super().__init__(base.owner)
        self.base, self.draws = base, base.draws

    def values(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        return self.base.values(params, obs, actions)

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        return self.base.policy_value(params, extra, obs, action, key)

    def value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor) -> Tensor:
        return self.base.value(params, extra, obs, action)


class ConservativeFields(CriticFields):
    cql_alpha: float = Field(10.0, ge=0.0)
    """Weight of the conservative term."""
    num_actions: int = Field(10, ge=1)
    """Actions of each kind in the estimate of the soft maximum."""
    backup_entropy: bool = False
    """Keep SAC's entropy bonus in the target."""


class ConservativeOptions(ConservativeFields, PenalisedOptions):
    kind: Literal["conservative"] = "conservative"

    def build(self, owner: Owner) -> Critic:
        return ConservativeCritic(self.build_base(owner), self)


class CalibratedOptions(ConservativeOptions):
    """Cal-QL's critics. They read the data's returns, which only a dataset has, so they are not a kind to choose."""

    def build(self, owner: Owner) -> Critic:
        return ConservativeCritic(self.build_base(owner), self, calibrated=True)


class ConservativeCritic(PenalisedCritic):
    """`calibrated`: values of the policy's actions are not pushed below the return that the data reached."""

    def __init__(self, base: Critic, options: ConservativeFields, calibrated: bool = False) -> None:
        super().__init__(base)
        self.options, self.calibrated, self.draws = options, calibrated, True

    def soft_maximum(self, params: Tensor, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """log of the integral of exp Q(s, a) over the actions, by importance sampling: [E, B]."""
        count, dim, propose = self.options.num_actions, self.owner.algorithm.spec.action.dim, self.owner.propose
        assert propose is not None
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
    ) -> tuple[Tensor, Report]:
        bonus = bonus if self.options.backup_entropy else None
        loss, report = self.base.loss(params, state, batch, next_action, bonus, key)
        soft = self.soft_maximum(params, state, batch, rng.fold(key, 2))  # [E, B]
        policy, data = soft.sum(0), len(soft) * report.q  # sums over the critics: [B]
        if "real" in batch:  # COMBO: down where the model goes, up on the data; each the mean of its own rows
            real = batch["real"].to(data.dtype)
            policy, data = policy * (1.0 - real) / (1.0 - real).mean(), data * real / real.mean()
        return loss + self.options.cql_alpha * (policy - data), report  # Eq. 4


class DiverseFields(CriticFields):
    eta: float = Field(1.0, ge=0.0)
    """Weight of the diversity of the critics' gradients."""


class DiverseOptions(DiverseFields, PenalisedOptions):
    kind: Literal["diverse"] = "diverse"
    base: BaseCritic = TwinOptions(num_critics=10)
    """The critics that are kept apart: twin, subset, dropout or quantile, with their own options."""

    def build(self, owner: Owner) -> Critic:
        name, spec = owner.algorithm.name, owner.algorithm.spec
        seen = spec.observation
        if isinstance(seen, dict) or len(seen.shape) != 1:
            raise UserError(
                f"{name}: diverse critics need vector observations, one copy for each critic; {spec.env_id} has {seen}"
            )
        base = self.build_base(owner) if self.eta else self.base.build(owner)  # without the term, it is SAC itself
        members = int(base.net.module.members)  # type: ignore[arg-type]
        if members < 2:
            raise UserError(f"{name}: diverse critics need at least two critics to keep apart; raise num_critics")
        return DiverseCritic(base, self.eta, members) if self.eta else base


def gradient_similarity(gradients: Tensor) -> Tensor:
    """Sum over pairs i != j of the cosine of two critics' gradients, over N - 1: [E, B, A] -> [B] (Eq. 8)."""
    members = gradients.shape[0]
    unit = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    # Over all ordered pairs: |sum of the unit vectors|^2 - sum of their squared lengths.
    pairs: Tensor = unit.sum(0).square().sum(-1) - unit.square().sum((0, -1))
    return pairs / (members - 1)


class DiverseCritic(PenalisedCritic):
    def __init__(self, base: Critic, eta: float, members: int) -> None:
        super().__init__(base)
        self.eta, self.members = eta, members

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Report]:
        loss, report = self.base.loss(params, state, batch, next_action, bonus, key)
        obs, actions = batch["obs"], batch["actions"]
        obs = obs.expand(self.members, *obs.shape)  # [E, B, D]

        def total(actions: Tensor) -> Tensor:
            return self.values(params, obs, actions).sum()

        gradients = torch.func.grad(total)(actions.expand(self.members, *actions.shape))  # [E, B, A]
        return loss + self.eta * gradient_similarity(gradients), report
