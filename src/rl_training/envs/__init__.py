"""Environments: one vector interface over Gymnasium, spaces as plain arrays, and exact capture of running episodes."""

from __future__ import annotations

from rl_training.envs.making import make_env
from rl_training.envs.native import NativeVectorEnv
from rl_training.envs.probes import register_probes
from rl_training.envs.spaces import ActionDecoder, Obs, ObsEncoder, make_spec
from rl_training.envs.spec import ActionSpec, ArraySpec, EnvSpec
from rl_training.envs.sync import SyncVectorEnv
from rl_training.envs.vector import EnvError, EnvState, Episode, Step, VectorEnv, episode_seed, make_vector_env
from rl_training.envs.workers import AsyncVectorEnv

register_probes()

__all__ = [
    "ActionDecoder",
    "ActionSpec",
    "ArraySpec",
    "AsyncVectorEnv",
    "EnvError",
    "EnvSpec",
    "EnvState",
    "Episode",
    "NativeVectorEnv",
    "Obs",
    "ObsEncoder",
    "Step",
    "SyncVectorEnv",
    "VectorEnv",
    "episode_seed",
    "make_env",
    "make_spec",
    "make_vector_env",
    "register_probes",
]
