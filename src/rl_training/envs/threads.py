"""Sub-environments stepped in threads of this process.

Python runs one thread at a time, except in code that releases its lock: MuJoCo's physics, for instance. So threads pay
where most of a step is such code, and cost a few dozen microseconds elsewhere. Each environment is stepped by one
thread at a time, and results are read in order: they are those of `SyncVectorEnv`, and so is the saved state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def _step_all(steps: Sequence[Callable[[Any], Any]], actions: Any) -> list[Outcome]:
    """Step some environments; those after one that fails are not stepped."""
    done: list[Outcome] = []
    for step, action in zip(steps, actions):
        try:
            done.append(Outcome(step(action)))
        except BaseException as error:  # it is raised again where the result is read
            return [*done, Outcome(None, error)]
    return done


class ThreadedSubEnvs(SubEnvs):
    """Every thread steps a share of neighbouring environments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        count, threads = len(self.envs), min(len(self.envs), usable_cpus())
        edges = [count * i // threads for i in range(threads + 1)]
        self._shares = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self._pool = ThreadPoolExecutor(threads, "rl-training-env")

    def _begin(self, decoded: Any) -> Sequence[Callable[[Any], Any]]:
        first, *others = self._shares
        running = [self._pool.submit(_step_all, self._steps[rows], decoded[rows]) for rows in others]
        outcomes = _step_all(self._steps[first], decoded[first])  # this thread's own share
        for share in running:
            outcomes += share.result()
        return [partial(Outcome.tell, outcome) for outcome in outcomes]

    def close(self) -> None:
        self._pool.shutdown()
        super().close()


class ThreadVectorEnv(SyncVectorEnv):
    sub_envs = ThreadedSubEnvs
