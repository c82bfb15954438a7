"""Truncated quantile critics (Kuznetsov et al. 2020): SAC with quantile critics whose largest atoms are dropped.

Deviations: two critics by default instead of five, as in the runs that published scores are compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.sac import SAC, CriticReport, Extra, SACHyper
from rl_training.data.storage import Batch
from rl_training.models.control import SACModel
from rl_training.ops.quantiles import quantile_huber, quantile_midpoints
from rl_training.spec import EnvSpec


class TQCHyper(SACHyper):
    num_critics: int = Field(2, ge=1)
    """Critics in the ensemble (N)."""
    num_quantiles: int = Field(25, ge=1)
    """Atoms of each critic (M)."""
    top_quantiles_to_drop_per_net: int = Field(2, ge=0)
    """Atoms left out of the target for each critic (d)."""

    @model_validator(mode="after")
    def _something_is_left(self) -> TQCHyper:
        if self.top_quantiles_to_drop_per_net >= self.num_quantiles:
            raise ValueError(
                f"top_quantiles_to_drop_per_net = {self.top_quantiles_to_drop_per_net} leaves nothing of"
                f" num_quantiles = {self.num_quantiles}"
            )
        return self


def truncate(atoms: Tensor, drop_per_net: int) -> Tensor:
    """Pool the atoms of all critics and leave out the largest: [E, B, M] -> [B, E (M - d)], ascending (Eq. 10)."""
    members, _, quantiles = atoms.shape
    pooled = atoms.transpose(0, 1).flatten(1)  # [B, E M]
    return pooled.sort(-1).values[:, : members * (quantiles - drop_per_net)]


class TQC(SAC):
    Hyper = TQCHyper
    name = "tqc"
    if TYPE_CHECKING:
        hp: TQCHyper

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            SACModel(
                spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation,
                critic_outputs=hp.num_quantiles,
            )
        )  # fmt: skip

    def setup(self) -> None:
        super().setup()
        self.taus = quantile_midpoints(self.hp.num_quantiles, self.device)

    def critic_loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor, key: Tensor
    ) -> tuple[Tensor, CriticReport]:
        next_atoms = self.q_values(state.target["critic"], batch["next_obs"], next_action, None)  # [E, B, M]
        kept = truncate(next_atoms, self.hp.top_quantiles_to_drop_per_net)  # [B, K]
        rewards, discounts = batch["rewards"].unsqueeze(-1), batch["discounts"].unsqueeze(-1)
        target = rewards + discounts * (kept + bonus.unsqueeze(-1))  # Eq. 11
        atoms = self.q_values(params, batch["obs"], batch["actions"], None)  # [E, B, M]
        loss = quantile_huber(atoms, target.unsqueeze(0), self.taus).mean(0) / self.hp.num_quantiles  # Eq. 13
        error = (atoms.mean(-1) - target.mean(-1)).abs().mean(0)
        return loss, CriticReport(atoms.mean((0, 2)), error, target.mean(-1), {})

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        """Mean of all atoms, untruncated (Eq. 14)."""
        return self.q_values(params, obs, action, key).mean((0, 2))
