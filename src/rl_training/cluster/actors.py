"""A rollout actor: a process with some environments and a copy of the policy, which sends unrolls of a fixed size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training import registry
from rl_training.algorithms.base import Algorithm
from rl_training.cluster.remote_envs import EnvOrder
from rl_training.data.storage import Storage, transition_columns
from rl_training.envs.vector import Episode
from rl_training.ops import rng
from rl_training.ops.grad import Outcome, gradient_exchange
from rl_training.ops.tree import fill, tree_items, tree_map
from rl_training.runtime.engine.executor import Executor, Mode
from rl_training.runtime.learners.base import Learner
from rl_training.runtime.learners.rollout import RolloutLearner
from rl_training.spec import EnvSpec

_ACTOR = 211  # random stream
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class PolicyOrder:
    """What a process needs to build the algorithm of a run."""

    algo: str
    settings: dict[str, Any]
    spec: EnvSpec
    seed: int
    num_envs: int  # of the whole run
    total: int
    mode: Mode

    def build(self, device: str = "cpu", **changes: Any) -> Algorithm[Any]:
        kind: type[Algorithm[Any]] = registry.entry(self.algo).load()
        fields = {**self.settings, **changes}
        return kind(self.spec, seed=self.seed, device=device, num_envs=self.num_envs, **fields)


class Unroll(NamedTuple):
    """What the driver learns about an unroll; the transitions travel separately."""

    version: int  # of the parameters that chose the actions
    steps: int  # transitions
    episodes: list[Episode]
    seconds: float


class RolloutActor:
    def __init__(self, envs: EnvOrder, policy: PolicyOrder, index: int, first: int, count: int, length: int) -> None:
        """Environments `first` to `first + count`; `index`: of the actor among `num_envs / count` of them."""
        device = "cuda" if torch.cuda.is_available() else "cpu"  # Ray hides GPUs that were not reserved
        self.envs, self.length, self.index = envs.make(first, count), length, index
        algorithm = policy.build(device, **ladder(policy.settings, index * count, count, policy.num_envs))
        self.learner = self.make_learner(algorithm, policy, count)
        self.learner.tree["keys"].copy_(rng.fold(rng.key_from_seed(policy.seed, _ACTOR), first))
        self.version = -1
        self.learner.load_reset(self.envs.reset())

    def make_learner(self, algorithm: Algorithm[Any], policy: PolicyOrder, count: int) -> Learner:
        """What chooses actions and keeps an unroll."""
        columns = {**transition_columns(policy.spec), "valid": ((), torch.bool), **algorithm.extra_columns()}
        store, executor = Storage(columns, self.length, count, ring=False), Executor(policy.mode, algorithm.device)
        return Learner(algorithm, store, (policy.seed,), policy.total, executor)

    def collect(self, weights: Arrays, version: int, env_steps: int, random: bool) -> tuple[Any, Unroll]:
        """One unroll with the given parameters. `env_steps`: of the whole run, for schedules."""
        started = time.perf_counter()
        steps, episodes = self.fill(weights, version, env_steps, random)
        return self.result(), Unroll(version, steps, episodes, time.perf_counter() - started)

    def fill(self, weights: Arrays, version: int, env_steps: int, random: bool) -> tuple[int, list[Episode]]:
        """Step the environments until the unroll is full: (transitions, episodes that ended)."""
        learner = self.learner
        tree = learner.tree
        if version != self.version:
            load_weights(tree["train"], weights)
            self.version = version
        tree["env_steps"].fill_(env_steps)
        tree["train"].progress.copy_(torch.clamp(tree["env_steps"] / tree["horizon"], max=1.0))
        steps = 0
        episodes: list[Episode] = []
        actions = learner.act()
        for i in range(self.length):
            if random:
                actions = learner.random_actions()
            step = self.envs.step(actions)
            learner.load_step(step, keep_invalid=True)
            first = self.index * self.envs.num_envs
            episodes += [episode._replace(index=first + episode.index) for episode in step.episodes]
            steps += int(np.count_nonzero(step.valid))
            if i < self.length - 1:
                actions = learner.interact()
        learner.write()
        tree["data"]["count"].zero_()
        return steps, episodes

    def result(self) -> Any:
        """What is sent for a full unroll: here the transitions."""
        data = self.learner.tree["data"]
        return pack({name: x[0].cpu().numpy() for name, x in tree_items(data) if name != "count"}, self.length)


class GradientActor(RolloutActor):
    """An actor that learns from its unroll itself and sends the gradient (A3C, Mnih et al. 2016)."""

    def make_learner(self, algorithm: Algorithm[Any], policy: PolicyOrder, count: int) -> Learner:
        return RolloutLearner(algorithm, (policy.seed,), count, policy.total, Executor("eager", algorithm.device))

    def result(self) -> Any:
        kept: list[Outcome] = []

        def keep(compute: Callable[[], Outcome]) -> Outcome:
            kept.append(compute())
            return kept[-1]

        assert isinstance(self.learner, RolloutLearner)
        with gradient_exchange(keep):
            self.learner.learn()
        self.version = -1  # it has taken a step of its own: the next unroll begins with the learner's parameters
        return [tree_map(lambda x: x.cpu().numpy(), outcome) for outcome in kept]


def weights_of(train: Any) -> Arrays:
    """The part of a training state that acting needs."""
    parts = {"params": train.params, "extra": train.extra}
    return {name: x.detach().cpu().numpy().copy() for name, x in tree_items(parts)}


def load_weights(train: Any, weights: Arrays) -> None:
    tensors: dict[str, Tensor] = {name: torch.from_numpy(x.copy()) for name, x in weights.items()}
    fill({"params": train.params, "extra": train.extra}, tensors, "")


def pack(columns: Arrays, length: int) -> Arrays:
    """The columns [N * T, ...] of an unroll for sending. Most next observations are those of the next row: only the
    others are sent."""
    ends = _ends(columns, length)
    return {name: x[ends] if name.partition(".")[0] == "next_obs" else x for name, x in columns.items()}


def unpack(columns: Arrays, length: int) -> Arrays:
    """Undo `pack`."""
    ends, out = _ends(columns, length), dict(columns)
    for name, sent in columns.items():
        part, _, rest = name.partition(".")
        if part == "next_obs":
            following = np.roll(columns[f"obs.{rest}" if rest else "obs"], -1, 0)
            following[ends] = sent
            out[name] = following
    return out


def _ends(columns: Arrays, length: int) -> np.ndarray:
    """Rows whose next observation is not in the next row."""
    ends: np.ndarray = columns["terminated"] | columns["truncated"] | ~columns["valid"]
    ends = ends.copy()
    ends[length - 1 :: length] = True
    return ends


def ladder(settings: dict[str, Any], first: int, count: int, total: int) -> dict[str, float]:
    """The part of an exploration ladder (`exploration_ladder` of DQN) that environments `first` to `first + count` of
    `total` stand on: the same ladder from another base, as e^(1 + a (f + i) / (T - 1)) = (e^s)^(1 + a' i / (C - 1))."""
    slope = settings.get("exploration_ladder", 0.0)
    if not slope or total == 1:
        return {}
    scale = 1.0 + slope * first / (total - 1)
    base = {k: settings[k] ** scale for k in ("exploration_initial_eps", "exploration_final_eps")}
    return {**base, "exploration_ladder": slope * (count - 1) / ((total - 1) * scale)}
