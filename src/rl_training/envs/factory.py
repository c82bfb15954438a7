"""Making one environment, with every failure told in the user's words."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymSpec

from rl_training.envs.atari import register_atari
from rl_training.envs.dm_control import register_dm_control
from rl_training.envs.goal import register_goals
from rl_training.envs.masks import InfoMask, info_mask_length
from rl_training.envs.partial import register_memory_tasks
from rl_training.envs.pixels import register_pixels
from rl_training.envs.probes import register_probes
from rl_training.errors import UserError, did_you_mean
from rl_training.spec import EnvSource

register_probes()
register_memory_tasks()
register_goals()
register_pixels()


def find_spec(env_id: str) -> GymSpec:
    """The registered spec of `env_id`, or a UserError that names the nearest id or the extra to install.

    `module:Env-v0` imports the module: callers must pass only ids that the user typed, never one from a file.
    """
    module, _, name = env_id.rpartition(":")
    register_atari(env_id)
    register_dm_control(env_id)
    if env_id.startswith("ALE/") or re.search(r"NoFrameskip-v\d+$", env_id):
        try:
            importlib.import_module("ale_py")  # registers its environments on import
        except ImportError:
            raise UserError(f"{env_id} needs the Atari extra: pip install 'rl-training[atari]'") from None
    try:
        if module:
            importlib.import_module(module)
        return gym.spec(name)
    except ModuleNotFoundError as error:
        raise UserError(f"Environment '{env_id}': module '{error.name}' cannot be imported.") from None
    except (gym.error.Error, ImportError) as error:
        newest = {_family(known): known for known in sorted(gym.registry)}  # without versions, which all look alike
        near = did_you_mean(_family(env_id), newest)
        for family in re.findall(r"'(.*)'", near):
            near = near.replace(family, newest[family])
        if isinstance(error, gym.error.NameNotFound):  # its sentence would say the same once more
            error = gym.error.Error(
                "Register it first, or write module:Env-v0 to import the module that does (in Python also: env_fn=)."
            )
        raise UserError(f"Environment '{env_id}' is not known. {near.strip() or error}") from None


def _family(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id)


def make_env(source: EnvSource | GymSpec, env_kwargs: dict[str, Any] | None = None) -> gym.Env[Any, Any]:
    """One environment from an id, a spec (which also works where the id is not registered) or a function."""
    kwargs = env_kwargs or {}
    if isinstance(source, str):
        source = find_spec(source)
    if not isinstance(source, GymSpec):
        maker: Any = source
        if not callable(maker):
            what = "an environment itself" if isinstance(maker, gym.Env) else type(maker).__name__
            raise UserError(f"env_fn must be a function that makes an environment, not {what}: `lambda: MyEnv()`.")
        env = maker(**kwargs)
        if not isinstance(env, gym.Env):
            raise UserError(f"env_fn must return a gymnasium.Env; it returned {type(env).__name__}.")
        return env
    with user_errors(source, kwargs):
        return gym.make(source, disable_env_checker=True, **kwargs)


class Spaces(NamedTuple):
    """What an environment observes and does, as Gymnasium describes it."""

    observation: gym.Space[Any]
    action: gym.Space[Any]


def read_spaces(
    source: EnvSource | GymSpec, env_kwargs: dict[str, Any] | None = None, *, masks: bool = False
) -> Spaces:
    """The spaces of an environment, which is made for that purpose and closed again.

    With `masks`, a mask that the environment gives in info counts as a part of the observation (`envs.masks`).
    """
    with closing(make_env(source, env_kwargs)) as env:
        if masks and (length := info_mask_length(env)):
            env = InfoMask(env, length)
        return Spaces(env.observation_space, env.action_space)


@contextmanager
def user_errors(spec: GymSpec, env_kwargs: dict[str, Any]) -> Iterator[None]:
    """What the user can fix about making this environment becomes a UserError."""
    try:
        yield
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise UserError(_missing(spec, error)) from error
    except gym.error.DeprecatedEnv as error:
        raise UserError(f"Environment '{spec.id}': {error}") from None
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"env_kwargs {sorted(env_kwargs)} do not fit {spec.id}: {error}") from None


def env_name(source: EnvSource | GymSpec) -> str:
    """What messages and the spec call this environment."""
    if isinstance(source, str):
        return source
    return source.id if isinstance(source, GymSpec) else getattr(source, "__name__", type(source).__name__)


def _missing(spec: GymSpec, error: Exception) -> str:
    """One sentence that names the extra to install, if one of ours provides what is missing."""
    text = f"{spec.entry_point} {error}".lower()
    for extra, words in {"box2d": ("box2d",), "mujoco": ("mujoco",), "atari": ("ale_py", "atari")}.items():
        if any(word in text for word in words) and "gymnasium-robotics" not in text:
            return f"{spec.id} needs the {extra} extra: pip install 'rl-training[{extra}]'"
    return f"{spec.id} cannot be made, something it needs is missing: {error}"
