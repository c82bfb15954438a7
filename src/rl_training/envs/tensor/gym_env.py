"""One copy of a tensor environment as a Gymnasium environment, for evaluation, prediction and other libraries."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from rl_training.envs.tensor.base import State, TensorEnv
from rl_training.envs.tensor.table import TENSOR_ENVS, tensor_env
from rl_training.ops import rng
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import Array, ArraySpec


class TensorGymEnv(gym.Env[Any, Any]):
    """Runs on the CPU, one episode at a time. The time limit is Gymnasium's to count."""

    def __init__(self, env_id: str) -> None:
        self.tensor_env: TensorEnv = tensor_env(env_id)
        spec = self.tensor_env.spec
        observation, action = spec.observation, spec.action
        assert isinstance(observation, ArraySpec)
        low, high, dtype = (0, 255, np.uint8) if observation.is_image else (-np.inf, np.inf, np.float32)
        self.observation_space = spaces.Box(low, high, observation.shape, dtype)
        self.action_space = spaces.Discrete(action.nvec[0]) if action.discrete else spaces.Box(-1.0, 1.0, action.shape)
        self._state: State = {}
        self._key, self._time = rng.key_from_seed(0), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._key, self._time = rng.key_from_seed(int(self.np_random.integers(2**31))), 0
        self._state = self.tensor_env.initial(self._key, 1)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._time += 1
        actions = torch.as_tensor(np.asarray(action))[None]
        self._state, rewards, terminated = self.tensor_env.advance(
            self._state, actions, rng.fold(self._key, self._time)
        )
        return self._seen(), float(rewards), bool(terminated), False, {}

    def _seen(self) -> Array:
        seen: Array = self.tensor_env.observe(self._state)[0].numpy().copy()
        return seen

    def get_state(self) -> dict[str, Any]:
        arrays = {name: x.numpy().copy() for name, x in tree_items(self._state)}
        return {"arrays": arrays, "key": int(self._key), "time": self._time}

    def set_state(self, state: dict[str, Any]) -> None:
        self._key, self._time = torch.tensor(int(state["key"])), int(state["time"])
        saved = iter(torch.as_tensor(np.asarray(state["arrays"][name])) for name, _ in tree_items(self._state))
        self._state = tree_map(lambda _: next(saved), self._state)


def register_tensor_envs() -> None:
    """Make those known to Gymnasium that it does not have itself."""
    for env_id in TENSOR_ENVS:
        if env_id not in gym.registry:
            limit = tensor_env(env_id).spec.max_episode_steps
            entry = f"{__name__}:TensorGymEnv"
            gym.register(env_id, entry_point=entry, max_episode_steps=limit, kwargs={"env_id": env_id})
