"""Making one environment, with every failure told in the user's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymSpec

from rl_training.envs.atari import register_atari
from rl_training.envs.dm_control import register_dm_control
from rl_training.envs.exploration_tasks import register_exploration_tasks
from rl_training.envs.goal import register_goals
from rl_training.envs.packages import register_package
from rl_training.envs.partial import register_memory_tasks
from rl_training.envs.pixels import register_pixels
from rl_training.envs.probes import register_probes
from rl_training.envs.tensor.gym_env import register_tensor_envs
from rl_training.envs.vector import EnvError
from rl_training.errors import UserError, describe, did_you_mean
from rl_training.imports import import_named, is_allowed
from rl_training.spec import EnvSource

register_probes()
register_memory_tasks()
register_goals()
register_exploration_tasks()
register_pixels()
register_tensor_envs()


def find_spec(env_id: str) -> GymSpec:
    """The registered spec of `env_id`, or a UserError that names the nearest id or the extra to install.

    `module:Env-v0` imports the module if the user named it (`rl_training.imports`), or finds what is registered.
    """
    module, _, name = env_id.rpartition(":")
    register_atari(env_id)
    register_dm_control(env_id)
    register_package(env_id)
    try:
        if module and (is_allowed(module) or name not in gym.registry):
            import_named(module, f"the environment '{env_id}'")
        return gym.spec(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"Environment '{env_id}': module '{error.name}' cannot be imported. Install it, or put its directory on"
            " PYTHONPATH; the current directory is not searched."
        ) from None
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
            hint = ": set vectorization to 'vector'" if isinstance(env, gym.vector.VectorEnv) else ""
            raise UserError(f"env_fn must return a gymnasium.Env; it returned {type(env).__name__}{hint}.")
        return env
    with user_errors(source, kwargs):
        if reserved := sorted({"id", "disable_env_checker"} & kwargs.keys()):
            raise UserError(f"env_kwargs.{reserved[0]} is an argument of gymnasium.make, not of {source.id}: remove it")
        return gym.make(source, disable_env_checker=True, **kwargs)


@contextmanager
def user_errors(spec: GymSpec, env_kwargs: dict[str, Any]) -> Iterator[None]:
    """What the user can fix about making this environment becomes a UserError."""
    try:
        yield
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise UserError(_missing(spec, error)) from error
    except gym.error.DeprecatedEnv as error:
        raise UserError(f"Environment '{spec.id}': {error}") from None
    except (UserError, MemoryError):
        raise
    except SystemExit as error:
        if type(error) is not SystemExit:
            raise
        raise EnvError(f"{spec.id} called sys.exit({error.code!r}) while it was made") from error
    except Exception as error:  # the environment's own code failed
        reason = str(error) if isinstance(error, OSError | TypeError) else describe(error)
        if env_kwargs:
            raise UserError(f"env_kwargs {sorted(env_kwargs)} do not fit {spec.id}: {reason}") from error
        if isinstance(error, OSError):
            raise UserError(f"{spec.id} cannot be made: {reason}") from error
        raise EnvError(f"{spec.id} failed while it was made: {reason}") from error


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
