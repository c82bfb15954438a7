"""Dataset aggregation, DAgger (Ross et al. 2011): the learner acts, the expert labels the observations with the actions
that it would have taken, and the learner clones them, on all observations seen so far.

The expert is a trained agent of this library: a checkpoint, or an agent that is trained first. With probability `beta`
its action is executed instead of the learner's; beta falls from 1 to 0 (section 3). The learner is a `bc`.

Deviations: the learner is updated all the time instead of being fitted from scratch after each batch of trajectories.
"""

from __future__ import annotations

from functools import cached_property

from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import Fraction, OffPolicyHyper, Widths
from rl_training.algorithms.offline.bc import BC
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.recipes import AgentRecipe
from rl_training.data.storage import Batch, Columns, action_column
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.schedules import Schedule
from rl_training.ops.tree import where_rows
from rl_training.spec import EnvSpec


class DAggerHyper(OffPolicyHyper):
    expert: AgentRecipe = Field(default_factory=AgentRecipe)
    """Who labels the states: `path` (a checkpoint or run directory) or `train` (a config: trained first)."""
    beta: Fraction = Field(default_factory=lambda: Schedule(kind="linear", start=1.0, end=0.0, fraction=0.5))
    """Probability that the expert's action is executed; a number or a schedule."""
    hidden_sizes: Widths = (256, 256)
    learning_starts: int = Field(0, ge=0)
    buffer_size: int = Field(100_000, ge=1)
    """Labelled states kept for each seed. DAgger keeps all states of a run."""

    @model_validator(mode="after")
    def _single_steps(self) -> DAggerHyper:
        if self.n_step != 1:
            raise ValueError("n_step must be 1: there are no returns to sum")
        return self


class DAgger(Algorithm[DAggerHyper]):
    Hyper = DAggerHyper
    name = "dagger"
    actions = BC.actions
    bounded_actions = True
    network_argument = BC.network_argument

    @cached_property
    def learner(self) -> BC:
        return self.make_part(BC)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return self.learner.networks(spec)

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return self.learner.named_networks(network)

    def setup(self) -> None:
        self.learner.nets = self.nets  # also where a network was handed in

    def phases(self) -> tuple[ReplayPhase, ...]:
        if self.expert is None:
            raise UserError(f"{self.name} needs an expert: set expert.path to a checkpoint or expert.train to a config")
        return super().phases()

    def extra_columns(self) -> Columns:
        return {"expert_actions": action_column(self.spec)}

    def init_carry(self, batch: int) -> Tree:
        """The expert's: it may be recurrent; the learner is not."""
        return () if self.expert is None else self.expert.policy.init_carry(batch)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        return self.learner.train_step(state, {**batch, "actions": batch["expert_actions"]}, key)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        _, actions, _ = self.learner.select_action(state, (), obs, rng.fold(key, 0), explore=explore)
        if not explore or self.expert is None:
            return carry, actions, {"expert_actions": actions}
        policy, trained = self.expert
        carry, advice, _ = policy.select_action(trained, carry, obs, rng.fold(key, 1), explore=False)
        if self.spec.action.kind == "box":
            advice = advice.clamp(-1.0, 1.0)  # what the environment executes
        by_expert = rng.uniform(rng.fold(key, 2), (actions.shape[0],)) < self.hp.beta(state.progress)
        return carry, where_rows(by_expert, advice, actions), {"expert_actions": advice}
