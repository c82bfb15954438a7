"""Flow Q-learning, FQL (Park et al. 2025): a flow learns to turn noise into the actions of the data. The policy turns
the same noise into an action in a single step. It is trained to be close to the flow's action and to maximise the
critics. So no gradient passes through the steps of the flow, and acting takes one step.

The flow is a velocity field v(s, x, t), trained by flow matching on straight lines from noise to actions, and followed
by Euler steps. The published settings are the defaults, except for `alpha`, which has to be chosen for each task. The
authors' values, with the number of updates (README of their code):

    OGBench (1M)   antmaze 10 with q_agg min; humanoidmaze 30; antsoccer 10; cube and scene 300; puzzle 1000; gamma
                   0.995 on antmaze-giant, humanoidmaze and antsoccer
    D4RL (500k)    antmaze 10, its large mazes 3; adroit 3000 to 30000 with q_agg min

All losses use the networks before the update, as in the authors' code.

Deviations: without exploration the action is that of zero noise (the paper samples: evaluate with `eval_deterministic:
false`); initial weights are PyTorch's, and GELU is exact.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.continuous.critics.base import regression
from rl_training.algorithms.hyper import OfflineHyper, Widths
from rl_training.algorithms.state import count_rows
from rl_training.data.storage import Batch
from rl_training.models.offline import FQLModel
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean, weighted_means
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec


class FQLHyper(OfflineHyper):
    hidden_sizes: Widths = (512, 512, 512, 512)
    """Widths of the hidden layers of flow, policy and critics."""
    activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = "gelu"
    layer_norm: bool = True
    """LayerNorm in the critics, after the activation."""
    num_critics: int = Field(2, ge=1)
    """Critics; the policy climbs their mean."""
    q_agg: Literal["mean", "min"] = "mean"
    """Value of the next action in the target: the mean of the critics or the smallest."""
    tau: float = Field(0.005, gt=0.0, le=1.0)
    """Share of the critics that each target update takes over."""
    alpha: float = Field(10.0, ge=0.0)
    """Weight of the squared distance between the policy's action and the flow's, against the value."""
    normalize_q: bool = False
    """Divide the policy's value by its mean size, so that `alpha` depends less on the scale of the rewards."""
    flow_steps: int = Field(10, ge=1, le=100)
    """Euler steps from noise to action."""


class FQL(Algorithm[FQLHyper]):
    Hyper = FQLHyper
    name = "fql"
    actions = ("box",)
    bounded_actions = True
    targets = ("critic",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        model = FQLModel(
            spec, hp.hidden_sizes, num_critics=hp.num_critics, activation=hp.activation, layer_norm=hp.layer_norm
        )
        return self.named_networks(model)

    def noise(self, key: Tensor, rows: int) -> Tensor:
        return rng.normal(key, (rows, self.spec.action.dim))

    def act_from(self, params: Tensor, obs: Obs, noise: Tensor) -> Tensor:
        """The policy's action before clipping to the bounds: [B, A]."""
        action: Tensor = self.nets["actor"](params, obs, noise)
        return action

    def follow(self, params: Tensor, obs: Obs, noise: Tensor) -> Tensor:
        """The flow's action for noise [B, A], by Euler's method (Algorithm 1)."""
        steps, points = self.hp.flow_steps, noise
        for i in range(steps):
            times = torch.full_like(points[:, 0], i / steps)
            points = points + self.nets["flow"](params, obs, points, times) / steps
        return points.clamp(-1.0, 1.0)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, nets, obs, actions, weights = self.hp, self.nets, batch["obs"], batch["actions"], batch["weights"]
        rows, before = count_rows(obs), state.params
        keys = [rng.fold(key, i) for i in range(4)]

        next_noise = self.noise(keys[0], rows)
        next_action = self.act_from(before["actor"], batch["next_obs"], next_noise).clamp(-1.0, 1.0)
        next_q = nets["critic"](state.target["critic"], batch["next_obs"], next_action)  # [E, B]
        target = batch["rewards"] + batch["discounts"] * (next_q.mean(0) if hp.q_agg == "mean" else next_q.amin(0))
        critic_loss = regression(
            lambda params: nets["critic"](params, obs, actions), target, weights, 1.0 / len(next_q)
        )  # L_Q of Algorithm 1
        state, loss_q, (q, error) = self.descend(state, "critic", critic_loss)

        start, times = self.noise(keys[1], rows), rng.uniform(keys[2], (rows,))
        points = torch.lerp(start, actions, times.unsqueeze(-1))

        def flow_loss(params: Tensor) -> tuple[Tensor, tuple[()]]:  # L_Flow
            velocity = nets["flow"](params, obs, points, times)
            return weighted_mean((velocity - (actions - start)).square().mean(-1), weights), ()

        state, loss_flow, _ = self.descend(state, "flow", flow_loss)

        noise = self.noise(keys[3], rows)
        flow_action = self.follow(before["flow"], obs, noise)

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # L_pi
            action = self.act_from(params, obs, noise)
            distance = (action - flow_action).square().mean(-1)
            value = nets["critic"](before["critic"], obs, action.clamp(-1.0, 1.0)).mean(0)
            size = weighted_mean(value.detach().abs(), weights).clamp(min=1e-8) if hp.normalize_q else 1.0
            return weighted_mean(hp.alpha * distance - value / size, weights), (distance, value)

        state, loss_pi, (distance, value) = self.descend(state, "actor", actor_loss)
        slow = polyak(state.target["critic"], state.params["critic"], hp.tau)
        state = state._replace(target={"critic": slow}, step=state.step + 1)
        means = {"q_value_mean": q, "target_mean": target, "distance": distance, "policy_value": value}
        losses = {"critic_loss": loss_q, "flow_loss": loss_flow, "actor_loss": loss_pi}
        return state, Aux({**losses, **weighted_means(means, weights)}, error)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        noise = self.noise(key, count_rows(obs))
        action = self.act_from(state.params["actor"], obs, noise if explore else torch.zeros_like(noise))
        return carry, action.clamp(-1.0, 1.0), {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The mean of the critics at the deterministic action."""
        action = self.select_action(state, (), obs, torch.zeros((), dtype=torch.int64), explore=False)[1]
        q: Tensor = self.nets["critic"](state.params["critic"], obs, action)
        return q.mean(0)
