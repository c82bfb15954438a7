"""Quantile critics whose largest atoms are left out of the target (Kuznetsov et al. 2020)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.critics.base import Critic, CriticFields, CriticOptions, Extra, Owner, Report
from rl_training.data.storage import Batch
from rl_training.ops.quantiles import quantile_huber, quantile_midpoints


class QuantileFields(CriticFields):
    num_critics: int = Field(2, ge=1)
    """Critics in the ensemble (N)."""
    num_quantiles: int = Field(25, ge=1)
    """Atoms of each critic (M)."""
    top_quantiles_to_drop_per_net: int = Field(2, ge=0)
    """Atoms left out of the target for each critic (d)."""
    average_critics: bool = False
    """The target is the critics' mean, quantile by quantile, instead of their pooled atoms (Nauman et al. 2024)."""
    layer_norm: bool = False
    """LayerNorm in the critics."""

    @model_validator(mode="after")
    def _keeps_an_atom(self) -> QuantileFields:
        if self.top_quantiles_to_drop_per_net >= self.num_quantiles:
            raise ValueError(
                f"top_quantiles_to_drop_per_net = {self.top_quantiles_to_drop_per_net} leaves nothing of"
                f" num_quantiles = {self.num_quantiles}"
            )
        if self.average_critics and self.top_quantiles_to_drop_per_net:
            raise ValueError("average_critics leaves out no atoms: set top_quantiles_to_drop_per_net to 0")
        return self


class QuantileOptions(QuantileFields, CriticOptions):
    kind: Literal["quantile"] = "quantile"

    def network(self) -> dict[str, Any]:
        return {
            "num_critics": self.num_critics,
            "critic_outputs": self.num_quantiles,
            "layer_norm": self.layer_norm,
        }

    def build(self, owner: Owner) -> Critic:
        return QuantileCritic(owner, self)


def truncate(atoms: Tensor, drop_per_net: int) -> Tensor:
    """Pool the atoms of all critics and leave out the largest: [E, B, M] -> [B, E (M - d)], ascending (Eq. 10)."""
    members, _, quantiles = atoms.shape
    pooled = atoms.transpose(0, 1).flatten(1)  # [B, E M]
    return pooled.sort(-1).values[:, : members * (quantiles - drop_per_net)]


class QuantileCritic(Critic):
    """The policy climbs the mean of all atoms; the target leaves out the largest."""

    def __init__(self, owner: Owner, options: QuantileFields) -> None:
        super().__init__(owner)
        self.options = options
        self.taus = quantile_midpoints(options.num_quantiles, owner.algorithm.device)

    def values(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        atoms: Tensor = self.net(params, obs, actions)  # [E, B, M]
        return atoms.mean(-1)

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Report]:
        next_atoms = self.net(state.target["critic"], batch["next_obs"], next_action)  # [E, B, M]
        options = self.options
        drop = options.top_quantiles_to_drop_per_net
        kept = next_atoms.mean(0) if options.average_critics else truncate(next_atoms, drop)  # [B, K]
        kept = kept if bonus is None else kept + bonus.unsqueeze(-1)
        target = batch["rewards"].unsqueeze(-1) + batch["discounts"].unsqueeze(-1) * kept  # Eq. 11
        atoms = self.net(params, batch["obs"], batch["actions"])  # [E, B, M]
        loss = quantile_huber(atoms, target.unsqueeze(0), self.taus).mean(0) / options.num_quantiles  # Eq. 13
        error = (atoms.mean(-1) - target.mean(-1)).abs().mean(0)
        return loss, Report(atoms.mean((0, 2)), error, target.mean(-1), {})

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        """Mean of all atoms, none of them left out (Eq. 14)."""
        atoms: Tensor = self.net(params, obs, action)
        return atoms.mean((0, 2))
