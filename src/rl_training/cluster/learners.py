"""Several learners: each learns from its own part of the data, and gradients are averaged with torch.distributed.

The driver is the first learner; the others are actors. All begin with the same state and take the same steps with the
same averaged gradients, so their parameters stay equal without being sent. A learner that dies is replaced, and gets
the state of the driver.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_training.cluster.actors import Arrays, PolicyOrder, unpack
from rl_training.cluster.connection import Connection
from rl_training.errors import UserError
from rl_training.ops.grad import Outcome, gradient_exchange
from rl_training.ops.tree import fill, tree_items, tree_leaves
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import Learner
from rl_training.runtime.learners.rollout import RolloutLearner

log = logging.getLogger(__name__)
MAX_FAILURES = 5  # in a row
_LIMIT = timedelta(seconds=120)  # for the others to reach the same gradient


def average(compute: Callable[[], Outcome]) -> Outcome:
    """The gradients of all learners together; value and metrics are this learner's own."""
    value, aux, grads = compute()
    for gradient in tree_leaves(grads):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return value, aux, grads


def join(rank: int, size: int, address: str, device: str) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=size, timeout=_LIMIT)


def load_unroll(learner: RolloutLearner, place: int, columns: Arrays, length: int) -> None:
    """Copy an unroll into its place in the rollout of a learner."""
    whole = unpack(columns, length)
    size = len(whole["valid"])
    for name, column in tree_items(learner.tree["data"]):
        if name != "count":
            column[0, place * size : (place + 1) * size].copy_(torch.from_numpy(whole[name].copy()))


def count_steps(learner: Learner, steps: int) -> None:
    """Advance the clock of the schedules."""
    tree = learner.tree
    tree["env_steps"].add_(steps)
    tree["train"].progress.copy_(torch.clamp(tree["env_steps"] / tree["horizon"], max=1.0))


class LearnerActor:
    """A learner beside the driver's."""

    def __init__(self, policy: PolicyOrder, envs: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        executor = Executor("eager", torch.device(self.device))
        self.learner = RolloutLearner(policy.build(self.device), (policy.seed,), envs, policy.total, executor)

    def join(self, rank: int, size: int, address: str, state: Arrays, rollouts: int) -> None:
        """Take part in a group of learners, from the driver's state on."""
        join(rank, size, address, self.device)
        fill(learner_state(self.learner), {name: torch.from_numpy(x.copy()) for name, x in state.items()}, "")
        self.learner.rollouts = rollouts

    def learn(self, steps: int, length: int, *unrolls: Arrays) -> float:
        with torch.no_grad():
            for place, columns in enumerate(unrolls):
                load_unroll(self.learner, place, columns, length)
            count_steps(self.learner, steps)
        with gradient_exchange(average):
            self.learner.learn()
        return checksum(self.learner)


def learner_state(learner: Learner) -> dict[str, Any]:
    """What learners must agree on."""
    return {name: learner.tree[name] for name in ("train", "keys", "env_steps")}


def checksum(learner: Learner) -> float:
    """A number that is the same for the same parameters."""
    return float(sum(x.double().sum() for x in tree_leaves(learner.train.params)))


class Peers:
    """The other learners as the driver sees them."""

    def __init__(self, connection: Connection, policy: PolicyOrder, learner: RolloutLearner, count: int) -> None:
        self.connection, self.ray, self.policy, self.learner = connection, connection.ray, policy, learner
        self.handles: list[Any] = [None] * count
        self.replaced = 0
        self._failures = 0
        self._joined = False

    def _start(self) -> None:
        """Replace learners that are gone, and form a new group with the driver's state."""
        envs = self.learner.num_envs
        for k, handle in enumerate(self.handles):
            if handle is None:
                self.handles[k] = self.connection.actor(LearnerActor, self.policy, envs)
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address, size = f"{self.ray.util.get_node_ip_address()}:{port}", len(self.handles) + 1
        state = self.ray.put({n: x.cpu().numpy().copy() for n, x in tree_items(learner_state(self.learner))})
        refs = [
            handle.join.remote(rank, size, address, state, self.learner.rollouts)
            for rank, handle in enumerate(self.handles, 1)
        ]
        join(0, size, address, self.learner.device.type)
        self.ray.get(refs)
        self._joined = True

    def learn(self, shares: Sequence[Sequence[Any]], steps: int, length: int) -> tuple[dict[str, Tensor], int]:
        """`learner.learn()` in all learners. `shares`: references to the unrolls of each of the others."""
        from ray.exceptions import RayError

        refs: list[Any] = []
        before = self.learner.rollouts
        try:
            if not self._joined:
                self._start()
            refs = [handle.learn.remote(steps, length, *share) for handle, share in zip(self.handles, shares)]
            with gradient_exchange(average):
                outcome = self.learner.learn()
            sums = self.ray.get(refs)
            self._failures = 0
        except (RuntimeError, RayError) as error:  # torch.distributed raises RuntimeError when a learner is gone
            self._recover(error)
            self.learner.rollouts = before + 1
            return {}, 0
        if any(abs(x - checksum(self.learner)) > 1e-6 * max(1.0, abs(x)) for x in sums):
            raise UserError(
                f"{self.learner.algorithm.name} cannot use several learners: it does not learn by gradients that can be"
                " averaged; set cluster.learners to 1"
            )
        return outcome

    def _recover(self, error: Exception) -> None:
        self._failures += 1
        if self._failures > MAX_FAILURES:
            raise error
        log.warning("learners lost contact, one rollout is lost: %s", type(error).__name__)
        self.leave()
        for k, handle in enumerate(self.handles):
            if handle is not None:  # the others wait for a gradient that never comes
                self.connection.end(handle)
                self.handles[k] = None
        self.replaced += 1

    def leave(self) -> None:
        """Leave the group of learners, with its connections."""
        self._joined = False
        if self.handles and dist.is_initialized():
            dist.destroy_process_group()
