"""Off-policy learning: sample from replay and other sources, update, write priorities and rows back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.algorithms.phases import ReplayPhase
from rl_training.algorithms.prior_data import PriorFields, mix_with_prior
from rl_training.algorithms.resets import Resets
from rl_training.data.frames import Frames
from rl_training.data.her import make_hindsight
from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.data.source import Sink, Source
from rl_training.data.storage import Batch, transition_columns
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_map, tree_stack
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import LEARN, SAMPLE, Learner, one_seed


def make_replay(
    algorithm: Algorithm[Any], num_envs: int, compute_reward: Callable[..., Any] | None = None,
    compute_terminated: Callable[..., Any] | None = None,
) -> Replay:  # fmt: skip
    """The replay that an algorithm's settings describe."""
    hp, spec = algorithm.hp, algorithm.spec
    options: dict[str, Any] = {"gamma": hp.gamma, "n_step": hp.n_step}
    if getattr(hp, "her", None) is not None:
        options["hindsight"] = make_hindsight(
            hp.her, spec.goal, compute_reward, algorithm.name, spec.env_id, compute_terminated
        )
    if hp.frame_stack > 1:
        if "hindsight" in options:
            raise UserError(f"{algorithm.name}: her and frame_stack cannot be combined; set frame_stack to 1")
        options["frames"] = Frames(spec, hp.frame_stack, algorithm.name)
    columns = {**transition_columns(spec), **algorithm.extra_columns()}
    if not hp.prioritized:
        return Replay(columns, hp.buffer_size, num_envs, **options)
    options |= {"alpha": hp.prioritized_alpha, "beta": hp.prioritized_beta}
    return PrioritizedReplay(columns, hp.buffer_size, num_envs, **options)


class ReplayLearner(Learner):
    """Off-policy: `update(n)` takes n steps of a phase on sampled batches."""

    def __init__(
        self, algorithm: Algorithm[Any], seeds: Sequence[int], num_envs: int, horizon: int, executor: Executor,
        compute_reward: Callable[..., Any] | None = None, store: Any = None,
        compute_terminated: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """`store` replaces the replay that the algorithm's settings describe."""
        own = algorithm.sources(num_envs)
        store = store or own.pop("replay", None) or make_replay(algorithm, num_envs, compute_reward, compute_terminated)
        own.pop("replay", None)
        super().__init__(algorithm, store, seeds, horizon, executor)
        self.batch_size = algorithm.hp.batch_size
        self.sources: dict[str, Source] = {"replay": store, **own}
        self.sinks: dict[str, Sink] = {k: v for k, v in self.sources.items() if isinstance(v, Sink)}
        self.tree["sources"] = {k: v.init(len(self.seeds), self.device) for k, v in own.items()}
        if isinstance(algorithm.hp, PriorFields):
            prior, self.sources["replay"] = mix_with_prior(algorithm, store)
            self.tree["prior"] = prior.init(len(self.seeds), self.device)
        self.phases = algorithm.phases()
        self.resets = Resets(algorithm)
        kinds = {name: kind for phase in self.phases for name, kind in phase.kinds.items()}
        self._steps = {
            name: executor.wrap(self.update_of(kind), self.small_state, whole=algorithm.compiled_as != "pieces")
            for name, kind in kinds.items()
        }
        self._steps_taken: int | None = None  # `train.step` on the host; read from the device at the first update

    def source_data(self, tree: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The tensors of the named sources."""

        def of(name: str) -> dict[str, Any]:
            if name == "replay" and "prior" in tree:
                return {"first": tree["data"], "second": tree["prior"]}
            own: dict[str, Any] = {} if name == "replay" else tree["sources"][name]
            return own or tree["data"]

        return {name: of(name) for name in names}

    def sample_one(self, phase: ReplayPhase, train: TrainState, key: Tensor, at: dict[str, Any]) -> Batch:
        """The batch of one seed that the next step of a phase reads; `at` are the tensors of its sources."""
        sample_key = rng.fold(rng.fold(key, SAMPLE), phase.clock(train) if phase.clock else train.step)
        batch: Batch = {}
        if phase.source is not None:
            size = self.batch_size if phase.batch_size is None else phase.batch_size
            batch = self.sources[phase.source].sample(at[phase.source], sample_key, size, train.progress)
        if phase.also is not None:
            name, size = phase.also
            more = self.sources[name].sample(at[name], rng.fold(sample_key, 1), size, train.progress)
            batch = {k: tree_map(lambda x, y: torch.cat([x, y]), batch[k], more[k]) for k in batch if k in more}
        if phase.sink is not None and "frontier" in at[phase.sink]:
            batch["frontier"] = at[phase.sink]["frontier"]
        return batch

    def update_of(self, phase: ReplayPhase) -> Callable[[dict[str, Any]], dict[str, Tensor]]:
        """Sample, take one step of the phase, and write the results back: one function, so one graph."""

        names = phase.sources  # read here: torch 2.10 cannot compile properties of named tuples

        def one(train: TrainState, key: Tensor, at: dict[str, Any]) -> Any:
            batch = self.sample_one(phase, train, key, at)
            new, aux = phase.step(train, batch, rng.fold(rng.fold(key, LEARN), train.step))
            out = {"train": new, "metrics": aux.metrics, "indices": batch.get("indices"), "priority": aux.priority,
                   "rows": aux.rows}  # fmt: skip
            return {k: v for k, v in out.items() if v is not None}  # vmap takes tensors only

        def update(tree: dict[str, Any]) -> dict[str, Tensor]:
            before = tree["train"].step.clone()
            data = self.source_data(tree, names)
            out = self.per_seed(one)(tree["train"], tree["keys"], data)
            if phase.source is not None and phase.also is None:  # the priorities of two sources have no common scale
                self.sources[phase.source].feedback(data[phase.source], out["indices"], out.get("priority"))
            if phase.sink is not None:
                self.sinks[phase.sink].append(data[phase.sink], out["rows"])
            copy_into(tree["train"], out["train"])
            metrics: dict[str, Tensor] = out["metrics"]
            self.note_metrics(tree, before, metrics)
            return metrics

        return update

    def ready(self) -> bool:
        """Is there a batch to learn from? Where transitions are stored elsewhere, it may have been lost."""
        return True

    def update(self, times: int, phase: ReplayPhase | None = None) -> dict[str, Tensor]:
        """`times` steps of a phase (the first one if none is given)."""
        phase = phase or self.phases[0]
        metrics: dict[str, Tensor] = {}
        for _ in range(times):
            metrics |= self._steps[self._next(phase)](self.tree)
            if self.resets.wanted and self.resets.due(self._steps_taken or 0):
                self.reset()
        return metrics

    @torch.no_grad()
    def reset(self) -> None:
        """Start again with new networks and optimisers, and the same replay."""
        states = [self.resets.apply(one_seed(self.train, i), seed) for i, seed in enumerate(self.seeds)]
        copy_into(self.train, tree_stack(states))

    def _next(self, phase: ReplayPhase) -> str:
        """The name of the function that the next call of a phase runs."""
        if phase.between is None and not self.resets.wanted:
            return phase.name
        if self._steps_taken is None:
            self._steps_taken = int(self.train.step.flatten()[0])
        due = phase.between is None or self._steps_taken % phase.period == 0
        self._steps_taken += 1
        return phase.name if due else f"{phase.name}/between"

    def batch_of_update(self, index: int, step: int) -> Batch:
        if len(self.phases) > 1:  # it is not known which of them that update was
            return {}
        train, key = one_seed((self.train, self.tree["keys"]), index)
        at_step = train._replace(step=torch.full_like(train.step, step))
        return self._next_batch(index, self.phases[0], at_step, key)

    def _next_batch(self, index: int, phase: ReplayPhase, train: TrainState, key: Tensor, *inputs: Any) -> Batch:
        return self.sample_one(phase, train, key, one_seed(self.source_data(self.tree, phase.sources), index))
