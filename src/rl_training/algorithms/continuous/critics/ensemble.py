"""Ensembles of critics with scalar values: all of them make the target (`twin`), or a random subset (`subset`, Chen et
al. 2021), also regularised by dropout and LayerNorm (`dropout`, Hiraoka et al. 2022)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.critics.base import Critic, CriticFields, CriticOptions, Extra, Owner, Report
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.control import EnsembleCritic
from rl_training.ops import rng


class TwinOptions(CriticOptions):
    kind: Literal["twin"] = "twin"
    num_critics: int | None = Field(None, ge=1)
    """Critics, whose smallest value is the target; none: as many as the algorithm has otherwise, which is two."""
    layer_norm: bool = False
    """LayerNorm in the critics."""
    norm_last: bool = False
    """LayerNorm after the activation, as in ReBRAC, instead of before it."""

    def network(self) -> dict[str, Any]:
        return {"layer_norm": self.layer_norm, "norm_last": self.norm_last} | (
            {"num_critics": self.num_critics} if self.num_critics else {}
        )

    def build(self, owner: Owner) -> Critic:
        return TwinCritic(owner)


class TwinCritic(Critic):
    """Clipped double Q-learning (Fujimoto et al. 2018), with any number of critics."""

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Report]:
        next_q = self.values(state.target["critic"], batch["next_obs"], next_action).amin(0)  # [E, B] -> [B]
        q = self.values(params, batch["obs"], batch["actions"])
        return self.squared_error(q, self.bootstrap(batch, next_q, bonus), {})

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        if self.owner.climbs == "smallest":
            return self.value(params, extra, obs, action)
        # Our own ensemble can leave out the other critics.
        only = {"members": slice(0, 1)} if isinstance(self.net.module, EnsembleCritic) else {}
        q: Tensor = self.net(params, obs, action, **only)
        return q[0]

    def value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor) -> Tensor:
        return self.values(params, obs, action).amin(0)


class SubsetFields(CriticFields):
    num_critics: int = Field(10, ge=1)
    """Critics in the ensemble (N)."""
    num_target_critics: int = Field(2, ge=1)
    """Critics drawn for each target, whose minimum is taken (M)."""
    layer_norm: bool = False
    """LayerNorm in the critics."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the critics' hidden units that are dropped, in targets as well as in losses."""


class SubsetKind(SubsetFields, CriticOptions):
    def network(self) -> dict[str, Any]:
        return {"num_critics": self.num_critics, "layer_norm": self.layer_norm, "dropout": self.dropout}

    def build(self, owner: Owner) -> Critic:
        return SubsetCritic(owner, self)


class SubsetOptions(SubsetKind):
    kind: Literal["subset"] = "subset"


class DropoutOptions(SubsetKind):
    kind: Literal["dropout"] = "dropout"
    num_critics: int = Field(2, ge=1)
    layer_norm: bool = True
    dropout: float = Field(0.01, ge=0.0, lt=1.0)


class SubsetCritic(Critic):
    """The minimum over a random subset makes the target; the policy climbs the mean of all critics."""

    draws = True

    def __init__(self, owner: Owner, options: SubsetFields) -> None:
        super().__init__(owner)
        self.options = options
        module = self.net.module  # a model that the user built decides the number of critics
        self.members = module.members if isinstance(module, EnsembleCritic) else options.num_critics
        if options.num_target_critics > self.members:
            raise UserError(
                f"{owner.algorithm.name}: num_target_critics = {options.num_target_critics} cannot be drawn from an"
                f" ensemble of {self.members}; raise num_critics"
            )

    def subset(self, key: Tensor) -> Tensor:
        """M different critics: [M]."""
        return rng.permutation(key, self.members)[: self.options.num_target_critics]

    def dropout_key(self, key: Tensor, stream: int) -> Tensor | None:
        return rng.fold(key, stream) if self.options.dropout else None

    def next_q(self, params: Tensor, next_obs: Obs, next_action: Tensor, key: Tensor) -> Tensor:
        """Minimum over the drawn critics (REDQ, Algorithm 1, line 6); the others are not evaluated."""
        drawn = self.subset(rng.fold(key, 0)) if self.options.num_target_critics < self.members else None
        q: Tensor = self.net(params, next_obs, next_action, self.dropout_key(key, 1), drawn)
        return q.amin(0)

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Report]:
        next_q = self.next_q(state.target["critic"], batch["next_obs"], next_action, rng.fold(key, 0))
        q = self.net(params, batch["obs"], batch["actions"], self.dropout_key(key, 1))  # [E, B]
        return self.squared_error(q, self.bootstrap(batch, next_q, bonus), {})

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        """Mean of all critics (REDQ, Algorithm 1, line 10)."""
        return torch.mean(self.net(params, obs, action, key), 0)
