"""All rollout actors as the driver sees them: unrolls in flight, failures, replacements, and metrics.

Each actor has at most `queue` unrolls in flight. When the driver takes one, it requests the next one with the newest
parameters. So an actor never runs further ahead, and a slow actor delays no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rl_training.cluster.actors import PolicyOrder, RolloutActor, Unroll, weights_of
from rl_training.cluster.connection import Connection
from rl_training.cluster.remote_envs import START_SECONDS, ActorEnvs, EnvOrder
from rl_training.cluster.settings import ClusterSettings
from rl_training.envs.vector import EnvState, Restored
from rl_training.errors import UserError
from rl_training.ops.tree import tree_map

_POLL = 0.2  # seconds between looks at stop requests and stuck actors
_INLINE = 1 << 16  # bytes of parameters that go with each order; larger ones are put into the object store once
_SHOWN = 16  # actors with metrics of their own


class Arrived(NamedTuple):
    actor: int
    unroll: Unroll
    data: Any  # reference to the columns


class Call(NamedTuple):
    actor: int
    data: Any
    ordered: float


class Fleet(ActorEnvs):
    """Takes the place of a vector environment, but cannot be stepped: `next` returns whole unrolls."""

    kind: type[RolloutActor] = RolloutActor

    def __init__(self, order: EnvOrder, settings: ClusterSettings, num_envs: int) -> None:
        super().__init__(order, settings, num_envs)
        self.driver_rows, self.lost_steps = num_envs, 0  # `driver_rows`: of the driver's learner
        self.leave: Callable[[], None] = lambda: None  # what the loop does before its actors end
        self._calls: dict[Any, Call] = {}  # by the reference that is waited for
        self._heard = [0.0] * settings.actors
        self._speed = [0.0] * settings.actors
        self._lag: deque[int] = deque(maxlen=100)
        self.waited, self._since = 0.0, time.monotonic()  # seconds that the learner has waited since then
        self.version, self._sent = 0, -1
        self._weights: Any = None  # of version `_sent`, or a reference to them

    def launch(self, policy: PolicyOrder, length: int, others: int) -> Connection:
        """Connect. Actors start with the first request; `others`: processes that the loop will start."""
        self.policy, self.length = policy, length
        return self.connect(others)

    # --- unrolls -----------------------------------------------------------------------------------------------------

    def publish(self, train: Any) -> None:
        """From now on, unrolls are collected with these parameters."""
        self.version += 1
        self._train = train

    def request(self, k: int, env_steps: int, *, random: bool, queue: int) -> None:
        """Request unrolls from an actor until `queue` are in flight."""
        if self._sent != self.version:
            weights = weights_of(self._train)
            small = sum(x.nbytes for x in weights.values()) <= _INLINE
            self._weights, self._sent = weights if small else self.ray.put(weights), self.version
        if self._actors[k] is None:
            self.start(k, self.kind, self.order, self.policy, k, self.first_env(k), self.each, self.length)
            self._heard[k] = time.monotonic() + START_SECONDS
        under_way = sum(call.actor == k for call in self._calls.values())
        for _ in range(queue - under_way):
            collect = self._actors[k].collect.options(num_returns=2)
            data, done = collect.remote(self._weights, self.version, env_steps, random)
            self._calls[done] = Call(k, data, time.monotonic())

    def next(self, should_stop: Callable[[], bool]) -> Arrived | None:
        """The unroll that is complete first; None if a stop is requested, or if an actor had to be replaced."""
        started = time.monotonic()
        try:
            while not should_stop():
                done, _ = self.ray.wait(list(self._calls), num_returns=1, timeout=_POLL)
                if done:
                    return self._take(done[0])
                if self._replace_stuck():
                    return None
            return None
        finally:
            self.waited += time.monotonic() - started

    def _take(self, done: Any) -> Arrived | None:
        from ray.exceptions import RayError, RayTaskError

        call = self._calls.pop(done)
        k = call.actor
        try:
            unroll: Unroll = self.ray.get(done)
        except RayTaskError as error:
            self._replace(k, str(error.cause), error.cause)
            return None
        except RayError as error:
            self._replace(k, type(error).__name__)
            return None
        self.failures[k], self._heard[k] = 0, time.monotonic()
        self._speed[k] = unroll.steps / max(unroll.seconds, 1e-9)
        self._lag.append(self.version - unroll.version)
        return Arrived(k, unroll, call.data)

    def fetch(self, unrolls: list[Arrived]) -> list[Any] | None:
        """The data of unrolls; None if some of it was lost with a machine. Then none of them is used."""
        from ray.exceptions import RayError

        try:
            found: list[Any] = self.ray.get([arrived.data for arrived in unrolls])
            return found
        except RayError:
            self.lost_steps += sum(arrived.unroll.steps for arrived in unrolls)
            return None

    def _replace_stuck(self) -> bool:
        now, limit = time.monotonic(), self.settings.timeout
        waiting: dict[int, float] = {}
        for call in self._calls.values():
            waiting.setdefault(call.actor, max(call.ordered, self._heard[call.actor]))
        stuck = [k for k, since in waiting.items() if now - since > limit]
        for k in stuck:
            self._replace(k, f"no answer within {limit:g} s")
        return bool(stuck)

    def _replace(self, k: int, reason: str, cause: Any = None) -> None:
        if isinstance(cause, UserError):
            raise cause
        lost = [ref for ref, call in self._calls.items() if call.actor == k]
        steps = (len(lost) + 1) * self.length * self.each
        for ref in lost:
            del self._calls[ref]
        self.lost_steps += steps
        self.end(k, reason, f", at most {steps} steps are lost")

    def metrics(self) -> dict[str, float]:
        """Metrics of the cluster for the log."""
        speeds = [speed for speed in self._speed if speed]
        elapsed = max(time.monotonic() - self._since, 1e-9)
        busy = 1.0 - self.waited / elapsed
        self.waited, self._since = 0.0, time.monotonic()
        out = {
            "cluster/actors": float(sum(actor is not None for actor in self._actors)),
            "cluster/actors_replaced": float(self.replaced),
            "cluster/lost_steps": float(self.lost_steps),
            "cluster/unrolls_under_way": float(len(self._calls)),
            "cluster/learner_busy": max(0.0, busy),
        }
        if speeds:
            out |= {"cluster/actor_fps_mean": fmean(speeds), "cluster/actor_fps_min": min(speeds)}
            out |= {f"cluster/actor_fps/{k}": speed for k, speed in enumerate(self._speed[:_SHOWN])}
        if self._lag:
            out |= {"cluster/staleness_mean": fmean(self._lag), "cluster/staleness_max": float(max(self._lag))}
        return out

    # --- the interface of a vector environment -----------------------------------------------------------------------

    def reset(self, *, episode: int | None = None) -> Any:
        return self.current_obs()

    def step(self, actions: Any) -> Any:
        raise NotImplementedError("rollout actors step their environments themselves")

    def current_obs(self) -> Any:
        """Placeholders in the right shape: the driver never acts."""
        return tree_map(lambda x: np.repeat(x, self.driver_rows, 0), self.first_obs)

    def get_state(self) -> EnvState:
        meta = {"generations": list(self.generations), "replaced": self.replaced, "lost_steps": self.lost_steps}
        return EnvState({"method": "rollout actors", **meta})

    def set_state(self, state: EnvState) -> Restored:
        """Running episodes are not saved: every actor begins new ones."""
        self.generations = [max(state.meta["generations"]) + 1] * len(self._actors)
        self.replaced, self.lost_steps = int(state.meta["replaced"]), int(state.meta["lost_steps"])
        return "restarted"

    def close(self) -> None:
        self.leave()
        super().close()
