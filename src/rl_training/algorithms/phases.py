"""Phases: what a training loop does in one turn, and how often.

An off-policy or offline algorithm lists `ReplayPhase`s: steps on batches that are drawn from replay or another source.
An on-policy algorithm lists `RolloutPhase`s: passes over the rollout that was just collected.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple

from torch import Tensor

from rl_training.algorithms.state import Aux, TrainState
from rl_training.data.storage import Batch

Step = Callable[[TrainState, Batch, Tensor], tuple[TrainState, Aux]]

ONCE = 1 << 62  # as `every`, with `at_start`: the phase runs in the first turn only


class Again(NamedTuple):
    """Go back to the phase named `phase`, until `done(state)` holds for every seed."""

    phase: str
    done: Callable[[TrainState], Tensor]


class ReplayPhase(NamedTuple):
    """`times` calls of `step`, each on a batch drawn from `source`, every `every` turns.

    A turn is one step of the vector environment; offline, it is one update. `period` splits the calls into two kinds:
    the first of every `period` calls runs `step`, the others run `between`. Each kind is a graph of its own, so the
    cheaper one does no idle work.
    """

    name: str
    step: Step
    source: str | None = "replay"  # None: the step needs no batch
    every: int = 1
    times: int | Fraction | Callable[[int], int] = 1  # a fraction: on average; a function: of the environment steps
    at_start: bool = False  # also in the first turn that learns
    learns: bool = True  # its calls count as gradient steps
    batch_size: int | None = None  # None: the algorithm's setting
    also: tuple[str, int] | None = None  # a second source, and how many of its rows follow in each batch
    sink: str | None = None  # the source that stores `aux.rows`; the step finds its "frontier", if any, in the batch
    clock: Callable[[TrainState], Tensor] | None = None  # the counter that batches are drawn with; None: `state.step`
    again: Again | None = None
    between: Step | None = None
    period: int = 1

    def calls(self, env_steps: int, turn: int) -> int:
        """How often `step` runs in this turn."""
        if isinstance(self.times, Fraction):  # whole calls by the end of this turn, less those by the end of the last
            n, d = self.times.numerator, self.times.denominator
            return turn * n // d - (turn - 1) * n // d
        return self.times(env_steps) if callable(self.times) else self.times

    @property
    def kinds(self) -> dict[str, ReplayPhase]:
        """The functions of the phase, by name, each as a phase of one function."""
        if self.between is None:
            return {self.name: self}
        return {self.name: self, f"{self.name}/between": self._replace(step=self.between)}

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that the phase reads, and the one that it writes to."""
        names = (self.source, self.also[0] if self.also else None, self.sink)
        return tuple(dict.fromkeys(name for name in names if name is not None))


class Window(NamedTuple):
    """The last `rollouts` rollouts, of which `columns` are kept. `begin` may add columns before the first pass."""

    rollouts: int
    columns: tuple[str, ...]
    begin: Callable[[TrainState, Batch], Batch] | None = None


class RolloutPhase(NamedTuple):
    """`times` passes over the last rollout, every `every` rollouts, in shuffled minibatches of `batch_size` rows.

    Without `batch_size`, a pass is one step on the whole rollout, in order. A phase on `prior` does not read the
    rollout: a pass is one step on `prior_rows` rows of the algorithm's fixed data (its source `prior`).
    """

    name: str
    step: Step
    source: Literal["rollout", "prior"] = "rollout"
    every: int = 1
    times: int = 1
    at_start: bool = False  # also after the first rollout
    learns: bool = True  # its steps count as gradient steps
    batch_size: int | None = None
    prior_rows: int = 0  # rows of the fixed data in each batch, after those of the rollout
    window: Window | None = None  # learn from several rollouts instead of the last one

    @property
    def kinds(self) -> dict[str, RolloutPhase]:
        """As in `ReplayPhase`: there is one kind."""
        return {self.name: self}


Phase = ReplayPhase | RolloutPhase


def is_due(phase: Phase, turn: int, *, first: bool) -> bool:
    """Does the phase run in this turn? `first`: no turn has learned yet."""
    return turn % phase.every == 0 or (phase.at_start and first)
