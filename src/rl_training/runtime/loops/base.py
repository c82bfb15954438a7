"""The base class of the training loops: a loop advances, counts its steps, and can be saved and continued."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.data.saved import restore, saved_tensors
from rl_training.envs.vector import EnvState, Episode, Restored, Step, VectorEnv
from rl_training.ops.tree import fill, tree_items
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import FIXED, Learner

WINDOW = 100  # finished episodes in rollout/ep_rew_mean, as in Stable-Baselines3


class EpisodeWindow:
    """The last finished episodes of each seed."""

    def __init__(self, seeds: int, num_envs: int) -> None:
        self.num_envs = num_envs
        self.windows: list[deque[tuple[float, int, float | None]]] = [deque(maxlen=WINDOW) for _ in range(seeds)]
        self.finished = [0] * seeds

    def add(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            seed = episode.index // self.num_envs
            self.windows[seed].append((episode.ret, episode.length, episode.success))
            self.finished[seed] += 1

    def metrics(self, seed: int) -> dict[str, float]:
        window = self.windows[seed]
        if not window:
            return {}
        returns, lengths, successes = zip(*window)
        metrics = {
            "rollout/ep_rew_mean": fmean(returns),
            "rollout/ep_len_mean": fmean(lengths),
            "rollout/episodes": self.finished[seed],
        }
        if None not in successes:
            metrics["rollout/success_rate"] = fmean(successes)
        return metrics

    def to_json(self) -> dict[str, Any]:
        return {"windows": [list(w) for w in self.windows], "finished": self.finished}

    def load_json(self, data: dict[str, Any]) -> None:
        def row(ret: float, length: int, success: float | None = None) -> tuple[float, int, float | None]:
            return float(ret), int(length), None if success is None else float(success)

        self.windows = [deque((row(*entry) for entry in w), maxlen=WINDOW) for w in data["windows"]]
        self.finished = [int(n) for n in data["finished"]]


class Loop(ABC):
    """A resumable training loop over one learner and (usually) one vector environment."""

    learner: Learner

    def __init__(
        self, algorithm: Algorithm[Any], envs: VectorEnv, seeds: Sequence[int], total: int, executor: Executor
    ) -> None:
        self.algorithm, self.envs, self.seeds, self.total = algorithm, envs, tuple(seeds), total
        self.hp: Any = algorithm.hp
        self.num_envs = envs.num_envs // len(self.seeds)
        self.episodes = EpisodeWindow(len(self.seeds), self.num_envs)
        self.env_steps = 0  # of each seed
        self.gradient_steps = 0  # of each seed
        self.metrics: dict[str, Tensor] = {}  # of the last update, [S] each
        self.should_stop: Callable[[], bool] = lambda: False
        self.observer: Callable[[Step], None] | None = None  # told every step of the environments
        self.started = False
        self.env_seconds = self.learn_seconds = 0.0  # spent stepping environments and learning, as the host sees it
        self.learner = self.make_learner(executor)

    @abstractmethod
    def make_learner(self, executor: Executor) -> Any:
        """The device side of the loop."""

    @abstractmethod
    def advance(self, until: int) -> None:
        """Train until `env_steps` reaches `until`, or a stop is requested. Returns at a point that can be saved."""

    @staticmethod
    @abstractmethod
    def planned_updates(hyper: Any, total: int, num_envs: int) -> int:
        """Gradient steps in a run of `total` steps; `execution: auto` decides by it."""

    @classmethod  # noqa: B027  # nothing to check is fine
    def check(cls, hyper: Any, num_envs: int) -> None:
        """Raise UserError for settings that do not go together."""

    def finish(self) -> None:  # noqa: B027  # most loops have nothing left to do
        """Learn from what is left when the budget is spent."""

    def start(self) -> None:
        if not self.started:
            self.learner.load_reset(self.envs.reset())
            self.started = True

    def step_envs(self, actions: np.ndarray, *, keep_invalid: bool = False) -> Step:
        start = perf_counter()
        step = self.envs.step(actions)
        self.env_seconds += perf_counter() - start
        self.on_step(step)
        self.learner.load_step(step, keep_invalid=keep_invalid)
        if step.episodes:
            self.episodes.add(step.episodes)
        taken = len(step.valid) if step.all_continue else int(np.count_nonzero(step.valid))
        self.env_steps += taken // len(self.seeds)
        if self.observer is not None:
            self.observer(step)
        return step

    def on_step(self, step: Step) -> None:  # noqa: B027  # most loops need nothing here
        """Called after a step of the environments and before it is loaded; `restart` may still begin episodes."""

    def bad_steps(self) -> list[int]:
        """The first non-finite update of each seed, or -1. Synchronises with the device."""
        values: list[int] = self.learner.tree["bad_step"].tolist()
        return values

    def train_metrics(self, index: int) -> dict[str, float]:
        """Metrics of the last update of one seed, as numbers. Synchronises with the device."""
        return {f"train/{k}": float(v.tolist()[index]) for k, v in self.metrics.items()}

    # --- saving --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of a checkpoint, by file and name."""
        tree = self.learner.tree
        state = {k: v for k, v in tree.items() if k not in FIXED}
        env_state = self.envs.get_state()
        self._env_meta = env_state.meta
        return {
            "state": {**dict(tree_items(state)), **dict(tree_items(self.learner.inputs, "inputs"))},
            "replay": saved_tensors(self.learner.store, tree["data"]),
            "envs": {k: torch.as_tensor(np.ascontiguousarray(v)) for k, v in env_state.arrays.items()},
        }

    def counters(self) -> dict[str, Any]:
        """The JSON part of a checkpoint. Call it after `tensors`."""
        return {
            "env_steps": self.env_steps,
            "gradient_steps": self.gradient_steps,
            "started": self.started,
            "episodes": self.episodes.to_json(),
            "env_state": self._env_meta,
            "metrics": {k: v.tolist() for k, v in self.metrics.items()},
        }

    def load_counters(self, counters: dict[str, Any]) -> None:
        self.env_steps, self.gradient_steps = int(counters["env_steps"]), int(counters["gradient_steps"])
        self.started = bool(counters["started"])
        device = self.learner.device
        self.metrics = {k: torch.tensor(v, device=device) for k, v in counters["metrics"].items()}
        self.episodes.load_json(counters["episodes"])

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> Restored:
        self.load_counters(counters)
        tree = self.learner.tree
        fill({k: v for k, v in tree.items() if k not in (*FIXED, "horizon")}, tensors["state"], "")
        fill(self.learner.inputs, tensors["state"], "inputs")
        self.learner.all_continue = False
        restore(self.learner.store, tree["data"], tensors["replay"])
        if not self.started:
            return "exact"
        arrays = {k: v.numpy() for k, v in tensors["envs"].items()}
        restored = self.envs.set_state(EnvState(counters["env_state"], arrays))
        if restored == "restarted":
            self.learner.store.cut(tree["data"])
            self.learner.load_reset(self.envs.current_obs(), lost=True)
        return restored
