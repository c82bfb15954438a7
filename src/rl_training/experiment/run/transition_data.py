"""Functions that make datasets outside a run, from the same recipes as in a configuration."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rl_training.data.dataset import TransitionDataset
from rl_training.data.recipes import DatasetRecipe
from rl_training.errors import UserError, explain
from rl_training.experiment.run.datasets import DatasetFactory
from rl_training.experiment.run.trainer import train_agent
from rl_training.imports import allow_imports_in
from rl_training.spec import EnvSource


def load_transition_dataset(kind: str = "random", *, env: EnvSource | None = None, **fields: Any) -> TransitionDataset:
    """The dataset of a recipe: `load_transition_dataset(kind="npz", path="data.npz")`.

    Observations and actions are as the environment defines them. `env` is used by recipes without an `env_id`.
    """
    allow_imports_in([env, fields])
    try:
        recipe = DatasetRecipe(kind=kind, **fields)
    except ValidationError as error:
        raise UserError(f"dataset: {explain(error, DatasetRecipe)}") from None
    return make_dataset(recipe, env)


def make_dataset(recipe: DatasetRecipe, env: EnvSource | None = None) -> TransitionDataset:
    return DatasetFactory(train_agent).make(recipe, env)
