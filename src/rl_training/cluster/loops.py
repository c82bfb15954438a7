"""The training loops of the driver, which learns from the unrolls of rollout actors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.prior_data import PriorFields
from rl_training.cluster.actors import GradientActor, PolicyOrder, RolloutActor
from rl_training.cluster.fleet import Arrived, Fleet
from rl_training.cluster.learners import Peers, count_steps, load_unroll
from rl_training.cluster.settings import ClusterSettings
from rl_training.cluster.shards import ShardedReplayLearner, Shards, StagedBatches
from rl_training.errors import UserError
from rl_training.ops.grad import Outcome, gradient_exchange
from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.engine.executor import Executor, Mode, choose_mode
from rl_training.runtime.learners.rollout import RolloutLearner
from rl_training.runtime.loops.off_policy import OffPolicyLoop
from rl_training.runtime.loops.on_policy import OnPolicyLoop
from rl_training.runtime.loops.phases import PhasedLoop


def policy_order(algorithm: Algorithm[Any], seeds: Sequence[int], total: int, learner: Mode) -> PolicyOrder:
    """Actors compile their policy where the learner was told to; otherwise they start at once."""
    mode = choose_mode("compile" if learner == "compile" else "auto", torch.device("cpu"), 0, 1).mode
    if learner == "eager":
        mode = "eager"
    settings = algorithm.hp.model_dump(mode="json")
    return PolicyOrder(algorithm.name, settings, algorithm.spec, seeds[0], algorithm.num_envs, total, mode)


class RolloutLoop(OnPolicyLoop):
    """One unroll of every actor with the current parameters, then learning, as in one process: synchronous. Several
    learners share the unrolls."""

    asynchronous = False
    kind = RolloutActor

    def make_learner(self, executor: Executor) -> RolloutLearner:
        algorithm = self.algorithm
        assert isinstance(self.envs, Fleet)
        self.fleet, settings = self.envs, self.envs.settings
        self._check(settings)
        self.own = settings.actors // settings.learners  # unrolls for each learner
        rows = self.own * self.fleet.each
        learner = RolloutLearner(algorithm, self.seeds, rows, self.total, executor)
        if learner.prior is not None:
            raise UserError(
                f"{algorithm.name} learns from data beside its rollouts, which a cluster does not distribute"
            )
        self.fleet.driver_rows, self.fleet.kind = rows, self.kind
        order = policy_order(algorithm, self.seeds, self.total, executor.mode)
        connection = self.fleet.launch(order, self.hp.n_steps, settings.learners - 1)
        self.peers = Peers(connection, order, learner, settings.learners - 1)
        self.fleet.leave = self.peers.leave
        return learner

    def _check(self, settings: ClusterSettings) -> None:
        name, hp = self.algorithm.name, self.hp
        if self.asynchronous and hp.normalize_rewards:
            raise UserError(
                f"{name} on a cluster cannot use normalize_rewards: its unrolls come in any order; set it to false"
            )
        if settings.learners == 1:
            return
        if settings.actors % settings.learners:
            raise UserError(f"{settings.actors} actors cannot be shared out evenly among {settings.learners} learners")
        if hp.normalize_rewards or hp.normalize_observations:
            raise UserError(
                f"{name} cannot normalise rewards or observations with several learners: each has its own data"
            )
        hp.check_rollout(self.num_envs // settings.learners)

    def advance(self, until: int) -> None:
        self.start()
        while self.env_steps < until and not self.should_stop():
            unrolls = self._gather()
            if unrolls is None:
                return
            metrics, updates = self._learn(unrolls)
            self.fleet.publish(self.learner.train)
            self.metrics = {**self.metrics, **metrics}
            self.gradient_steps += updates

    def _count(self, unrolls: list[Arrived]) -> int:
        steps = sum(arrived.unroll.steps for arrived in unrolls)
        self.env_steps += steps
        count_steps(self.learner, steps)
        for arrived in unrolls:
            self.episodes.add(arrived.unroll.episodes)
        return steps

    @torch.no_grad()
    def _learn(self, unrolls: list[Arrived]) -> tuple[dict[str, Tensor], int]:
        """Put the driver's share of the unrolls into its rollout, and learn from all of them."""
        columns = self.fleet.fetch(unrolls[: self.own])
        if columns is None:
            return {}, 0
        for place, one in enumerate(columns):
            load_unroll(self.learner, place, one, self.hp.n_steps)
        steps = self._count(unrolls)
        if not self.peers.handles:
            return self.learner.learn()
        refs = [arrived.data for arrived in unrolls[self.own :]]
        shares = [refs[i : i + self.own] for i in range(0, len(refs), self.own)]
        return self.peers.learn(shares, steps, self.hp.n_steps)

    def start(self) -> None:
        super().start()
        if not self.fleet.version:
            self.fleet.publish(self.learner.train)

    def _gather(self) -> list[Arrived] | None:
        """The unrolls of the next update; None if a stop is requested. In any order, or one of each actor."""
        found: dict[int, Arrived] = {}
        actors = self.fleet.settings.actors
        while len(found) < actors:
            for k in range(actors):
                if self.asynchronous:
                    self.fleet.request(k, self.env_steps, random=False, queue=self.fleet.settings.queue)
                elif k not in found:
                    self.fleet.request(k, self.env_steps, random=False, queue=1)
            arrived = self.fleet.next(self.should_stop)
            if arrived is not None:
                found[len(found) if self.asynchronous else arrived.actor] = arrived
            elif self.should_stop():
                return None
        return [found[k] for k in range(actors)]

    def train_metrics(self, index: int) -> dict[str, float]:
        peers = {"cluster/learners_replaced": float(self.peers.replaced)} if self.peers.handles else {}
        return {**super().train_metrics(index), **self.fleet.metrics(), **peers}


class AsyncRolloutLoop(RolloutLoop):
    """Learns from the unrolls that are complete first; the policy that collected them lags behind (IMPALA)."""

    asynchronous = True


class GradientLoop(RolloutLoop):
    """Actors send gradients, which the driver applies as they arrive, however old they are (A3C)."""

    asynchronous = True
    kind = GradientActor

    def make_learner(self, executor: Executor) -> RolloutLearner:
        learner = super().make_learner(executor)
        first, *others = learner.phases
        if others or first.times > 1 or first.batch_size or self.hp.normalize_observations:
            raise UserError(f"{self.algorithm.name} cannot send gradients: each rollout must be one plain step")
        with torch.no_grad():  # the gradients come from elsewhere: an update needs a batch, but does not read it
            self.batch = learner._stage("rollout", learner.prepare_fn(learner.tree)[1])
        return learner

    def _gather(self) -> list[Arrived] | None:
        for k in range(self.fleet.settings.actors):
            self.fleet.request(k, self.env_steps, random=False, queue=self.fleet.settings.queue)
        arrived = self.fleet.next(self.should_stop)
        return None if arrived is None and self.should_stop() else [arrived] if arrived is not None else []

    def _learn(self, unrolls: list[Arrived]) -> tuple[dict[str, Tensor], int]:
        received = self.fleet.fetch(unrolls)
        if received is None:
            return {}, 0
        self._count(unrolls)
        metrics: dict[str, Tensor] = {}
        for outcomes in received:
            with gradient_exchange(partial(self._received, iter(outcomes))):
                metrics = self.learner._steps[self.learner.phases[0].name](self.learner.tree, self.batch)
        return metrics, len(unrolls)

    def _received(self, outcomes: Iterator[Any], compute: Callable[[], Outcome]) -> Outcome:
        """The gradient that the actor has computed; the driver computes none."""
        value, aux, grads = tree_map(lambda x: torch.tensor(x, device=self.learner.device), next(outcomes))
        return value, aux, grads


class ReplayLoop(PhasedLoop):
    """Unrolls go to the replay shards. The learner takes as many gradient steps per environment step as in one process:
    data is never used more often than configured, and actors wait when the learner falls behind."""

    learner: ShardedReplayLearner
    turns = 0  # steps of all environments that learning has caught up with

    def make_learner(self, executor: Executor) -> ShardedReplayLearner:
        algorithm = self.algorithm
        assert isinstance(self.envs, Fleet)
        self.fleet, settings = self.envs, self.envs.settings
        _require_plain_replay(algorithm)
        if settings.learners > 1:
            raise UserError(f"{algorithm.name} learns from replay, which one learner does; set cluster.learners to 1")
        learner = ShardedReplayLearner(
            algorithm, self.seeds, self.num_envs, self.total, executor, store=StagedBatches(self.num_envs)
        )
        order = policy_order(algorithm, self.seeds, self.total, executor.mode)
        connection = self.fleet.launch(order, settings.unroll_length, settings.replay_shards)
        self.shards = Shards(
            connection, order, settings.replay_shards, settings.actors, self.fleet.each, settings.unroll_length
        )
        learner.shards = self.shards
        learner.least = max(1, math.ceil(self.hp.learning_starts / settings.replay_shards / 2))
        return learner

    planned_updates = staticmethod(OffPolicyLoop.planned_updates)
    check = OffPolicyLoop.check

    def advance(self, until: int) -> None:
        self.start()
        if not self.fleet.version:
            self.fleet.publish(self.learner.train)
        while self.env_steps < until and not self.should_stop():
            if not self._learn():
                return
            warm_up = self.hp.random_warmup and self.env_steps < self.hp.learning_starts
            for k in range(self.fleet.settings.actors):
                self.fleet.request(k, self.env_steps, random=warm_up, queue=self.fleet.settings.queue)
            arrived = self.fleet.next(self.should_stop)
            if arrived is None:
                continue
            self.shards.add(arrived)
            self.env_steps += arrived.unroll.steps
            count_steps(self.learner, arrived.unroll.steps)
            self.episodes.add(arrived.unroll.episodes)

    def _learn(self, *, to_the_end: bool = False) -> bool:
        """Run the phases of all turns that have been collected. Returns False if a stop was requested on the way."""
        self.learner.progress = min(1.0, self.env_steps / self.total)
        before = self.gradient_steps
        while self.turns < self.env_steps // self.num_envs:
            if (self.turns + 1) * self.num_envs >= self.hp.learning_starts:
                done = self.run_phases(self.learner, self.learner.phases, self.turns + 1, to_the_end=to_the_end)
                if not done:
                    return False
            self.turns += 1
        if self.gradient_steps > before:
            self.fleet.publish(self.learner.train)
        return True

    def finish(self) -> None:
        self._learn(to_the_end=True)

    def train_metrics(self, index: int) -> dict[str, float]:
        self.fleet.waited, self.shards.waited = self.fleet.waited + self.shards.waited, 0.0
        return {**super().train_metrics(index), **self.fleet.metrics(), **self.shards.metrics()}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {**super().tensors(), "replay": self.shards.saved()}

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), "turns": self.turns, "shards": self.shards.counters()}

    def load_counters(self, counters: dict[str, Any]) -> None:
        super().load_counters(counters)
        self.turns = int(counters["turns"])

    def load(self, tensors: Any, counters: dict[str, Any]) -> Any:
        self.shards.load(tensors["replay"], counters["shards"])
        empty = {f"index.{name}": x for name, x in tree_items(self.learner.tree["data"])}
        return super().load({**tensors, "replay": empty}, counters)


def _require_plain_replay(algorithm: Algorithm[Any]) -> None:
    """Refuse what needs more than transitions from a replay buffer."""
    phases = algorithm.phases()
    plain = all(phase.source == "replay" and phase.also is None and phase.sink is None for phase in phases)
    extra = set(algorithm.sources(1)) - {"replay"}
    if not plain or extra or isinstance(algorithm.hp, PriorFields) or algorithm.sees_rewards:
        raise UserError(
            f"the loop of {algorithm.name} cannot be distributed: it learns from more than a replay buffer of"
            " transitions; use cluster.inference: learner, which distributes its environments only"
        )
