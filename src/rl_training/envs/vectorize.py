"""Choosing how the environments of a run are stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_training.envs.given import GivenEnv, GivenSimulator, VectorSource
from rl_training.envs.native import NativeVectorEnv, make_native
from rl_training.envs.sync import SyncVectorEnv
from rl_training.envs.tensor.table import named_tensor_env
from rl_training.envs.tensor.vector import DeviceVectorEnv
from rl_training.envs.threads import ThreadVectorEnv
from rl_training.envs.vector import VectorEnv
from rl_training.envs.workers import AsyncVectorEnv
from rl_training.errors import UserError, did_you_mean
from rl_training.spec import EnvSource


def make_vector_env(
    env_id: EnvSource | GivenEnv,
    *,
    seeds: Sequence[int],
    num_envs: int,
    stream: int = 0,
    vectorization: str = "auto",
    env_kwargs: dict[str, Any] | None = None,
    timeout: float = 60.0,
    masks: bool = False,
) -> VectorEnv:
    """`len(seeds) * num_envs` sub-environments; number i belongs to `seeds[i // num_envs]`.

    `stream` separates the episodes of training (0) from those of evaluation (1).
    "auto" means "sync": a loop in this process, fastest for steps below roughly 100 us (classic control, Box2D, small
    MuJoCo). "threads" steps them in threads of this process, for long steps that release Python's lock; the results are
    those of "sync". "async" pays when a step costs more (pixels, heavy physics) and cores are free;
    `timeout` is how long a worker may take for one step. "vector" uses the environment's own vectorised implementation,
    "envpool" EnvPool's. "device" steps a tensor environment on the training device (`envs.tensor`). An environment that
    the user made (`GivenEnv`) is stepped in this process, and never closed; a simulator (`GivenSimulator`) by the
    learner.
    `masks`: keep an environment's action mask apart from what networks read (`envs.masks`).
    """
    modes = ("auto", "sync", "threads", "async", "vector", "envpool", "device")
    if vectorization not in modes:
        near = did_you_mean(vectorization, modes)
        raise UserError(f"vectorization '{vectorization}' is unknown: use one of {', '.join(modes)}.{near}")
    if num_envs < 1 or not seeds:
        raise UserError(
            f"num_envs must be at least 1 and seeds not empty; got num_envs={num_envs}, seeds={list(seeds)}."
        )
    if min(seeds) < 0:
        raise UserError(f"seeds must not be negative; got {min(seeds)}.")
    places = [(int(seed), stream, n) for seed in seeds for n in range(num_envs)]
    if isinstance(env_id, GivenSimulator):
        env_id.check(vectorization)
        return env_id.vector_env(seeds, num_envs, stream, masks)
    if isinstance(env_id, GivenEnv):
        env_id.check(vectorization)
        if env_id.num_envs is None:
            kind = ThreadVectorEnv if vectorization == "threads" else SyncVectorEnv
            return kind(env_id, places, masks=masks)
        envs = env_id.instances(len(seeds))
        return NativeVectorEnv(envs, seeds=seeds, stream=stream, env_id=env_id.name, masks=masks, borrowed=1)
    if isinstance(env_id, VectorSource):
        vectorization = "vector"
    if vectorization == "device":
        return DeviceVectorEnv(named_tensor_env(env_id, env_kwargs), len(seeds) * num_envs)
    if vectorization in ("vector", "envpool"):
        return make_native(env_id, vectorization, seeds, num_envs, stream, env_kwargs or {}, masks)
    if vectorization == "threads":
        return ThreadVectorEnv(env_id, places, env_kwargs, masks)
    if vectorization == "async":
        return AsyncVectorEnv(env_id, places, env_kwargs, timeout=timeout, masks=masks)
    return SyncVectorEnv(env_id, places, env_kwargs, masks)
