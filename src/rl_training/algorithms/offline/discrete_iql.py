"""Implicit Q-learning for discrete actions (Kostrikov et al. 2022): the update of IQL with a categorical policy and
critics that return the values of all actions.

Deviations: those of IQL; the paper itself has continuous actions only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rl_training.algorithms.base import Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OfflineHyper
from rl_training.algorithms.offline.iql import ImplicitFields, ImplicitQ
from rl_training.models.offline import DiscreteIQLModel
from rl_training.ops.distributions import Categorical
from rl_training.spec import EnvSpec


class DiscreteIQLHyper(ImplicitFields, OfflineHyper):
    """Settings of IQL for discrete actions, on a dataset alone."""


class DiscreteIQL(ImplicitQ[DiscreteIQLHyper]):
    Hyper = DiscreteIQLHyper
    name = "discrete_iql"
    actions = ("discrete",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        model = DiscreteIQLModel(spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation)
        return self.named_networks(model)

    def setup(self) -> None:
        super().setup()
        self.dist = Categorical(self.spec.action.n)

    def q(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        values: Tensor = self.nets["critic"](params, obs)  # [E, B, A]
        chosen = actions.long().expand(values.shape[:-1]).unsqueeze(-1)
        return values.gather(-1, chosen).squeeze(-1)

    def q_values(self, params: dict[str, Tensor], obs: Obs) -> Tensor:
        """The smallest critic's value of every action: [B, A]."""
        values: Tensor = self.nets["critic"](params["critic"], obs)
        return values.amin(0)

    def action_values(self, state: TrainState, obs: Obs, **options: Any) -> Tensor:
        return self.q_values(state.params, obs)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        logits = self.nets["actor"](state.params["actor"], obs)
        return carry, self.dist.sample(logits, key) if explore else self.dist.mode(logits), {}
