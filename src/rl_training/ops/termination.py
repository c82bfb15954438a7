"""Termination functions of standard tasks, which a dynamics model then need not learn. They are functions of the next
observation, with the limits of Gymnasium's environments at their default arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rl_training.errors import UserError, did_you_mean
from rl_training.spec import EnvSpec

Terminates = Callable[[Tensor], Tensor]  # next observations [..., D] -> bool [...]


def _never(obs: Tensor) -> Tensor:
    return torch.zeros(obs.shape[:-1], dtype=torch.bool, device=obs.device)


def _hopper(obs: Tensor) -> Tensor:
    height, angle = obs[..., 0], obs[..., 1]
    healthy = (height > 0.7) & (angle.abs() < 0.2) & (obs[..., 1:].abs() < 100.0).all(-1)
    return ~healthy


def _walker2d(obs: Tensor) -> Tensor:
    height, angle = obs[..., 0], obs[..., 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1.0))


def _ant(obs: Tensor) -> Tensor:
    height = obs[..., 0]
    return ~(torch.isfinite(obs).all(-1) & (height >= 0.2) & (height <= 1.0))


def _inverted_pendulum(obs: Tensor) -> Tensor:
    return ~(torch.isfinite(obs).all(-1) & (obs[..., 1].abs() <= 0.2))


def _cartpole(obs: Tensor) -> Tensor:
    return (obs[..., 0].abs() > 2.4) | (obs[..., 2].abs() > 12.0 * 2.0 * math.pi / 360.0)


class _Known(NamedTuple):
    ends: Terminates
    obs_dim: int


KNOWN: dict[str, _Known] = {
    "Hopper-v5": _Known(_hopper, 11),
    "Walker2d-v5": _Known(_walker2d, 17),
    "Ant-v5": _Known(_ant, 105),
    "HalfCheetah-v5": _Known(_never, 17),
    "Pendulum-v1": _Known(_never, 3),
    "InvertedPendulum-v5": _Known(_inverted_pendulum, 4),
    "CartPole-v0": _Known(_cartpole, 4),
    "CartPole-v1": _Known(_cartpole, 4),
}


def termination(name: str, spec: EnvSpec) -> Terminates | None:
    """The termination function that a setting names, or None if the model must predict the end of an episode.

    `auto`: the environment's known function, or else learned; `learned`; `none`: episodes never end; or one of KNOWN.
    """
    if name == "none":
        return _never
    if name == "learned":
        return None
    if name == "auto":
        known = KNOWN.get(spec.env_id.rpartition(":")[2])
        return known.ends if known and known.obs_dim == spec.obs_dim else None
    if name not in KNOWN:
        choices = ["auto", "learned", "none", *KNOWN]
        raise UserError(f"unknown termination '{name}'.{did_you_mean(name, choices)} Known: {', '.join(choices)}")
    if KNOWN[name].obs_dim != spec.obs_dim:
        raise UserError(
            f"the termination function of {name} needs {KNOWN[name].obs_dim}-dimensional observations;"
            f" {spec.env_id} has {spec.obs_dim} dimensions. Use termination: learned"
        )
    return KNOWN[name].ends
