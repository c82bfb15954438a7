"""Saving and restoring sub-environments: the layout of a saved state, and access to an environment's own state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rl_training.envs.masks import InfoMask
from rl_training.envs.vector import EnvError, EnvState
from rl_training.errors import UserError
from rl_training.spec import Array


class SubState(NamedTuple):
    """The state that one sub-environment needs to continue its episode."""

    meta: dict[str, Any]
    arrays: dict[str, Array]


def pack(states: Sequence[SubState]) -> EnvState:
    """Combine the states. The layout is the same for sync and async environments, so each can load the other's."""
    arrays = {f"{i}.{k}": a for i, s in enumerate(states) for k, a in s.arrays.items()}
    return EnvState({"sub_envs": [s.meta for s in states]}, arrays)


def unpack(state: EnvState, m: int) -> list[SubState]:
    metas = state.meta.get("sub_envs", [])
    if len(metas) != m:
        raise UserError(f"The saved state has {len(metas)} sub-environments, but this run has {m}.")
    parts: list[dict[str, Array]] = [{} for _ in range(m)]
    for key, a in state.arrays.items():
        i, name = key.split(".", 1)
        parts[int(i)][name] = a
    return [SubState(meta, part) for meta, part in zip(metas, parts)]


def has_state(env: gym.Env[Any, Any]) -> bool:
    """Whether get_state() is complete. Unknown wrappers may have state of their own, such as a frame stack."""
    while isinstance(env, gym.Wrapper):
        if not isinstance(env, TimeLimit | OrderEnforcing | PassiveEnvChecker | InfoMask):
            return False
        env = env.env
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


def read_own_state(env: gym.Env[Any, Any], name: str) -> SubState:
    """The environment's own state and its random generator, which few environments include."""
    meta: dict[str, Any] = {"values": {}, "rng": _rng_state(env)}
    arrays: dict[str, Array] = {}
    state = env.unwrapped.get_state()  # type: ignore[attr-defined]
    for key, value in state.items() if isinstance(state, dict) else [("", state)]:
        if isinstance(value, np.ndarray):
            arrays[f"state.{key}"] = value.copy()
        else:
            value = value.item() if isinstance(value, np.generic) else value
            meta["values"][key] = _jsonable(value, f"{name}: get_state()['{key}']")
    return SubState(meta, arrays)


def write_own_state(env: gym.Env[Any, Any], state: SubState) -> None:
    """Restore the state into an environment that was just reset."""
    own = {k[6:]: a.copy() for k, a in state.arrays.items() if k.startswith("state.")} | state.meta["values"]
    env.unwrapped.set_state(own[""] if set(own) == {""} else own)  # type: ignore[attr-defined]
    if state.meta["rng"] is not None:
        env.unwrapped.np_random.bit_generator.state = state.meta["rng"]
    wrapper = env
    while isinstance(wrapper, gym.Wrapper):
        if isinstance(wrapper, TimeLimit):
            wrapper._elapsed_steps = state.meta["length"]
        wrapper = wrapper.env


def _rng_state(env: gym.Env[Any, Any]) -> Any:
    rng = getattr(env.unwrapped, "_np_random", None)
    return _jsonable(rng.bit_generator.state, "rng") if rng is not None else None


def _jsonable(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise EnvError(
            f"{what} must be an array, a number, a string or JSON data; it is {type(value).__name__}"
        ) from None
