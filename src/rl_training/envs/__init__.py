"""Environments: one vector interface over Gymnasium, spaces as plain arrays, and exact capture of running episodes.

Names are imported on first use. Algorithms and the learner need only `spec` and must not import Gymnasium.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

if TYPE_CHECKING:
    from rl_training.envs.factory import make_env
    from rl_training.envs.goal import PointGoal
    from rl_training.envs.native import NativeVectorEnv
    from rl_training.envs.pixels import TinyPixels
    from rl_training.envs.probes import register_probes
    from rl_training.envs.spaces import ActionDecoder, Obs, ObsEncoder, make_spec
    from rl_training.envs.sync import SyncVectorEnv
    from rl_training.envs.vector import EnvError, EnvState, Episode, Step, VectorEnv, episode_seed
    from rl_training.envs.vectorize import make_vector_env
    from rl_training.envs.workers import AsyncVectorEnv

_MODULES = {
    "goal": ("PointGoal",),
    "factory": ("make_env",),
    "native": ("NativeVectorEnv",),
    "pixels": ("TinyPixels",),
    "probes": ("register_probes",),
    "spaces": ("ActionDecoder", "Obs", "ObsEncoder", "make_spec"),
    "sync": ("SyncVectorEnv",),
    "vector": ("EnvError", "EnvState", "Episode", "Step", "VectorEnv", "episode_seed"),
    "vectorize": ("make_vector_env",),
    "workers": ("AsyncVectorEnv",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


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
    "PointGoal",
    "Step",
    "SyncVectorEnv",
    "TinyPixels",
    "VectorEnv",
    "episode_seed",
    "make_env",
    "make_spec",
    "make_vector_env",
    "register_probes",
]
