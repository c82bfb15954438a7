"""Environments in actors, everything else in the driver (`inference: learner`).

The driver chooses the actions of all environments in one batch and waits for all of them, in a fixed order. Every loop
runs unchanged on top of it, so a run has the same bits as in one process, and a checkpoint of either continues in the
other. An actor that dies or does not answer is replaced: its rows are reported as invalid and begin new episodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_training.cluster.connection import Connection
from rl_training.cluster.settings import ClusterSettings
from rl_training.envs.factory import find_spec
from rl_training.envs.given import GivenEnv, VectorSource
from rl_training.envs.state import pack, unpack
from rl_training.envs.sync import SyncVectorEnv, copy_rows
from rl_training.envs.vector import EnvError, EnvState, Episode, Restored, Step, VectorEnv
from rl_training.envs.workers import AsyncVectorEnv
from rl_training.errors import UserError
from rl_training.imports import check_address
from rl_training.ops.tree import tree_map
from rl_training.spec import Array, EnvSource

log = logging.getLogger(__name__)
MAX_FAILURES = 3  # in a row, of one actor
START_SECONDS = 300.0  # more time for the first answer: processes start and import


@dataclass(frozen=True)
class EnvOrder:
    """What a process needs to make environments of a run."""

    source: Any  # a spec, which works where the id is not registered, or a function
    arguments: dict[str, Any]
    seed: int
    masks: bool
    workers: bool  # step them in worker processes of the actor

    def make(self, first: int, count: int) -> VectorEnv:
        """Environments number `first` and the next ones. Numbers identify episodes: each is used only once."""
        places = [(self.seed, 0, first + n) for n in range(count)]
        if self.workers:
            return AsyncVectorEnv(self.source, places, self.arguments, masks=self.masks)
        return SyncVectorEnv(self.source, places, self.arguments, self.masks)


def env_order(
    source: EnvSource | GivenEnv, *, seeds: Sequence[int], vectorization: str, env_kwargs: dict[str, Any], masks: bool
) -> EnvOrder:
    """Describe the environments of a run for other processes, or say why they cannot be there."""
    if isinstance(source, GivenEnv | VectorSource):
        raise UserError("a cluster makes its environments in other processes: give an environment id or env_fn")
    if vectorization not in ("auto", "sync", "async"):
        raise UserError(
            f"a cluster steps its environments one by one: vectorization is auto, sync or async, not {vectorization}"
        )
    if len(seeds) > 1:
        raise UserError(f"a cluster trains one seed, not {len(seeds)}: use a sweep for several")
    sent: Any = find_spec(source) if isinstance(source, str) else source
    return EnvOrder(sent, env_kwargs, seeds[0], masks, vectorization == "async")


class EnvActor:
    """A process with some of the environments."""

    def __init__(self, order: EnvOrder, first: int, count: int) -> None:
        self.envs = order.make(first, count)

    def reset(self, episode: int | None) -> Any:
        return self.envs.reset(episode=episode)

    def step(self, actions: Array) -> Step:
        return self.envs.step(actions)

    def restart(self, rows: Sequence[int]) -> Any:
        self.envs.restart(rows)
        return self.envs.current_obs()

    def get_state(self) -> EnvState:
        return self.envs.get_state()

    def set_state(self, state: EnvState) -> tuple[Restored, Any]:
        return self.envs.set_state(state), self.envs.current_obs()


class ActorEnvs(VectorEnv):
    """Environments in actors: the start of an actor, and the end of one that failed."""

    connection: Connection | None = None

    def __init__(self, order: EnvOrder, settings: ClusterSettings, num_envs: int) -> None:
        probe = order.make(0, 1)  # a problem with the environment is found here, before Ray is started
        self.spec, self.first_obs = probe.spec, probe.reset()
        self.compute_reward, self.compute_terminated = probe.compute_reward, probe.compute_terminated
        probe.close()
        self.order, self.settings, self.num_envs, self.each = order, settings, num_envs, num_envs // settings.actors
        self.generations = [0] * settings.actors  # how often each actor was replaced
        self.replaced = 0
        self.failures = [0] * settings.actors  # in a row
        self._actors: list[Any] = [None] * settings.actors

    def connect(self, others: int = 0) -> Connection:
        """Reserve the actors, and one CPU for each of `others`, which are started elsewhere."""
        check_address(self.settings.address)
        count, cpus, gpus = self.settings.actors, self.settings.cpus_per_actor, self.settings.gpus_per_actor
        self.connection = Connection(self.settings.address, count * cpus + others, count * gpus)
        self.ray = self.connection.ray
        return self.connection

    def start(self, k: int, kind: type[Any], *arguments: Any) -> None:
        assert self.connection is not None
        cpus, gpus = self.settings.cpus_per_actor, self.settings.gpus_per_actor
        self._actors[k] = self.connection.actor(kind, *arguments, cpus=cpus, gpus=gpus)

    def first_env(self, k: int) -> int:
        """The number of an actor's first environment; a replacement gets new numbers."""
        return k * self.each + self.generations[k] * self.num_envs

    def end(self, k: int, reason: str, lost: str = "") -> None:
        """End an actor that failed; too many failures in a row end the run."""
        assert self.connection is not None
        self.failures[k] += 1
        if self.failures[k] > MAX_FAILURES:
            raise EnvError(f"rollout actor {k} failed {MAX_FAILURES + 1} times in a row; last reason: {reason}")
        log.warning("rollout actor %d is replaced%s: %s", k, lost, reason)
        self.connection.end(self._actors[k])
        self._actors[k] = None
        self.generations[k] += 1
        self.replaced += 1

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class RemoteEnvs(ActorEnvs):
    def __init__(self, order: EnvOrder, settings: ClusterSettings, num_envs: int) -> None:
        super().__init__(order, settings, num_envs)
        self.connect()
        for k in range(settings.actors):
            self._launch(k)
        self._obs: Any = None
        self._lost = np.zeros(num_envs, np.bool_)  # rows whose episode was lost outside `step`

    def _rows(self, k: int) -> slice:
        return slice(k * self.each, (k + 1) * self.each)

    def _launch(self, k: int) -> None:
        self.start(k, EnvActor, self.order, self.first_env(k), self.each)

    def _ask(self, call: Callable[[int, Any], Any]) -> list[Any]:
        """`call(k, actor)` of every actor; the answers in order. None where an actor failed and was replaced."""
        refs = [call(k, actor) for k, actor in enumerate(self._actors)]
        return [self._answer(k, ref) for k, ref in enumerate(refs)]

    def _answer(self, k: int, ref: Any, *, starting: bool = False) -> Any:
        """The result of a call; `starting`: the first call of a new process, which has to start first."""
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            more = START_SECONDS if starting or self._obs is None else 0.0
            return self.ray.get(ref, timeout=self.settings.timeout + more)
        except RayTaskError as error:
            raise EnvError(f"rollout actor {k}: {error.cause}") from error
        except RayError as error:  # its process died, or its answer was lost with the machine
            self._replace(k, "no answer" if isinstance(error, GetTimeoutError) else "its process died")
            return None

    def _replace(self, k: int, reason: str) -> None:
        self.end(k, reason)
        self._launch(k)
        self._lost[self._rows(k)] = True
        obs = self._answer(k, self._actors[k].reset.remote(None), starting=True)
        if obs is not None and self._obs is not None:  # else: a second failure has filled the rows already
            _write(self._obs, self._rows(k), obs)

    def reset(self, *, episode: int | None = None) -> Any:
        answers = self._ask(lambda k, actor: actor.reset.remote(episode))
        while any(obs is None for obs in answers):
            answers = self._ask(lambda k, actor: actor.reset.remote(episode))
        self._obs = _joined(answers)
        self._lost[:] = False
        return self._obs

    def step(self, actions: Array) -> Step:
        before, lost_before = self._obs, self._lost.copy()
        refs = [actor.step.remote(actions[self._rows(k)].copy()) for k, actor in enumerate(self._actors)]
        self._obs = tree_map(np.copy, before)
        steps: list[Step | None] = [self._answer(k, ref) for k, ref in enumerate(refs)]
        self._lost |= lost_before
        valid, rewards = np.ones(self.num_envs, np.bool_), np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        final = tree_map(np.copy, before)
        episodes: list[Episode] = []
        for k, step in enumerate(steps):
            if step is None:
                continue
            self.failures[k], rows = 0, self._rows(k)
            _write(self._obs, rows, step.obs)
            _write(final, rows, step.final_obs)
            rewards[rows], terminated[rows], truncated[rows] = step.rewards, step.terminated, step.truncated
            valid[rows] = step.valid
            episodes += [e._replace(index=e.index + rows.start) for e in step.episodes]
        if self._lost.any():
            lost, self._lost = self._lost, np.zeros_like(self._lost)
            valid &= ~lost
            rewards[lost], terminated[lost], truncated[lost] = 0.0, False, True
            copy_rows(before, final, lost)
            episodes = [e for e in episodes if not lost[e.index]]
        every = all(step is not None and step.all_continue for step in steps) and bool(valid.all())
        return Step(self._obs, final, rewards, terminated, truncated, valid, episodes, every)

    def restart(self, rows: Sequence[int]) -> bool:
        own = [[i - k * self.each for i in rows if i // self.each == k] for k in range(len(self._actors))]
        self._obs = tree_map(np.copy, self._obs)
        for k, obs in enumerate(self._ask(lambda k, actor: actor.restart.remote(own[k]))):
            if obs is not None:
                _write(self._obs, self._rows(k), obs)
        return True

    def current_obs(self) -> Any:
        return self._obs

    def get_state(self) -> EnvState:
        parts: list[Any] = [None]
        while any(part is None for part in parts):
            parts = self._ask(lambda k, actor: actor.get_state.remote())
        whole = pack([sub for part in parts for sub in unpack(part, self.each)])
        arrays = {name: array.copy() for name, array in whole.arrays.items()}  # Ray's arrays are read-only
        return EnvState({**whole.meta, "generations": list(self.generations)}, arrays)

    def set_state(self, state: EnvState) -> Restored:
        subs = unpack(state, self.num_envs)
        saved = state.meta.get("generations") or [0] * len(self._actors)
        if len(saved) != len(self._actors):
            raise UserError(f"the checkpoint has {len(saved)} rollout actors, but this run has {len(self._actors)}")
        assert self.connection is not None
        for k, generation in enumerate(saved):
            if generation != self.generations[k]:  # its episodes belong to environments with other numbers
                self.connection.end(self._actors[k])
                self.generations[k] = int(generation)
                self._launch(k)
        answers = self._ask(lambda k, actor: actor.set_state.remote(pack(subs[self._rows(k)])))
        if any(answer is None for answer in answers):
            self.reset()
            return "restarted"
        self._obs = _joined([obs for _, obs in answers])
        self._lost[:] = False
        return "exact" if all(restored == "exact" for restored, _ in answers) else "restarted"


def _write(target: Any, rows: slice, part: Any) -> None:
    """Write the rows of one actor's answer."""
    tree_map(lambda whole, own: np.copyto(whole[rows], own), target, part)


def _joined(parts: Sequence[Any]) -> Any:
    return tree_map(lambda *xs: np.concatenate(xs), *parts)
