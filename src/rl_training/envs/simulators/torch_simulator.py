"""Simulators with the conventions of Isaac Lab and ManiSkill: `reset() -> (obs, info)` and `step(actions) -> (obs,
rewards, terminated, truncated, info)` on batches of tensors, with episodes that restart inside `step`.

The final observation of an episode is `final_obs` or `final_observation` in info, a batch like the observations. Where
there is none, a step that a time limit ended bootstraps from the observation before it, as in rsl_rl (Schwarke et al.
2025): r + gamma V(s) instead of r + gamma V(s').
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.envs.simulators.base import SimStep, Simulator, sim_step
from rl_training.envs.simulators.conventions import POLICY, attribute, torch_spaces
from rl_training.envs.simulators.encoding import TensorDecoder, TensorEncoder
from rl_training.envs.spaces import make_spec
from rl_training.envs.tensor.base import Obs
from rl_training.envs.vector import EnvError

FINAL = ("final_obs", "final_observation")


class TorchSimulator(Simulator):
    def __init__(self, env: Any, name: str, masks: bool = False) -> None:
        self.env, self.num_envs = env, int(attribute(env, "num_envs"))
        whole = attribute(env, "single_observation_space")
        space, action_space = torch_spaces(env)
        self._part = POLICY if space is not whole else None
        limit = getattr(attribute(env, "spec"), "max_episode_steps", None) or attribute(env, "max_episode_length")
        self.spec = make_spec(name, space, action_space, int(limit) if isinstance(limit, int) else None, masks)
        self._encode = TensorEncoder(space, name, masks)
        self._decode = TensorDecoder(self.spec.action, action_space)
        self._device = torch.device(attribute(env, "device"))
        self.final_known = False  # until one was seen

    @property
    def device(self) -> torch.device:
        return self._device

    def reset(self) -> Obs:
        self.resets += 1
        try:
            obs, _ = self.env.reset()
        except (TypeError, ValueError) as error:
            if "unpack" not in str(error):
                raise
            raise EnvError(f"{self.spec.env_id}: reset() must return obs, info ({error})") from error
        return self._encoded(obs)

    def step(self, actions: Tensor, seen: Obs) -> SimStep:
        try:
            raw, rewards, terminated, truncated, info = self.env.step(self._decode(actions))
        except (TypeError, ValueError) as error:
            if "unpack" not in str(error):
                raise
            rule = "step() must return obs, rewards, terminated, truncated, info"
            raise EnvError(f"{self.spec.env_id}: {rule} ({error})") from error
        obs = self._encoded(raw)
        columns = [self._column(*row) for row in (("rewards", rewards), ("terminated", terminated),
                                                  ("truncated", truncated))]  # fmt: skip
        final = next((info[name] for name in FINAL if name in info), None)
        self.final_known |= final is not None
        return sim_step(obs, seen if final is None else self._encoded(final), *columns)

    def _encoded(self, obs: Any) -> Obs:
        """`obs` may be just the part that policies read."""
        part = obs[self._part] if self._part is not None and isinstance(obs, dict) else obs
        return self._encode(part, self.num_envs)

    def _column(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.numel() != self.num_envs:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise EnvError(f"{self.spec.env_id}: {name} must be a tensor of {self.num_envs} numbers, not {what}")
        return value.reshape(self.num_envs)
