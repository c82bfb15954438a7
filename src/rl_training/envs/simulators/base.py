"""A simulator steps all its environments at once and returns tensors on its device.

It cannot be part of a graph with the policy, as a `TensorEnv` is; the learner calls it between two graphs
(`runtime/learners/simulated.py`), and nothing is copied to the host. Evaluation and prediction see it as an ordinary
vector environment of arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.envs.spaces import Obs as ArrayObs
from rl_training.envs.tensor.base import Obs
from rl_training.envs.vector import EnvState, Episode, Restored, Step, VectorEnv
from rl_training.ops.tree import tree_map, where_rows
from rl_training.spec import Array, EnvSpec


class SimStep(NamedTuple):
    """`final_obs` is the true next observation; `obs` is the one to act on, which differs where an episode ended."""

    obs: Obs  # encoded as `spec` says: a tensor [N, ...], or a dict of them
    final_obs: Obs
    rewards: Tensor  # f32[N]
    terminated: Tensor  # bool[N]
    truncated: Tensor  # bool[N], never where terminated


class Simulator(ABC):
    """N environments that reset themselves when an episode ends."""

    spec: EnvSpec
    num_envs: int
    resets = 0  # calls of `reset`: who steps it notices that somebody else has used it in between
    final_known = True  # does it return the final observations of episodes?

    @abstractmethod
    def reset(self) -> Obs:
        """Begin an episode in every environment."""

    @abstractmethod
    def step(self, actions: Tensor, seen: Obs) -> SimStep:
        """`actions` are the policy's, and `seen` the observations that they were chosen for."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its tensors are, known after `reset`."""

    def get_arrays(self) -> dict[str, Array] | None:
        """The state of the running episodes; None where it cannot be read."""
        return None

    def set_arrays(self, arrays: dict[str, Array]) -> None:
        raise NotImplementedError


def sim_step(obs: Obs, final_obs: Obs, rewards: Tensor, terminated: Tensor, truncated: Tensor) -> SimStep:
    """Step all environments. `final_obs` is used where an episode ended."""
    terminated, truncated = terminated.to(torch.bool), truncated.to(torch.bool)
    final = where_rows(terminated | truncated, final_obs, obs)
    return SimStep(obs, final, rewards.to(torch.float32), terminated, truncated & ~terminated)


class SimulatorVectorEnv(VectorEnv):
    """A simulator as a vector environment. In training, the learner steps `simulator` itself. It is never closed,
    because it belongs to the user, who may continue to use it."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.spec, self.num_envs = simulator, simulator.spec, simulator.num_envs
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        self._seen: Any = None

    def reset(self, *, episode: int | None = None) -> ArrayObs:
        self._seen = tree_map(torch.clone, self.simulator.reset())
        self._returns[:], self._lengths[:] = 0.0, 0
        return self.current_obs()

    def step(self, actions: Array) -> Step:
        chosen = torch.as_tensor(np.asarray(actions)).to(self.simulator.device)
        step = tree_map(torch.clone, self.simulator.step(chosen, self._seen))
        self._seen = step.obs
        arrays: Any = tree_map(lambda x: x.cpu().numpy(), step)
        obs, final_obs, rewards, terminated, truncated = arrays
        self._returns += rewards
        self._lengths += 1
        done = terminated | truncated
        ended = [Episode(i, float(self._returns[i]), int(self._lengths[i])) for i in np.flatnonzero(done).tolist()]
        self._returns[done], self._lengths[done] = 0.0, 0
        return Step(obs, final_obs, rewards, terminated, truncated, np.ones(self.num_envs, np.bool_), ended)

    def current_obs(self) -> ArrayObs:
        obs: ArrayObs = tree_map(lambda x: x.cpu().numpy(), self._seen)
        return obs

    def get_state(self) -> EnvState:
        arrays = self.simulator.get_arrays()
        return EnvState({"sub_envs": [{"method": "lost" if arrays is None else "state"}]}, arrays or {})

    def set_state(self, state: EnvState) -> Restored:
        if state.meta["sub_envs"] != [{"method": "state"}]:
            self.reset()
            return "restarted"
        self.simulator.set_arrays(state.arrays)
        return "exact"

    def close(self) -> None:
        """Do nothing, because the simulator belongs to the user."""
