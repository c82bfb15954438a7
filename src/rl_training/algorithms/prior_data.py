"""Learning online with prior data: a share of every batch comes from a dataset. RLPD does so, and so do fine-tuning
after offline training and imitation (SQIL, IQ-Learn).

Prior data is a matter of settings: any off-policy algorithm mixes its batches when its `Hyper` has `PriorFields`. With
`ExpertFields` the data are an expert's, and every row says whose it is.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import OffPolicyHyper
from rl_training.data.dataset import DatasetSource
from rl_training.data.recipes import DatasetRecipe, Kind
from rl_training.data.replay import Replay
from rl_training.data.source import Labelled, MatchedReplay, MixedSource, Source
from rl_training.errors import UserError

HORIZON = 1_000  # steps over which returns are summed where an environment has no time limit


class PriorFields(OffPolicyHyper):
    dataset: DatasetRecipe = Field(default_factory=DatasetRecipe)
    """Where the prior data come from: a recipe (docs/offline.md)."""
    prior_share: float = Field(0.5, ge=0.0, le=1.0)
    """Share of each batch that is prior data."""


class FineTuneFields(PriorFields):
    """Fine-tuning starts from a trained policy, which acts from the first step on."""

    random_warmup: ClassVar[bool] = False
    buffer_size: int = Field(100_000, ge=1)
    learning_starts: int = Field(200, ge=0)
    """Environment steps with the initial policy before the first update."""


class ExpertDataFields(BaseModel):
    """Settings of imitation: the expert's data."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    dataset: DatasetRecipe = Field(default_factory=DatasetRecipe)
    """Where the expert's transitions come from: a recipe (docs/offline.md)."""
    expert_dataset_kind: Kind | None = None
    """Short for dataset.kind; overrides the recipe."""
    expert_dataset_path: str | None = None
    """Short for dataset.path."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        kind, path = values.get("expert_dataset_kind"), values.get("expert_dataset_path")
        if kind is None and path is None:
            return values
        recipe = values.get("dataset") or {}
        recipe = recipe.model_dump() if isinstance(recipe, DatasetRecipe) else recipe
        if not isinstance(recipe, dict):
            return values  # the validation of the field reports it
        if kind is not None and kind != recipe.get("kind", "random"):
            recipe = {**recipe, "kind": kind, "path": None, "train": None, "level": None}
        return {**values, "dataset": {**recipe, "path": path, "train": None} if path is not None else recipe}


class ExpertFields(ExpertDataFields, PriorFields):
    """The prior data are an expert's. Batches have the column `labels`: 1 on the expert's rows, 0 on the policy's."""

    dataset: DatasetRecipe = Field(default_factory=DatasetRecipe)
    """Where the expert's transitions come from: a recipe (docs/offline.md). Its rewards are not read."""
    prior_share: float = Field(0.5, ge=0.0, le=1.0)
    """Share of each batch that is the expert's."""


def mix_with_prior(algorithm: Algorithm[Any], replay: Replay) -> tuple[Source, Source]:
    """(the prior data, a source that mixes it with the replay).

    The replay's rows get the dataset's reward scale and the columns that the algorithm reads from a dataset.
    """
    hp: PriorFields = algorithm.hp
    dataset, columns = algorithm.dataset, algorithm.dataset_columns
    if dataset is None:
        raise UserError(f"{algorithm.name} learns with a dataset; none was given")
    if hp.n_step != 1 or hp.prioritized:
        raise UserError(f"{algorithm.name} mixes its batches from one-step transitions: leave n_step and prioritized")
    if any(part.changes_rewards for part in hp.dataset.mix):
        raise UserError(
            f"{algorithm.name}: give reward_scale, reward_shift and reward_clip for the mix, not for a part"
        )
    horizon = (algorithm.spec.max_episode_steps or HORIZON) if "returns" in columns else 0
    own: Source = MatchedReplay(replay, dataset.reward_rule, horizon)
    prior: Source = DatasetSource(dataset, hp.gamma, columns)
    if isinstance(hp, ExpertFields):
        own, prior = Labelled(own, 0.0), Labelled(prior, 1.0)
    return prior, MixedSource(own, prior, hp.prior_share)
