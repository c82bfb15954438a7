"""The environment of a run: the id in its configuration, or what the user gave instead."""

from __future__ import annotations

from rl_training.envs.given import EnvInput, GivenEnv, VectorSource, given
from rl_training.errors import UserError
from rl_training.experiment.run.config import TrainConfig
from rl_training.spec import EnvSource


def with_env(config: TrainConfig, env: EnvInput | GivenEnv | None) -> tuple[TrainConfig, EnvSource | GivenEnv]:
    """The configuration with everything that the environment decides, and where environments come from."""
    source = given(config.env_id if env is None else env, config.vectorization, config.env_arguments("training"))
    if isinstance(source, GivenEnv):
        if config.env_kwargs not in ({}, source.arguments):
            raise UserError("env_kwargs are arguments for making an environment, and this one exists: leave them out")
        source.check(config.vectorization)
        config = config.model_copy(update={"env_kwargs": source.arguments})
    if isinstance(source, GivenEnv | VectorSource) and source.num_envs is not None:
        if config.num_envs not in (None, source.num_envs):
            raise UserError(
                f"this vector environment has {source.num_envs} environments, but num_envs is {config.num_envs}"
            )
        config = config.model_copy(update={"num_envs": source.num_envs})
    return config, source
