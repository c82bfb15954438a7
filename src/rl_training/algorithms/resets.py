"""Periodic resets (Nikishin et al. 2022): networks, their slow copies and optimisers are initialised again; replay is
kept.

A reset is a function of the state, the seed and the step counter. Fresh weights are drawn as those of a new run are, so
every network and every initialisation is covered. It happens between updates: the graph of an update does not change,
and updates without a reset cost nothing. A resumed run, or a seed of a study, draws the same weights.

With `reset_share` below 1 the old weights are shrunk and perturbed (Ash & Adams 2020, as in D'Oro et al. 2023):
(1 - share) x old + share x fresh. Optimisers are reset in both cases.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rl_training.algorithms.hyper import OffPolicyHyper
from rl_training.algorithms.state import TrainState
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

_RESET = 104  # random stream, beside those of algorithms/base.py


class Restartable(Protocol):
    """What an algorithm must provide."""

    name: ClassVar[str]
    kept_by_resets: ClassVar[tuple[str, ...]]
    hp: Any
    given: bool

    def phases(self) -> tuple[Any, ...]: ...

    def init_state(self, seed: int) -> TrainState: ...


class Resets:
    """When an algorithm is reset, and its state after the reset."""

    def __init__(self, algorithm: Restartable) -> None:
        hp: OffPolicyHyper | None = algorithm.hp if isinstance(algorithm.hp, OffPolicyHyper) else None
        self.algorithm = algorithm
        self.every, self.at = (hp.reset_interval, frozenset(hp.reset_at)) if hp else (0, frozenset[int]())
        self.share = hp.reset_share if hp else 1.0
        self.wanted = bool(self.every or self.at)
        if self.wanted and len(algorithm.phases()) > 1:
            raise UserError(
                f"{algorithm.name} has several kinds of updates and cannot be reset:"
                " leave out reset_interval and reset_at"
            )
        if self.wanted and algorithm.given:
            raise UserError(
                f"{algorithm.name}: resets draw new weights, which is impossible for a network that was passed in:"
                " leave out reset_interval and reset_at"
            )

    def due(self, step: int) -> bool:
        """Is there a reset after that many gradient steps?"""
        return step in self.at or (self.every > 0 and step % self.every == 0)

    def seed(self, seed: int, step: int) -> int:
        """The seed of the weights drawn after that many gradient steps."""
        return int(rng.fold(rng.key_from_seed(seed, _RESET), step))

    def apply(self, state: TrainState, seed: int) -> TrainState:
        """The state of one seed after a reset. Step counters and statistics of the data are kept."""
        fresh = self.algorithm.init_state(self.seed(seed, int(state.step)))
        kept = {name: state.extra[name] for name in self.algorithm.kept_by_resets if name in state.extra}

        def blend(old: Tensor, new: Tensor) -> Tensor:
            return new if self.share == 1.0 else torch.lerp(old, new, self.share)

        return state._replace(
            params=tree_map(blend, state.params, fresh.params),
            target=tree_map(blend, state.target, fresh.target),
            opt=fresh.opt,
            extra={**fresh.extra, **kept},
        )
