"""Dataset aggregation, DAgger (Ross et al. 2011): the learner acts, the expert says what it would have done there, and
the learner clones that, on all states seen so far.

The expert is a trained agent of this library, a checkpoint or one that is trained first. With probability `beta` its
action is executed instead of the learner's; beta falls from 1 to 0 (section 3). The loss and the network are those of
`bc`. Deviation: the learner is updated all the time instead of being fitted anew after each batch of trajectories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.base import Aux, Obs, Phase, TrainState, Tree, rows_like
from rl_training.algorithms.hyper import Fraction, OffPolicyHyper, Widths
from rl_training.algorithms.offline.bc import BC
from rl_training.data.recipes import AgentRecipe
from rl_training.data.storage import Batch, Columns, action_column
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.schedules import Schedule


class DAggerHyper(OffPolicyHyper):
    stochastic: ClassVar[bool] = False  # the advice has no noise to clone
    expert: AgentRecipe = Field(default_factory=AgentRecipe)
    """Who labels the states: `path` (a checkpoint or run directory) or `train` (a config: trained first)."""
    beta: Fraction = Field(default_factory=lambda: Schedule(kind="linear", start=1.0, end=0.0, fraction=0.5))
    """Probability that the expert's action is executed; a number or a schedule."""
    hidden_sizes: Widths = (256, 256)
    """Widths of the hidden layers."""
    learning_starts: int = Field(0, ge=0)
    """Environment steps with random actions before the first update."""
    buffer_size: int = Field(100_000, ge=1)
    """Labelled states kept for each seed: all of a run, to be DAgger."""

    @model_validator(mode="after")
    def _single_steps(self) -> DAggerHyper:
        if self.n_step != 1:
            raise ValueError("n_step must be 1: there are no returns to sum")
        return self


class DAgger(BC):
    Hyper = DAggerHyper  # type: ignore[assignment]
    name = "dagger"
    if TYPE_CHECKING:
        hp: DAggerHyper  # type: ignore[assignment]

    def phases(self) -> tuple[Phase, ...]:
        if self.expert is None:
            raise UserError(f"{self.name} needs an expert: set expert.path to a checkpoint or expert.train to a config")
        return super().phases()

    def extra_columns(self) -> Columns:
        return {"expert_actions": action_column(self.spec)}

    def init_carry(self, batch: int) -> Tree:
        """Of the expert, which may remember; the learner does not."""
        return () if self.expert is None else self.expert.algorithm.init_carry(batch)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        return super().train_step(state, {**batch, "actions": batch["expert_actions"]}, key)

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        _, actions, _ = super().select_action(state, (), obs, rng.fold(key, 0), explore=explore)
        if not explore or self.expert is None:
            return carry, actions, {"expert_actions": actions}
        agent, trained = self.expert
        carry, advice, _ = agent.select_action(trained, carry, obs, rng.fold(key, 1), explore=False)
        if self.spec.action.kind == "box":
            advice = advice.clamp(-1.0, 1.0)  # what the environment executes
        asked = rng.uniform(rng.fold(key, 2), (actions.shape[0],)) < self.hp.beta(state.progress)
        return carry, torch.where(rows_like(asked, actions), advice, actions), {"expert_actions": advice}
