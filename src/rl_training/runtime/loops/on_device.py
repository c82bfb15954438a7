"""The training loops for environments on the device. What they learn is what the loops for the host learn; only who
steps the environments differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.envs.simulators.base import SimulatorVectorEnv
from rl_training.envs.tensor.vector import DeviceVectorEnv
from rl_training.envs.vector import Episode
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.on_device import DeviceEnvs
from rl_training.runtime.learners.simulated import SimulatedEnvs
from rl_training.runtime.loops.base import EpisodeWindow, Loop
from rl_training.runtime.loops.off_policy import OffPolicyLoop
from rl_training.runtime.loops.on_policy import OnPolicyLoop

CHUNK = 64  # turns of a rollout that are one launch


class DeviceEpisodes(EpisodeWindow):
    """The last episodes of every environment: about a hundred, or one of each where there are more environments. They
    stay on the device, and in its checkpoint, and are read when they are logged."""

    def __init__(self, env: dict[str, Tensor], num_envs: int, seen: Callable[[], None]) -> None:
        """`seen` is called when there are finished episodes."""
        super().__init__(len(env["finished"]), num_envs)
        self.env, self.seen = env, seen

    def add(self, episodes: Sequence[Episode]) -> None:
        raise NotImplementedError("episodes on the device are counted there")

    def metrics(self, seed: int) -> dict[str, float]:
        finished = int(self.env["finished"][seed].sum())
        if not finished:
            return {}
        self.seen()
        ret, length = self.env["recent"][seed].flatten(0, 1).nanmean(0).tolist()
        return {"rollout/ep_rew_mean": ret, "rollout/ep_len_mean": length, "rollout/episodes": finished}

    def to_json(self) -> dict[str, Any]:
        return {}

    def load_json(self, data: dict[str, Any]) -> None:
        """Nothing: they are tensors."""


class DeviceLoop(Loop):
    """What both loops share: put before the loop of the host in the list of bases."""

    envs: DeviceVectorEnv | SimulatorVectorEnv

    def make_learner(self, executor: Executor) -> Any:
        learner = super().make_learner(executor)  # type: ignore[safe-super]
        self.device_envs: DeviceEnvs | SimulatedEnvs
        if isinstance(self.envs, SimulatorVectorEnv):
            self.device_envs = SimulatedEnvs(self.envs.simulator, learner)
        else:
            self.device_envs = DeviceEnvs(self.envs.env, learner)
        self.episodes = DeviceEpisodes(learner.tree["env"], self.num_envs, self.device_envs.on_episodes)
        return learner

    def start(self) -> None:
        self.started = True


class DeviceOnPolicyLoop(DeviceLoop, OnPolicyLoop):
    @torch.no_grad()
    def _collect(self, steps: int) -> None:
        self.device_envs.stored()  # by the last rollout
        self.device_envs.prepare()
        for size in [CHUNK] * (steps // CHUNK) + [1] * (steps % CHUNK):
            self.device_envs.turns(size)
        self.learner.write()
        self.env_steps += steps * self.num_envs


class DeviceOffPolicyLoop(DeviceLoop, OffPolicyLoop):
    @torch.no_grad()
    def advance(self, until: int) -> None:
        self.start()
        self.device_envs.prepare()
        while self.env_steps < until and not self.should_stop():
            if self.position is None:
                self._turn()
            if self.pending and not self._learn():
                return
            self.turns += 1
            self.pending = True
            self.env_steps += self.num_envs

    def _turn(self) -> None:
        if self.hp.random_warmup and self.env_steps < self.hp.learning_starts:
            self.learner.store_and_act()
            self.learner.choose_randomly()
            self.device_envs.step()
        else:
            self.device_envs.turns()

    def finish(self) -> None:
        if self.pending:
            self.learner.write()
            self._learn(to_the_end=True)
            self.device_envs.stored()
            self.pending = False
