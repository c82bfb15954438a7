"""Sub-environments stepped in threads of this process.

Python runs one thread at a time, except in code that releases its lock. So threads pay where a step is one long call of
such code. MuJoCo's calls take 25 us, and handing over the lock takes longer (docs/gpu.md). Each environment is stepped
by one thread at a time, and results are read in order: they are those of `SyncVectorEnv`, and so is the saved state.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from rl_training.envs.sync import SubEnvs, SyncVectorEnv
from rl_training.machine import usable_cpus


class Outcome(NamedTuple):
    """What a step returned or raised."""

    result: Any
    error: BaseException | None = None

    def tell(self, action: Any) -> Any:
        """Replaces the step, whose action it has already received."""
        if self.error is not None:
            raise self.error
        return self.result


def _step_all(
    steps: Sequence[Callable[[Any], Any]], actions: Any, caught: tuple[type[BaseException], ...]
) -> list[Outcome]:
    """Step some environments; those after one that fails are not stepped."""
    done: list[Outcome] = []
    for step, action in zip(steps, actions):
        try:
            done.append(Outcome(step(action)))
        except caught as error:  # it is raised again where the result is read
            return [*done, Outcome(None, error)]
    return done


class _Helper:
    """A thread that steps its share when asked. It is a daemon: one that hangs must not keep the process alive."""

    def __init__(self) -> None:
        self.busy = False
        self._orders: SimpleQueue[tuple[Any, Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[list[Outcome]] = SimpleQueue()
        threading.Thread(target=self._work, name="rl-training-env", daemon=True).start()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            self._outcomes.put(_step_all(*order, caught=(BaseException,)))

    def begin(self, steps: Sequence[Callable[[Any], Any]], actions: Any) -> None:
        self.busy = True
        self._orders.put((steps, actions))

    def outcomes(self) -> list[Outcome]:
        found = self._outcomes.get()
        self.busy = False
        return found

    def end(self) -> None:
        self._orders.put(None)


class ThreadedSubEnvs(SubEnvs):
    """Every thread steps a share of neighbouring environments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        count, threads = len(self.envs), min(len(self.envs), usable_cpus())
        edges = [count * i // threads for i in range(threads + 1)]
        self._shares = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self._helpers = [_Helper() for _ in self._shares[1:]]

    def _begin(self, decoded: Any) -> Sequence[Callable[[Any], Any]]:
        first, *others = self._shares
        for helper, rows in zip(self._helpers, others):
            helper.begin(self._steps[rows], decoded[rows])
        # This thread's own share. A second Ctrl-C is neither an Exception nor SystemExit, and ends the step here.
        outcomes = _step_all(self._steps[first], decoded[first], caught=(Exception, SystemExit))
        for helper in self._helpers:
            outcomes += helper.outcomes()
        return [partial(Outcome.tell, outcome) for outcome in outcomes]

    def close(self) -> None:
        hung = any(helper.busy for helper in self._helpers)
        for helper in self._helpers:
            helper.end()
        if not hung:  # an environment that is still in its step cannot be closed
            super().close()


class ThreadVectorEnv(SyncVectorEnv):
    sub_envs = ThreadedSubEnvs
