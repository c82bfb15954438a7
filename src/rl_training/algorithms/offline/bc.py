"""Behavioural cloning: supervised learning of the actions in a dataset (Pomerleau 1989).

Box actions: squared error of a deterministic tanh policy. This is the likelihood of a Gaussian of fixed width, and what
the tables of the offline literature call BC. With `stochastic` it is the likelihood of a Gaussian whose width is
learned, so that the noise of the data is cloned too. Discrete actions: cross-entropy.

Deviations: none; behavioural cloning is the method, not one paper's network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OfflineHyper, Widths
from rl_training.data.storage import Batch
from rl_training.models.control import Actor
from rl_training.models.offline import GaussianActor
from rl_training.ops.distributions import DiagGaussian, for_action
from rl_training.ops.losses import weighted_mean
from rl_training.spec import EnvSpec


class BCHyper(OfflineHyper):
    hidden_sizes: Widths = (256, 256)
    stochastic: bool = False
    """Box actions: also learn the spread of the data's actions, and explore with it."""


class BC(Algorithm[BCHyper]):
    Hyper = BCHyper
    name = "bc"
    actions = ("discrete", "multi_discrete", "multi_binary", "box")
    bounded_actions = True
    network_argument = only_network = "actor"

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        sizes, activation = self.hp.hidden_sizes, self.hp.activation
        if spec.action.kind != "box":
            return {"actor": Actor(spec, for_action(spec.action).size, sizes, activation)}
        if self.hp.stochastic:
            return {"actor": GaussianActor(spec, sizes, activation)}
        return {"actor": Actor(spec, spec.action.dim, sizes, activation)}

    def setup(self) -> None:
        self.box = self.spec.action.kind == "box"
        self.dist: Any = None  # a deterministic policy
        if not self.box:
            self.dist = for_action(self.spec.action)
        elif self.hp.stochastic:
            self.dist = DiagGaussian(self.spec.action.dim)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        def loss(params: Tensor) -> tuple[Tensor, Tensor]:
            out = self.nets["actor"](params, batch["obs"])
            if self.dist is None:
                error = (torch.tanh(out) - batch["actions"]).square().mean(-1)
            else:
                error = -self.dist.log_prob(out, batch["actions"])
            return weighted_mean(error, batch["weights"]), error

        state, value, error = self.descend(state, "actor", loss)
        return state._replace(step=state.step + 1), Aux({"loss": value}, error)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        out = self.nets["actor"](state.params["actor"], obs)
        if self.dist is None:
            return carry, torch.tanh(out), {}
        action = self.dist.sample(out, key) if explore else self.dist.mode(out)
        return carry, action.clamp(-1.0, 1.0) if self.box else action, {}
