"""Normalised advantage functions, NAF (Gu et al. 2016): Q-learning with a closed-form maximum over actions.

Q is quadratic in the action around mu(s), so max_a Q = V(s) and the policy improves implicitly: one network, one loss.

Deviations: no batch normalisation; noise of a fixed scale instead of one shaped by P; one update a step by default;
a penalty keeps mu out of the flat part of its tanh. While V still falls, the quickest way to lower Q is to move mu away
from the actions taken; without the penalty mu ends at a bound in every state and stays there.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import Behaviour, ContinuousControl, DeterministicHyper
from rl_training.algorithms.hyper import Positive, constant
from rl_training.data.storage import Batch
from rl_training.models.control import NAFModel, quadratic_q
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec

SATURATED = 1.5  # mu beyond tanh(1.5) = 0.905 is pulled back, weakly


class NAFHyper(DeterministicHyper):
    exploration_noise: Positive = constant(0.3)
    max_grad_norm: float = Field(10.0, ge=0.0)
    reward_scale: float = Field(1.0, gt=0.0)
    """Rewards are multiplied by this. The errors of V also push mu, so values should be of the order of 1 to 10."""
    saturation_penalty: float = Field(0.1, ge=0.0)
    """Weight of the squared excess of mu, before its tanh, over 1.5; a saturated tanh would stop learning."""


def naf_loss(q: Tensor, next_value: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Squared TD error of Q(s, a) [B] towards r + discount x V'(s') (Algorithm 1), and the means of both sides."""
    target = batch["rewards"] + batch["discounts"] * next_value
    weights = batch["weights"]
    return {
        "loss": weighted_mean((q - target) ** 2, weights),
        "target_q_mean": weighted_mean(target, weights),
        "q_mean": weighted_mean(q, weights),
    }


class NAF(ContinuousControl[NAFHyper]):
    Hyper = NAFHyper
    name = "naf"
    actor = only_network = "q"
    targets = ("q",)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return {"q": NAFModel(spec, self.hp.hidden_sizes, activation=self.hp.activation)}

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        net, hp = self.nets["q"], self.hp
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        batch = {**batch, "rewards": hp.reward_scale * batch["rewards"]}
        next_value = net(state.target["q"], batch["next_obs"])[1]
        target = batch["rewards"] + batch["discounts"] * next_value

        def loss(params: Tensor) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]:
            pre_tanh, value, lower = net(params, batch["obs"])
            q = quadratic_q(torch.tanh(pre_tanh), value, lower, batch["actions"])
            metrics = naf_loss(q, next_value, batch)
            beyond = (pre_tanh.abs() - SATURATED).clamp(min=0.0).square().sum(-1)
            total = metrics["loss"] + hp.saturation_penalty * weighted_mean(beyond, batch["weights"])
            return total, (metrics, (q - target).abs())

        state, _, (metrics, error) = self.descend(state, "q", loss)
        slow = polyak(state.target["q"], state.params["q"], hp.tau)
        return state._replace(target={"q": slow}, step=state.step + 1), Aux(metrics, error)

    def behaviour(self, state: TrainState, obs: Obs) -> Behaviour:
        pre_tanh, _, _, features = self.nets["q"](state.params["q"], obs, True)
        return Behaviour(torch.tanh(pre_tanh), self.hp.exploration_noise(state.progress), features)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """V(s), the value of the greedy policy, in the rewards' own scale."""
        value: Tensor = self.nets["q"](state.params["q"], self.reader.normalised(state.extra, obs))[1]
        return value / self.hp.reward_scale
