"""The environment of a run: the id in its configuration, or what the user gave instead."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from rl_training import registry
from rl_training.cluster.plan import cluster_envs
from rl_training.envs.given import EnvInput, GivenEnv, GivenSimulator, VectorSource, fresh, given
from rl_training.envs.vector import VectorEnv
from rl_training.envs.vectorize import make_vector_env
from rl_training.envs.wrappers import wrapped
from rl_training.errors import UserError
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.run_plan import RunPlan
from rl_training.imports import allow_imports_in
from rl_training.spec import EnvSource


def with_env(config: TrainConfig, env: EnvInput | GivenEnv | None) -> tuple[TrainConfig, EnvSource | GivenEnv]:
    """The configuration with everything that the environment decides, and where environments come from."""
    source = given(config.env_id if env is None else env, config.vectorization, config.env_arguments("training"))
    if isinstance(source, GivenEnv):
        if config.env_wrappers:
            raise UserError("env_wrappers wrap environments that are made, and this one exists: wrap it yourself")
        if config.env_kwargs not in ({}, source.arguments):
            raise UserError("env_kwargs are arguments for making an environment, and this one exists: leave them out")
        source.check(config.vectorization)
        allow_imports_in(source.arguments)  # the person passed an environment that was made with them
        config = config.model_copy(update={"env_kwargs": source.arguments})
    if isinstance(source, GivenSimulator):
        config = config.model_copy(update={"vectorization": "device"})
    if isinstance(source, GivenEnv | VectorSource) and source.num_envs is not None:
        if config.num_envs not in (None, source.num_envs):
            raise UserError(
                f"this vector environment has {source.num_envs} environments, but num_envs is {config.num_envs}"
            )
        config = config.model_copy(update={"num_envs": source.num_envs})
    if not isinstance(source, GivenEnv):
        source = wrapped(source, config.env_wrappers, config.vectorization)
    return _with_kind_defaults(config, source), source


def _with_kind_defaults(config: TrainConfig, source: EnvSource | GivenEnv) -> TrainConfig:
    """The configuration with the algorithm's defaults for environments of this kind. One is made to see which kind it
    is, unless the configuration has all of these settings."""
    algorithm = registry.entry(config.algo).load()
    found = {name for settings in algorithm.kind_defaults.values() for name in settings}
    if found <= {*algorithm.defaults, *config.algo_kwargs}:
        return config
    config.hyper()  # wrong settings are reported before an environment is made
    like = fresh(source)
    single = config.vectorization in ("auto", "sync", "threads", "async") and not isinstance(like, VectorSource)
    with closing(
        make_vector_env(
            like, seeds=(0,), num_envs=1 if single else config.num_envs or algorithm.Hyper.num_envs,
            vectorization="auto" if single else config.vectorization, env_kwargs=config.env_arguments("training"),
            masks=algorithm.masks,
        )
    ) as envs:  # fmt: skip
        kind = envs.spec.kind
    settings = {**algorithm.kind_defaults.get(kind, {}), **algorithm.defaults, **config.algo_kwargs}
    return config.model_copy(update={"algo_kwargs": settings})


def training_envs(plan: RunPlan, source: EnvSource | GivenEnv) -> VectorEnv:
    """The environments that a run trains in: of this process, or in rollout actors of a cluster."""
    config = plan.config
    where: dict[str, Any] = {
        "seeds": config.all_seeds, "num_envs": plan.num_envs, "vectorization": config.vectorization,
        "env_kwargs": config.env_arguments("training"), "masks": plan.algorithm.masks,
    }  # fmt: skip
    return make_vector_env(source, **where) if config.cluster is None else cluster_envs(config.cluster, source, **where)
