"""The training loops for environments on the device. What they learn is what the loops for the host learn; only who
steps the environments differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.envs.tensor.vector import DeviceVectorEnv
from rl_training.envs.vector import Episode
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.on_device import DeviceEnvs
from rl_training.runtime.loops.base import EpisodeWindow, Loop
from rl_training.runtime.loops.off_policy import OffPolicyLoop
from rl_training.runtime.loops.on_policy import OnPolicyLoop

CHUNK = 64  # turns of a rollout that are one launch


class DeviceEpisodes(EpisodeWindow):
    """Means over the episodes that ended since the last reading; the totals stay on the device in between."""

    def __init__(self, totals: Tensor, num_envs: int) -> None:
        super().__init__(len(totals), num_envs)
        self.totals = totals  # [S, 3]: episodes, returns, lengths
        self.read = [[0.0, 0.0, 0.0] for _ in range(len(totals))]
        self.last: list[dict[str, float]] = [{} for _ in range(len(totals))]

    def add(self, episodes: Sequence[Episode]) -> None:
        raise NotImplementedError("episodes on the device are counted there")

    def metrics(self, seed: int) -> dict[str, float]:
        now: list[float] = self.totals[seed].tolist()
        count, returns, lengths = (a - b for a, b in zip(now, self.read[seed]))
        if count:
            self.read[seed] = now
            means = {"rollout/ep_rew_mean": returns / count, "rollout/ep_len_mean": lengths / count}
            self.last[seed] = {**means, "rollout/episodes": now[0]}
        return self.last[seed]

    def to_json(self) -> dict[str, Any]:
        return {"read": self.read, "last": self.last}

    def load_json(self, data: dict[str, Any]) -> None:
        self.read, self.last = data["read"], data["last"]


class DeviceLoop(Loop):
    """What both loops share: put before the loop of the host in the list of bases."""

    envs: DeviceVectorEnv

    def __init__(
        self, algorithm: Algorithm[Any], envs: DeviceVectorEnv, seeds: Sequence[int], total: int, executor: Executor
    ) -> None:
        super().__init__(algorithm, envs, seeds, total, executor)  # type: ignore[call-arg]
        self.device_envs = DeviceEnvs(envs.env, self.learner)
        self.episodes = DeviceEpisodes(self.learner.tree["env"]["totals"], self.num_envs)

    def start(self) -> None:
        self.started = True


class DeviceOnPolicyLoop(DeviceLoop, OnPolicyLoop):
    @torch.no_grad()
    def _collect(self, steps: int) -> None:
        self.device_envs.stored()  # by the last rollout
        for size in [CHUNK] * (steps // CHUNK) + [1] * (steps % CHUNK):
            self.device_envs.turns(size)
        self.learner.write()
        self.env_steps += steps * self.num_envs


class DeviceOffPolicyLoop(DeviceLoop, OffPolicyLoop):
    @torch.no_grad()
    def advance(self, until: int) -> None:
        self.start()
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
