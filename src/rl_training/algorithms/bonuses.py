"""Intrinsic rewards: bonuses for what an agent has not seen before, learned from the transitions that it collects.

A bonus is an object beside an algorithm. It has a network, whose parameters are part of the algorithm's state, a reward
for each transition and a loss for each transition. It reads observations normalised by their running moments and
clipped to +-5 (Burda et al. 2019, section 2.4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import Positive, Widths, constant
from rl_training.algorithms.state import Obs, TrainState
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.curiosity import IntrinsicCuriosity, RandomDistillation
from rl_training.models.imitation import action_code
from rl_training.ops import distributions, rng
from rl_training.ops.losses import weighted_mean, weighted_means
from rl_training.ops.nets import Net
from rl_training.ops.optim import Optimizer
from rl_training.ops.running_stats import Moments, init_moments, normalise, update_moments
from rl_training.spec import ArraySpec, EnvSpec

CLIP = 5.0  # of normalised observations


class BonusFields(BaseModel):
    """Settings of intrinsic rewards."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    bonus: Literal["rnd", "icm"] = "rnd"
    """What pays for novelty: rnd (the error of predicting a random network's output) or icm (the error of predicting
    the features of the next observation)."""
    bonus_hidden_sizes: Widths = (128, 128)
    """Widths of the hidden layers of the bonus's networks on vectors; images have convolutions."""
    bonus_features: int = Field(128, ge=1, le=65536)
    """Size of the features that the bonus predicts."""
    bonus_learning_rate: Positive = constant(1e-4)
    """Step size of the bonus's optimiser; a number or a schedule."""
    bonus_update_share: float = Field(1.0, gt=0.0, le=1.0)
    """Share of each minibatch, drawn at random, that the bonus learns from."""
    beta: float = Field(0.2, ge=0.0, le=1.0)
    """icm: weight of the forward model's loss; the inverse model has the rest."""
    eta: float = Field(0.01, gt=0.0)
    """icm: factor on the reward; it has no effect if the bonus is normalised."""


class Bonus(ABC):
    """Subclasses define `network`, `reward` and `loss`. Rows are {next_obs} and whatever else `columns` names."""

    columns: ClassVar[tuple[str, ...]] = ("next_obs",)  # observations that it reads

    def __init__(self, hp: Any, spec: EnvSpec) -> None:
        observation = spec.unmasked.observation
        if not isinstance(observation, ArraySpec):
            raise UserError(
                f"bonus: {hp.bonus} needs observations that are one vector or image; {spec.env_id} has several"
            )
        self.hp, self.spec = hp, spec
        # Networks for images expect bytes and divide by 255.
        self.shape, self.scale = observation.shape, 255.0 if observation.is_image else 1.0

    @abstractmethod
    def network(self) -> nn.Module:
        """A freshly initialised network."""

    @abstractmethod
    def reward(self, net: Net, params: Tensor, rows: Batch) -> Tensor:
        """The intrinsic reward of each row: [B]."""

    @abstractmethod
    def loss(self, net: Net, params: Tensor, rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss of each row [B], metrics of each row)."""

    def init_extra(self) -> Moments:
        """The observations' moments before the first of them."""
        return init_moments(self.shape)

    def learn(self, moments: Moments, obs: Tensor, weights: Tensor) -> Moments:
        """Update the moments with a batch [B, ...] of observations."""
        return update_moments(moments, obs.to(torch.float32), weights)

    def seen(self, moments: Moments, obs: Obs) -> Tensor:
        """Observations as the networks read them."""
        return normalise(moments, obs.to(torch.float32), CLIP) * self.scale

    def rows(self, moments: Moments, batch: Batch) -> Batch:
        """What the bonus reads of a batch."""
        return {"actions": batch["actions"], **{name: self.seen(moments, batch[name]) for name in self.columns}}

    def step(
        self, algorithm: Algorithm[Any], optim: Optimizer, state: TrainState, rows: Batch, weights: Tensor, key: Tensor
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """(the state after one step of the network named `bonus` on the share of the rows that it learns from,
        metrics)"""
        if self.hp.bonus_update_share < 1.0:
            chosen = rng.uniform(key, tuple(weights.shape)) < self.hp.bonus_update_share
            weights = weights * chosen

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            per_row, parts = self.loss(algorithm.nets["bonus"], params, rows)
            return weighted_mean(per_row, weights), parts

        rate = self.hp.bonus_learning_rate(state.progress)
        state, total, parts = algorithm.descend(state, "bonus", loss, rate, optim)
        return state, {"bonus_loss": total, **(weighted_means(parts, weights) if parts else {})}


class RandomNetworkBonus(Bonus):
    """Random network distillation (Burda et al. 2019): the reward is the error of a network that learns to predict a
    random one."""

    def network(self) -> nn.Module:
        return RandomDistillation(self.spec.unmasked, self.hp.bonus_hidden_sizes, self.hp.bonus_features)

    def reward(self, net: Net, params: Tensor, rows: Batch) -> Tensor:
        error: Tensor = net(params, rows["next_obs"])
        return error

    def loss(self, net: Net, params: Tensor, rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.reward(net, params, rows), {}


class CuriosityBonus(Bonus):
    """Intrinsic curiosity (Pathak et al. 2017): the reward is the error of predicting the features of the next
    observation. Features are learned by predicting the action, so they represent what actions change."""

    columns = ("obs", "next_obs")

    def __init__(self, hp: Any, spec: EnvSpec) -> None:
        super().__init__(hp, spec)
        self.dist = distributions.for_action(spec.action)

    def network(self) -> nn.Module:
        return IntrinsicCuriosity(self.spec.unmasked, self.hp.bonus_hidden_sizes, self.hp.bonus_features)

    def predict(self, net: Net, params: Tensor, rows: Batch) -> tuple[Tensor, Tensor]:
        """(squared error of the forward model [B], output of the inverse model [B, size])"""
        action = action_code(self.spec.action, rows["actions"])
        error, out = net(params, rows["obs"], action, rows["next_obs"])
        return error, out

    def reward(self, net: Net, params: Tensor, rows: Batch) -> Tensor:
        error, _ = self.predict(net, params, rows)
        scale: float = 0.5 * self.hp.eta
        return scale * error  # Eq. 6

    def loss(self, net: Net, params: Tensor, rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        error, out = self.predict(net, params, rows)
        forward = 0.5 * error  # Eq. 5
        if self.spec.action.kind == "box":
            inverse = (out - action_code(self.spec.action, rows["actions"])).square().mean(-1)
        else:
            inverse = -self.dist.log_prob(out, rows["actions"])  # Eq. 3
        parts = {"forward_loss": forward, "inverse_loss": inverse}
        loss: Tensor = (1.0 - self.hp.beta) * inverse + self.hp.beta * forward  # Eq. 7
        return loss, parts


BONUSES: dict[str, type[Bonus]] = {"rnd": RandomNetworkBonus, "icm": CuriosityBonus}
