"""Learning online with prior data: part of every batch comes from a dataset. RLPD, and the fine-tuning of policies that
were trained offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from rl_training.algorithms.base import Algorithm, Phase
from rl_training.algorithms.hyper import OffPolicyHyper
from rl_training.data.dataset import DatasetSource
from rl_training.data.recipes import DatasetRecipe
from rl_training.data.source import LikeDataset, Source
from rl_training.errors import UserError

HORIZON = 1_000  # steps over which returns are summed where an environment names no limit


class PriorFields(OffPolicyHyper):
    dataset: DatasetRecipe = Field(default_factory=DatasetRecipe)
    """Where the prior data come from: a recipe (docs/offline.md)."""
    prior_share: float = Field(0.5, ge=0.0, le=1.0)
    """Share of each batch that is prior data."""


class FineTuneFields(PriorFields):
    """A policy that can do something already acts from the first step on."""

    random_warmup: ClassVar[bool] = False
    buffer_size: int = Field(100_000, ge=1)
    """Transitions kept for each seed."""
    learning_starts: int = Field(200, ge=0)
    """Environment steps with the policy as it came before the first update."""


class PriorData(Algorithm[Any]):
    """What makes an off-policy algorithm one with prior data; goes before its class in the list of bases."""

    if TYPE_CHECKING:
        hp: Any

    def phases(self) -> tuple[Phase, ...]:
        return tuple(phase._replace(source="mixed") for phase in super().phases())

    def prior(self) -> tuple[Source, float]:
        hp: PriorFields = self.hp
        if self.dataset is None:
            raise UserError(f"{self.name} learns with a dataset; none was given")
        if hp.n_step != 1 or hp.prioritized:
            raise UserError(f"{self.name} mixes its batches from one-step transitions: leave n_step and prioritized")
        return DatasetSource(self.dataset, hp.gamma, self.reads), hp.prior_share

    def beside_prior(self, replay: Any) -> Source:
        """Rewards in the dataset's units, and the columns that the algorithm reads."""
        assert self.dataset is not None
        if any(part.changes_rewards for part in self.hp.dataset.mix):
            raise UserError(f"{self.name}: give reward_scale, reward_shift and reward_clip for the mix, not for a part")
        horizon = (self.spec.max_episode_steps or HORIZON) if "returns" in self.reads else 0
        return LikeDataset(replay, self.dataset.reward_rule, horizon)
