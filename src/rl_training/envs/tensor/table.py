"""Tensor environments by the id of the Gymnasium environment that they equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_training.envs.tensor.base import TensorEnv
from rl_training.envs.tensor.classic import Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum
from rl_training.envs.tensor.games import Breakout, GridMaze
from rl_training.errors import UserError
from rl_training.spec import EnvSource

TENSOR_ENVS: dict[str, Callable[[], TensorEnv]] = {
    env.spec.env_id: env
    for env in (CartPole, Acrobot, MountainCar, MountainCarContinuous, Pendulum, Breakout, GridMaze)
}


def register_tensor_env(env_id: str, maker: Callable[[], TensorEnv]) -> None:
    """Use `maker()` for `env_id` where `vectorization` is device."""
    TENSOR_ENVS[env_id] = maker


def tensor_env(env_id: str) -> TensorEnv:
    if env_id not in TENSOR_ENVS:
        raise UserError(
            f"vectorization: device needs a tensor environment, and {env_id} has none. Those with one:"
            f" {', '.join(sorted(TENSOR_ENVS))}; `register_tensor_env` adds your own"
        )
    return TENSOR_ENVS[env_id]()


def named_tensor_env(source: EnvSource, env_kwargs: dict[str, Any] | None) -> TensorEnv:
    """The tensor environment that a run asks for."""
    if not isinstance(source, str):
        raise UserError("vectorization: device needs the id of an environment, not a function that makes one")
    if env_kwargs:
        raise UserError(f"env_kwargs {sorted(env_kwargs)} do not fit {source}: tensor environments take none")
    return tensor_env(source)
