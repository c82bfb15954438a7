"""What the managed classes take: `PPO("CartPole-v1", n_steps=256)`, `PPO(config)`, or parts of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
from torch import nn

from rl_training import registry
from rl_training.envs.factory import env_name
from rl_training.envs.given import EnvInput, GivenEnv, given
from rl_training.envs.simulators.conventions import convention
from rl_training.errors import UserError
from rl_training.experiment.run.config import TrainConfig, combine
from rl_training.experiment.run.environment import with_env
from rl_training.imports import allow_imports_in
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
    for name in settings.keys() & {"callbacks", "progress"}:
        raise UserError(f"'{name}' is an argument of learn(): {entry.class_name}(...).learn({name}=...)")
    if isinstance(env, TrainConfig):
        if config is not None:
            raise UserError(f"{entry.class_name} takes one TrainConfig, not two")
        env, config = None, env
    if config is not None and not isinstance(config, TrainConfig):
        raise UserError(f"config must be a TrainConfig, not {type(config).__name__}; make_config() makes one")
    allow_imports_in([env, settings])
    fields = {"algo": entry.name, **({} if config is None else config.to_dict())}
    changes = {name: value for name, value in settings.items() if value is not None or name not in fields}
    if (algo := changes.get("algo", fields["algo"])) != entry.name:
        raise UserError(f"{entry.class_name} trains '{entry.name}', but the configuration says '{algo}'")
    source: EnvSource | GivenEnv | None = None
    if isinstance(env, str):
        changes["env_id"] = _one_id(env, changes.get("env_id"), env_fn)
    elif env is not None or env_fn is not None:
        source = _source(entry, env, env_fn)
        fields.setdefault("env_id", source.name if isinstance(source, GivenEnv) else _name(source))
    if (fields | changes).get("env_id") is None:
        raise UserError(f"{entry.class_name} needs an environment, such as {entry.class_name}('CartPole-v1')")
    planned = (fields | changes).get("total_timesteps") is not None
    made = combine(fields if planned else {**fields, "total_timesteps": 1}, **changes)
    made.hyper()  # wrong settings are reported here, not when training starts
    if isinstance(source, GivenEnv):
        made, source = with_env(made, source)
    return Arguments(made, source, planned)


def _source(entry: registry.Entry, env: EnvInput | None, env_fn: Any) -> EnvSource | GivenEnv:
    """An environment that is not given by its id."""
    if env is None:
        if not callable(env_fn):
            what = "an environment itself, which goes to env" if isinstance(env_fn, gym.Env) else type(env_fn).__name__
            raise UserError(f"env_fn must be a function that makes an environment, not {what}")
        return given(env_fn)
    if env_fn is not None:
        raise UserError("the environment is given twice: leave out env_fn")
    if not callable(env) and not isinstance(env, gym.Env | gym.vector.VectorEnv) and convention(env) is None:
        raise UserError(
            f"{entry.class_name} takes the id of an environment, a function that makes one, an environment, a vector"
            f" environment or a TrainConfig; not {type(env).__name__}"
        )
    return given(env)


def _name(make: EnvSource) -> str:
    """What a run calls the environment of a function."""
    return env_name(getattr(make, "func", make)).strip("<>")  # the function of a partial; no <lambda>


def _one_id(env: str, env_id: Any, env_fn: Any) -> str:
    if env in registry.presets():
        raise UserError(f"'{env}' is a preset, not an environment: give make_config('{env}')")
    if env_id not in (None, env):
        raise UserError(f"the environment is given twice: '{env}' and env_id '{env_id}'")
    if env_fn is not None:
        raise UserError("the environment is given twice: leave out env_fn")
    return env


def _refuse_bare(entry: registry.Entry, env: Any, settings: Mapping[str, Any]) -> None:
    """Arguments of the bare algorithm: a spec, a network."""
    network = entry.load().network_argument
    for name, value in {"": env, **settings}.items():
        if isinstance(value, EnvSpec | nn.Module) or name == network:
            raise UserError(
                f"rl_training.{entry.class_name} trains in an environment and takes no"
                f" {f'{name}=...' if name else type(value).__name__}; the bare algorithm, for your own networks and"
                f" batches, is rl_training.algorithms.{entry.class_name}"
            )
