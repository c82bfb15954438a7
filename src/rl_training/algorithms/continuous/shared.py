"""One encoder of images for actor and critics, trained by the critics' loss alone (Yarats et al. 2021).

The encoder is a network of its own, `encoder`. Actor and critics read its features, each behind a small layer (linear,
LayerNorm, tanh) that it trains itself. The features of a batch are computed once: with gradients for the critics'
loss, and detached from it for the actor's, as in the authors' code. Those of the next observations come from the same
encoder, which has no slow copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Obs, TrainState
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.control import ActorCriticModel
from rl_training.models.layers import EnsembleLinear, EnsembleScalar
from rl_training.models.residual import orthogonal_each
from rl_training.models.torsos import observation_encoder
from rl_training.ops.grad import value_and_grad
from rl_training.spec import ArraySpec, EnvSpec

R = TypeVar("R")


class SharedEncoderFields(BaseModel):
    """Settings of the encoder of images."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    shared_encoder: Literal["none", "drq", "nature", "impala"] = "none"
    """One encoder of images for actor and critics, which the critics' loss trains: the convolutions of drq (Yarats et
    al. 2021), nature or impala. none: actor and critics have an encoder each."""
    feature_dim: int = Field(50, ge=1)
    """shared_encoder: width of the layer that actor and critics each add to it."""


def trunk(size: int, features: int) -> nn.Sequential:
    """The layer between the shared encoder and a network that reads its features."""
    return nn.Sequential(nn.Linear(size, features), nn.LayerNorm(features), nn.Tanh())


def make_networks(
    settings: object, spec: EnvSpec, owner: str, make: Callable[[EnvSpec], nn.Module], kind: str, can_share: bool
) -> nn.Module:
    """The model that `make` builds for a spec; with a shared encoder, the model built for its features behind it.
    `kind` names the critics, and `can_share` says whether they can be trained together with an encoder."""
    wanted = isinstance(settings, SharedEncoderFields) and settings.shared_encoder != "none"
    if not wanted:
        return make(spec)
    assert isinstance(settings, SharedEncoderFields)
    name, width = settings.shared_encoder, settings.feature_dim
    if not spec.has_images and spec.features is None:
        raise UserError(
            f"{owner}: shared_encoder: {name} needs image observations; {spec.env_id} has none: set it to none"
        )
    if not can_share:
        raise UserError(f"{owner}: shared_encoder cannot be combined with critics of kind {kind}; set it to none")
    encoder, size = observation_encoder(spec, 0, math.sqrt(2.0), name)  # type: ignore[arg-type]
    model = make(replace(spec, observation=ArraySpec((width,)), features=None))
    assert isinstance(model, ActorCriticModel)
    model.spec, model.encoder = spec, encoder
    model.actor.torso = nn.Sequential(trunk(size, width), model.actor.torso)
    model.critic.encoder = trunk(size, width)
    for part in (model.actor, model.critic):
        initialise(part)
    return model


def initialise(network: nn.Module) -> None:
    """Orthogonal weights, separately for each critic, and biases of 0 (as in the authors' code)."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | EnsembleLinear | EnsembleScalar):
            orthogonal_each(layer, 1.0)


class SharedEncoder:
    """The encoder as a function of the training state, and its step together with the critics'."""

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        self.algorithm, self.net = algorithm, algorithm.nets["encoder"]

    def __call__(self, state: TrainState, obs: Obs) -> Tensor:
        """Features of observations: [B, F]."""
        features: Tensor = self.net(state.params["encoder"], obs)
        return features

    def descend(
        self, state: TrainState, batch: Batch, loss: Callable[[Tensor, Obs], tuple[Tensor, R]]
    ) -> tuple[TrainState, Batch, Tensor, R, Tensor]:
        """(the state after one step of encoder and critics, the batch with detached features as observations, the loss,
        what the loss returned beside it, the norm of the gradient). `loss` is a function of the critics' parameters and
        the features."""

        def joint(params: dict[str, Tensor]) -> tuple[Tensor, tuple[R, Tensor]]:
            features: Tensor = self.net(params["encoder"], batch["obs"])
            value, report = loss(params["critic"], features)
            return value, (report, features)

        names, optim = ("encoder", "critic"), self.algorithm.optim
        value, (report, features), grads = value_and_grad(joint, {name: state.params[name] for name in names})
        rate, params, opt = self.algorithm.hp.learning_rate(state.progress), {**state.params}, {**state.opt}
        for name in names:
            params[name], opt[name] = optim.update(grads[name], opt[name], params[name], rate)
        norm = torch.stack([torch.linalg.vector_norm(grads[name]) for name in names])
        after = state._replace(params=params, opt=opt)
        return after, {**batch, "obs": features}, value, report, torch.linalg.vector_norm(norm)


def shared_encoder_of(algorithm: Algorithm[Any]) -> SharedEncoder | None:
    """The encoder that the settings ask for."""
    if getattr(algorithm.hp, "shared_encoder", "none") == "none":
        return None
    if "encoder" not in algorithm.nets:
        raise UserError(f"{algorithm.name}: shared_encoder needs a model with a network named encoder")
    return SharedEncoder(algorithm)
