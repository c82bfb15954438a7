"""What a run knows of environments that live on the device: their spaces and their number. The learner steps them."""

from __future__ import annotations

from typing import Any

from rl_training.envs.spaces import Obs
from rl_training.envs.tensor.base import TensorEnv
from rl_training.envs.vector import EnvState, Restored, Step, VectorEnv
from rl_training.spec import Array


class DeviceVectorEnv(VectorEnv):
    def __init__(self, env: TensorEnv, num_envs: int) -> None:
        self.env, self.spec, self.num_envs = env, env.spec, num_envs

    def reset(self, *, episode: int | None = None) -> Obs:
        raise NotImplementedError("environments on the device are stepped by the learner")

    def step(self, actions: Array) -> Step:
        raise NotImplementedError("environments on the device are stepped by the learner")

    def current_obs(self) -> Obs:
        raise NotImplementedError("environments on the device are stepped by the learner")

    def get_state(self) -> EnvState:
        """Their state is part of the learner's tree, and saved with it."""
        meta: dict[str, Any] = {"sub_envs": [{"method": "state"}]}
        return EnvState(meta)

    def set_state(self, state: EnvState) -> Restored:
        return "exact"

    def close(self) -> None:
        """There is nothing to close."""
