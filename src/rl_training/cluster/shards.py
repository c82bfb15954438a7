"""Replay in actors: each shard stores the unrolls of some rollout actors, samples batches and takes priorities back.

Unrolls go from the rollout actor to its shard without passing through the driver. Batches are drawn several at a time
and requested ahead, so that the learner rarely waits (Horgan et al. 2018, section 3). Deviation: new transitions get
the highest priority so far; there, actors compute their first priorities themselves.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.phases import ReplayPhase
from rl_training.cluster.actors import Arrays, PolicyOrder, unpack
from rl_training.cluster.connection import Connection
from rl_training.cluster.fleet import Arrived
from rl_training.cluster.remote_envs import START_SECONDS
from rl_training.data.saved import restore, saved_tensors
from rl_training.data.storage import Batch, Data, Storage, map_columns, transition_columns
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_items, tree_map, tree_stack
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import first_seed
from rl_training.runtime.learners.replay import ReplayLearner, make_replay

log = logging.getLogger(__name__)
_SHARD = 223  # random stream
BATCHES = 4  # in one request
AHEAD = 2  # requests under way


class ReplayShard:
    """The process that holds a part of the replay: the environments of its rollout actors, lane by lane."""

    def __init__(self, policy: PolicyOrder, index: int, lanes: int, each: int, length: int, capacity: int) -> None:
        algorithm = policy.build(buffer_size=capacity)
        self.each, self.length, envs = each, length, lanes * each
        self.store: Any = algorithm.sources(envs).get("replay") or make_replay(algorithm, envs)
        self.data: Data = self.store.init(1, torch.device("cpu"))
        self.key = rng.fold(rng.key_from_seed(policy.seed, _SHARD), index)
        self.drawn = 0

        def rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros((1, envs, *shape), dtype=dtype)

        columns = {**transition_columns(policy.spec), **algorithm.extra_columns(), "valid": ((), torch.bool)}
        self.row = map_columns(rows, columns)
        executor = Executor("eager" if policy.mode == "eager" else "recorded", torch.device("cpu"))
        self._write = executor.wrap(self._write_fn, dict)

    def _write_fn(self, data: Data, row: Data) -> None:
        self.store.write(data, {name: x for name, x in row.items() if name != "valid"}, row["valid"])

    @torch.no_grad()
    def add(self, lane: int, columns: Arrays) -> int:
        """Store an unroll. Rows of the other lanes are written without being counted, so they change nothing."""
        rows, whole = slice(lane * self.each, (lane + 1) * self.each), unpack(columns, self.length)
        self.row["valid"].zero_()
        self.row["truncated"].zero_()
        places = [
            (x[0, rows], torch.from_numpy(whole[name].reshape(self.each, self.length, *x.shape[2:]).copy()))
            for name, x in tree_items(self.row)
        ]
        for t in range(self.length):
            for to, x in places:
                to.copy_(x[:, t])
            self._write(self.data, self.row)
        return int(np.count_nonzero(whole["valid"]))

    @torch.no_grad()
    def sample(self, batches: int, batch_size: int, progress: float) -> Batch:
        """Several batches, [K, B, ...]."""
        data, at, drawn = first_seed(self.data), torch.tensor(progress), []
        for _ in range(batches):
            drawn.append(self.store.sample(data, rng.fold(self.key, self.drawn), batch_size, at))
            self.drawn += 1
        return tree_map(lambda x: x.numpy(), tree_stack(drawn))

    @torch.no_grad()
    def feedback(self, indices: np.ndarray, priority: np.ndarray) -> None:
        """Take the new priorities of batches, [K, B] each. Later ones win."""
        for rows, value in zip(indices, priority):
            self.store.feedback(self.data, torch.from_numpy(rows.copy())[None], torch.from_numpy(value.copy())[None])

    def saved(self) -> Arrays:
        return {name: x.numpy() for name, x in saved_tensors(self.store, self.data).items()}

    def load(self, arrays: Arrays, drawn: int) -> None:
        restore(self.store, self.data, {name: torch.from_numpy(x.copy()) for name, x in arrays.items()})
        self.store.cut(self.data)  # the actors begin new episodes
        self.drawn = drawn


class Request(NamedTuple):
    shard: int
    generation: int
    ref: Any


class Shards:
    """All shards as the driver sees them."""

    def __init__(self, connection: Connection, policy: PolicyOrder, shards: int, actors: int, each: int, length: int):
        self.connection, self.ray, self.policy = connection, connection.ray, policy
        self.each, self.length, self.count = each, length, shards
        self.lanes = [len(range(k, actors, shards)) for k in range(shards)]  # actor i writes to shard i % shards
        self.capacity = math.ceil(policy.build().hp.buffer_size / shards)
        self.replaced = self.lost = 0
        self.waited = 0.0  # seconds for batches
        self.generations = [0] * shards
        self.stored = [0] * shards  # transitions written so far
        self.handles = [self._launch(k) for k in range(shards)]
        self._writes: deque[tuple[int, int, int, Any]] = deque()
        self._requests: deque[Request] = deque()
        self._turn = 0

    def _launch(self, k: int) -> Any:
        index = k + self.generations[k] * self.count
        order = (self.policy, index, self.lanes[k], self.each, self.length, self.capacity)
        return self.connection.actor(ReplayShard, *order)

    def add(self, arrived: Arrived) -> None:
        k = arrived.actor % self.count
        ref = self.handles[k].add.remote(arrived.actor // self.count, arrived.data)
        self.stored[k] += arrived.unroll.steps
        self._writes.append((k, self.generations[k], arrived.unroll.steps, ref))
        while len(self._writes) > 4 * sum(self.lanes):  # back-pressure: shards must keep up
            self._confirm(*self._writes.popleft())

    def _confirm(self, k: int, generation: int, steps: int, ref: Any) -> None:
        from ray.exceptions import RayError, RayTaskError

        try:
            self.ray.get(ref, timeout=START_SECONDS)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # the unroll was lost with its node
                self.lost += steps
                return
            raise
        except RayError:
            self._replace(k, generation)

    def _replace(self, k: int, generation: int) -> None:
        """Replace a shard that died by an empty one."""
        if generation != self.generations[k]:
            return
        log.warning("replay shard %d is replaced: %d stored transitions are lost", k, self.stored[k])
        self.connection.end(self.handles[k])
        self.lost += min(self.stored[k], self.capacity)
        self.replaced += 1
        self.generations[k] += 1
        self.stored[k] = 0
        self.handles[k] = self._launch(k)

    def prefetch(self, batch_size: int, progress: float, least: int) -> None:
        """Keep requests in flight, shard after shard. `least`: transitions that a shard needs before it is sampled."""
        ready = [k for k in range(self.count) if self.stored[k] >= least]
        while ready and len(self._requests) < AHEAD:
            k = ready[self._turn % len(ready)]
            self._turn += 1
            ref = self.handles[k].sample.remote(BATCHES, batch_size, progress)
            self._requests.append(Request(k, self.generations[k], ref))

    @property
    def requested(self) -> int:
        return len(self._requests)

    def batches(self) -> tuple[Request, Batch] | None:
        """The batches requested first; None if their shard was lost."""
        from ray.exceptions import RayError, RayTaskError

        request, started = self._requests.popleft(), time.monotonic()
        try:
            return request, self.ray.get(request.ref, timeout=START_SECONDS)
        except RayTaskError:
            raise
        except RayError:
            self._replace(request.shard, request.generation)
            return None
        finally:
            self.waited += time.monotonic() - started

    def feedback(self, request: Request, indices: np.ndarray, priority: np.ndarray) -> None:
        if request.generation == self.generations[request.shard]:
            self.handles[request.shard].feedback.remote(indices, priority)

    def saved(self) -> dict[str, Tensor]:
        """The tensors of all shards, for a checkpoint."""
        from ray.exceptions import RayError, RayTaskError

        out: dict[str, Tensor] = {}
        for k in range(self.count):
            try:
                arrays = self.ray.get(self.handles[k].saved.remote())
            except RayTaskError:
                raise
            except RayError:  # the shard has died, or its answer was lost with the machine
                self._replace(k, self.generations[k])
                arrays = self.ray.get(self.handles[k].saved.remote())
            out |= {f"shard{k}.{name}": torch.from_numpy(x.copy()) for name, x in arrays.items()}
        return out

    def load(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        self.generations = [int(g) for g in counters["generations"]]
        self.stored, self.replaced, self.lost = list(counters["stored"]), counters["replaced"], counters["lost"]
        self._turn = int(counters["turn"])
        for k in range(self.count):
            own = {
                name.removeprefix(f"shard{k}."): x.numpy()
                for name, x in tensors.items()
                if name.startswith(f"shard{k}.")
            }
            self.ray.get(self.handles[k].load.remote(own, self._turn * BATCHES))

    def counters(self) -> dict[str, Any]:
        return {"generations": self.generations, "stored": self.stored, "replaced": self.replaced, "lost": self.lost,
                "turn": self._turn}  # fmt: skip

    def metrics(self) -> dict[str, float]:
        held = sum(min(stored, self.capacity) for stored in self.stored)
        return {
            "cluster/replay_size": float(held),
            "cluster/replay_queue": float(len(self._requests)),
            "cluster/shards_replaced": float(self.replaced),
            "cluster/lost_transitions": float(self.lost),
        }


class StagedBatches(Storage):
    """The source of updates in the driver: batches that a shard has sampled, read one after the other. It is empty
    until the first ones arrive, because only a shard knows their columns."""

    def __init__(self, num_envs: int) -> None:
        super().__init__({}, 1, num_envs)

    def cut(self, data: Data) -> None:
        """Nothing to do: the shards hold the transitions."""

    def stage(self, data: Data, arrays: Batch, device: torch.device) -> None:
        """Copy batches [K, B, ...] into place."""
        tensors = tree_map(lambda x: torch.from_numpy(x.copy())[None], arrays)
        if "batches" not in data:
            data["batches"] = tree_map(lambda x: torch.empty_like(x, device=device), tensors)
            data["cursor"] = torch.zeros(1, dtype=torch.int64, device=device)
            data["priority"] = torch.zeros(tensors["indices"].shape, device=device)
        copy_into(data["batches"], tensors)
        data["cursor"].zero_()

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Batch:
        at = data["cursor"].view(1)
        return tree_map(lambda x: x.index_select(0, at).squeeze(0), data["batches"])

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        if priority is not None:
            data["priority"].index_copy_(1, data["cursor"], priority.unsqueeze(1))
        data["cursor"].add_(1)


class ShardedReplayLearner(ReplayLearner):
    """`update` runs on batches from the shards; the update itself is the one of every replay learner."""

    shards: Shards
    request: Request | None = None
    left = 0  # staged batches that were not used yet
    progress = 0.0
    least = 1  # transitions that a shard must have to be sampled

    def ready(self) -> bool:
        """Is a batch staged? If not, stage the next ones. False if no shard has enough transitions."""
        if self.left:
            return True
        found = None
        while found is None:
            self.shards.prefetch(self.batch_size, self.progress, self.least)
            if not self.shards.requested:
                return False
            found = self.shards.batches()
        self.shards.prefetch(self.batch_size, self.progress, self.least)
        self.request, arrays = found
        assert isinstance(self.store, StagedBatches)
        with torch.no_grad():
            self.store.stage(self.tree["data"], arrays, self.device)
        self.left = len(arrays["indices"])
        return True

    def update(self, times: int, phase: ReplayPhase | None = None) -> dict[str, Tensor]:
        metrics = super().update(times, phase)
        self.left -= 1
        if not self.left and self.request is not None and self.algorithm.hp.prioritized:
            data = self.tree["data"]
            self.shards.feedback(
                self.request, data["batches"]["indices"][0].cpu().numpy(), data["priority"][0].cpu().numpy()
            )
        return metrics
