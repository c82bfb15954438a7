"""MARWIL (Wang et al. 2018): imitation of a dataset in which each action is weighted by the exponential of its
advantage. The value function is learned from the data's returns without bootstrapping, so no action outside the data is
ever evaluated.

beta 0 is behavioural cloning. The advantage is divided by its running root mean square, so that beta means the same in
every environment.

Deviations: the running mean square has a rate of 0.01 and starts with the first batch, where the paper adds 1e-8 of the
new square each time; the weights are clipped, as in IQL.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OfflineHyper, Widths
from rl_training.algorithms.offline.iql import advantage_weights
from rl_training.data.storage import Batch
from rl_training.models.offline import ImitationModel
from rl_training.ops.distributions import DiagGaussian, for_action
from rl_training.ops.losses import weighted_mean, weighted_means
from rl_training.spec import EnvSpec


class MARWILHyper(OfflineHyper):
    hidden_sizes: Widths = (256, 256)
    beta: float = Field(1.0, ge=0.0)
    """Weight of the advantage in the exponent; 0 is behavioural cloning."""
    max_weight: float = Field(20.0, gt=0.0)
    """Largest weight of an action."""
    norm_rate: float = Field(0.01, gt=0.0, le=1.0)
    """Share of the newest batch in the running mean square of the advantage."""


class MARWIL(Algorithm[MARWILHyper]):
    Hyper = MARWILHyper
    name = "marwil"
    actions = ("discrete", "multi_discrete", "multi_binary", "box")
    bounded_actions = True
    dataset_columns = ("returns",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return self.named_networks(ImitationModel(spec, self.hp.hidden_sizes, activation=self.hp.activation))

    def setup(self) -> None:
        self.box = self.spec.action.kind == "box"
        self.dist: Any = DiagGaussian(self.spec.action.dim) if self.box else for_action(self.spec.action)

    def init_extra(self) -> dict[str, Any]:
        return {"square": torch.zeros(())}

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, nets, obs, weights = self.hp, self.nets, batch["obs"], batch["weights"]

        def value_loss(params: Tensor) -> tuple[Tensor, Tensor]:
            advantage = batch["returns"] - nets["value"](params, obs)
            return 0.5 * weighted_mean(advantage.square(), weights), advantage

        state, loss_v, advantage = self.descend(state, "value", value_loss)
        advantage = advantage.detach()
        seen = weighted_mean(advantage.square(), weights)
        old = state.extra["square"]
        square = torch.where(state.step == 0, seen, old + hp.norm_rate * (seen - old))
        policy_weight = advantage_weights(advantage / (square.sqrt() + 1e-8), hp.beta, hp.max_weight)

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[()]]:  # Algorithm 1
            log_prob = self.dist.log_prob(nets["actor"](params, obs), batch["actions"])
            return weighted_mean(-policy_weight * log_prob, weights), ()

        state, loss_pi, _ = self.descend(state, "actor", actor_loss)
        state = state._replace(extra={"square": square}, step=state.step + 1)
        means = {"advantage_mean": advantage, "weight_mean": policy_weight, "return_mean": batch["returns"]}
        metrics = {"value_loss": loss_v, "actor_loss": loss_pi, **weighted_means(means, weights)}
        return state, Aux(metrics, advantage.abs())

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        out = self.nets["actor"](state.params["actor"], obs)
        action = self.dist.sample(out, key) if explore else self.dist.mode(out)
        return carry, action.clamp(-1.0, 1.0) if self.box else action, {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The return that the data reach from obs."""
        value: Tensor = self.nets["value"](state.params["value"], obs)
        return value
