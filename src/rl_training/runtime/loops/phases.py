"""Running the phases of a turn in a way that a run can be stopped between any two calls and go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from rl_training.algorithms.phases import ReplayPhase, is_due
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.runtime.loops.base import Loop


class PhasedLoop(Loop):
    """A loop whose turns consist of phases."""

    learned = False  # the phases have run at least once
    position: tuple[int, int] | None = None  # phase and call at which learning was stopped

    def run_phases(
        self, learner: ReplayLearner, phases: Sequence[ReplayPhase], turn: int, *, to_the_end: bool = False
    ) -> bool:
        """Run the phases that are due in this turn. Returns False if a stop was requested on the way: `position` then
        says where, and the next call goes on from there."""
        index, call = self.position or (0, 0)
        while index < len(phases):
            phase = phases[index]
            if is_due(phase, turn, first=not self.learned):
                call = self._run_phase(learner, phase, turn, call, to_the_end)
                if not to_the_end and self.should_stop():
                    self.position = (index, call)
                    return False
                if phase.again is not None and not bool(phase.again.done(learner.train).all()):
                    index, call = [p.name for p in phases].index(phase.again.phase), 0
                    continue
            index, call = index + 1, 0
        self.position, self.learned = None, True
        return True

    def _run_phase(self, learner: ReplayLearner, phase: ReplayPhase, turn: int, call: int, to_the_end: bool) -> int:
        """Run the calls of a phase from number `call` on. Returns how many are done: fewer than all after a stop,
        or when there is nothing to learn from."""
        metrics: dict[str, Tensor] = {}
        calls, start = phase.calls(self.env_steps, turn), perf_counter()
        while call < calls and learner.ready():
            metrics = {**metrics, **learner.update(1, phase)}
            call += 1
            self.gradient_steps += phase.learns
            if not to_the_end and self.should_stop():
                break
        self.keep_metrics(learner, phase, metrics)
        self.learn_seconds += perf_counter() - start
        return call

    def keep_metrics(self, learner: ReplayLearner, phase: ReplayPhase, metrics: dict[str, Tensor]) -> None:
        """Keep the last metrics of each phase, under its name if there are several phases."""
        if len(learner.phases) > 1:
            metrics = {f"{phase.name}/{k}": v for k, v in metrics.items()}
        self.metrics = {**self.metrics, **metrics}

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), "learned": self.learned, "position": self.position}

    def load_counters(self, counters: dict[str, Any]) -> None:
        super().load_counters(counters)
        self.learned, position = bool(counters.get("learned", True)), counters.get("position")
        self.position = (int(position[0]), int(position[1])) if position is not None else None
