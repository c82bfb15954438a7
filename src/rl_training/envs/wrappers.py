"""Wrappers that a configuration names: `env_wrappers: [module:Wrapper, {wrapper: module:Wrapper, kwargs: {...}}]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym

from rl_training.envs.factory import env_name, make_env
from rl_training.envs.given import VectorSource
from rl_training.errors import UserError
from rl_training.imports import check_arguments, import_named
from rl_training.spec import EnvSource


class NamedWrapper(NamedTuple):
    name: str  # module:Wrapper
    make: Callable[..., Any]
    kwargs: dict[str, Any]


class WrappedEnv:
    """A function that makes environments inside wrappers, the first one innermost."""

    def __init__(self, source: EnvSource, wrappers: Sequence[NamedWrapper]) -> None:
        self.source, self.wrappers, self.__name__ = source, tuple(wrappers), env_name(source)

    def __call__(self, **env_kwargs: Any) -> gym.Env[Any, Any]:
        env = make_env(self.source, env_kwargs)
        for name, make, kwargs in self.wrappers:
            try:
                wrapped = make(env, **kwargs)
            except TypeError as error:
                raise UserError(f"env_wrappers: {name} does not take ({_shown(kwargs)}): {error}") from None
            if not isinstance(wrapped, gym.Env):
                returned = type(wrapped).__name__
                raise UserError(f"env_wrappers: {name} must return an environment; it returned {returned}")
            env = wrapped
        return env


def wrapped(source: EnvSource, wrappers: Sequence[str | Mapping[str, Any]], vectorization: str = "auto") -> EnvSource:
    """`source` inside the wrappers of a configuration."""
    if not wrappers or isinstance(source, WrappedEnv):
        return source
    if isinstance(source, VectorSource) or vectorization in ("vector", "envpool", "device"):
        kind = "vector" if isinstance(source, VectorSource) else vectorization
        raise UserError(f"env_wrappers wrap single environments, which vectorization '{kind}' does not have: use sync")
    return WrappedEnv(source, [_load(entry) for entry in wrappers])


def check_wrapper(entry: Any) -> tuple[str, dict[str, Any]]:
    """The name and arguments of an entry of `env_wrappers`; ValueError if the entry is invalid."""
    fields = {"wrapper": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, Mapping) or not set(fields) <= {"wrapper", "kwargs"}:
        raise ValueError("write each wrapper as module:Wrapper, or as {wrapper: module:Wrapper, kwargs: {...}}")
    name, kwargs = fields.get("wrapper"), fields.get("kwargs") or {}
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        raise ValueError(f"a wrapper is named as module:Wrapper, such as minigrid.wrappers:ImgObsWrapper, not {name!r}")
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"kwargs of {name} must be a mapping of arguments, not {kwargs!r}")
    return name, dict(kwargs)


def _load(entry: str | Mapping[str, Any]) -> NamedWrapper:
    name, kwargs = check_wrapper(entry)
    check_arguments(kwargs, "env_wrappers.kwargs")
    module, _, attribute = name.partition(":")
    try:
        found: Any = import_named(module, f"the wrapper '{name}'")
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise UserError(f"env_wrappers: the module of {name} cannot be imported: {error}") from None
    except AttributeError:
        raise UserError(f"env_wrappers: the module '{module}' has no '{attribute}'") from None
    if not callable(found) or (isinstance(found, type) and not issubclass(found, gym.Env)):
        raise UserError(f"env_wrappers: {name} is not a wrapper (a gymnasium.Wrapper, or a function of an environment)")
    return NamedWrapper(name, found, kwargs)


def _shown(kwargs: dict[str, Any]) -> str:
    return ", ".join(["env", *(f"{key}={value!r}" for key, value in kwargs.items())])[:200]
