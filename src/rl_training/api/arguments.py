"""What the managed classes take: `PPO("CartPole-v1", n_steps=256)`, `PPO(config)`, or parts of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
from torch import nn

from rl_training import registry
from rl_training.envs.factory import env_name
from rl_training.envs.given import EnvInput, GivenEnv, given
from rl_training.errors import UserError
from rl_training.experiment.run.config import TrainConfig, make_config
from rl_training.experiment.run.environment import with_env
from rl_training.spec import EnvSource, EnvSpec


class Arguments(NamedTuple):
    """What the user asked for, understood and checked."""

    config: TrainConfig
    env: EnvSource | GivenEnv | None  # None: the id in the config
    planned: bool  # does the config's total_timesteps come from the user? If not, it is 1 and `learn` must say


def read_arguments(
    entry: registry.Entry, env: EnvInput | TrainConfig | None, config: TrainConfig | None, env_fn: Any,
    settings: Mapping[str, Any],
) -> Arguments:  # fmt: skip
    """Make one configuration of everything that a managed class was given, or say in one sentence what is wrong."""
    _refuse_bare(entry, env, settings)
    if isinstance(env, TrainConfig):
        if config is not None:
            raise UserError(f"{entry.class_name} takes one TrainConfig, not two")
        env, config = None, env
    if config is not None and not isinstance(config, TrainConfig):
        raise UserError(f"config must be a TrainConfig, not {type(config).__name__}; make_config() makes one")
    if env is not None and env_fn is not None:
        raise UserError("the environment is given twice: leave out env_fn")
    if env_fn is not None and not callable(env_fn):
        what = "an environment itself, which goes to env" if isinstance(env_fn, gym.Env) else type(env_fn).__name__
        raise UserError(f"env_fn must be a function that makes an environment, not {what}")
    for name in settings.keys() & {"callbacks", "progress"}:
        raise UserError(f"'{name}' is an argument of learn(): {entry.class_name}(...).learn({name}=...)")
    fields = {"algo": entry.name, **({} if config is None else config.to_dict())}
    if (algo := settings.get("algo", fields["algo"])) != entry.name:
        raise UserError(f"{entry.class_name} trains '{entry.name}', but the configuration says '{algo}'")
    changes, source = dict(settings), env_fn
    if isinstance(env, str):
        changes["env_id"] = _one_id(env, settings.get("env_id"))
    elif env is not None:
        _check_env(entry, env)
        source = given(env)
    if source is not None:
        fields.setdefault("env_id", source.name if isinstance(source, GivenEnv) else env_name(source).strip("<>"))
    elif "env_id" not in {**fields, **changes}:
        raise UserError(f"{entry.class_name} needs an environment, such as {entry.class_name}('CartPole-v1')")
    planned = "total_timesteps" in {**fields, **changes}
    made = make_config(fields if planned else {**fields, "total_timesteps": 1}, **changes)
    made.hyper()  # wrong settings are told here, not when training starts
    if isinstance(source, GivenEnv):
        made, source = with_env(made, source)
    return Arguments(made, source, planned)


def _one_id(env: str, env_id: Any) -> str:
    if env in registry.presets():
        raise UserError(f"'{env}' is a preset, not an environment: give make_config('{env}')")
    if env_id not in (None, env):
        raise UserError(f"the environment is given twice: '{env}' and env_id '{env_id}'")
    return env


def _check_env(entry: registry.Entry, env: Any) -> None:
    if not callable(env) and not isinstance(env, gym.Env | gym.vector.VectorEnv):
        raise UserError(
            f"{entry.class_name} takes the id of an environment, a function that makes one, an environment, a vector"
            f" environment or a TrainConfig; not {type(env).__name__}"
        )


def _refuse_bare(entry: registry.Entry, env: Any, settings: Mapping[str, Any]) -> None:
    """Arguments of the bare algorithm: a spec, a network."""
    bare = [f"{name}=..." for name, value in settings.items() if isinstance(value, nn.Module)]
    if isinstance(env, EnvSpec | nn.Module):
        bare = [type(env).__name__]
    if bare:
        raise UserError(
            f"rl_training.{entry.class_name} trains in an environment and takes no {bare[0]}; the bare algorithm, for"
            f" your own networks and batches, is rl_training.algorithms.{entry.class_name}"
        )
