"""Observations as a policy network reads them: without the action mask and, if asked for, normalised.

The running statistics are the entry `observations` of the state's `extra`: part of the policy, and saved with it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_training.algorithms.state import Obs
from rl_training.envs.masks import split_mask
from rl_training.errors import UserError
from rl_training.ops.running_stats import Moments, init_moments, normalise
from rl_training.spec import ArraySpec, EnvSpec


def check_can_normalise(spec: EnvSpec, asked: bool) -> None:
    """Raise UserError if observations are to be normalised that are not vectors."""
    observation = spec.unmasked.observation
    if asked and not (isinstance(observation, ArraySpec) and len(observation.shape) == 1):
        raise UserError(
            "normalize_observations needs a vector observation (images are scaled by the network): set it to false"
        )


class ObservationReader:
    def __init__(self, spec: EnvSpec, normalize: bool) -> None:
        check_can_normalise(spec, normalize)
        self.spec, self.normalize = spec, normalize

    def init_extra(self) -> dict[str, Moments]:
        """The statistics before the first observation; nothing if observations are not normalised."""
        return {"observations": init_moments((self.spec.unmasked.obs_dim,))} if self.normalize else {}

    def split(self, obs: Obs) -> tuple[Obs, Tensor | None]:
        """(the observation without its mask, the mask of allowed actions if there is one)"""
        return split_mask(obs, self.spec.masked)

    def normalised(self, extra: dict[str, Any], obs: Obs) -> Obs:
        return normalise(extra["observations"], obs) if self.normalize else obs

    def read(self, extra: dict[str, Any], obs: Obs) -> tuple[Obs, Tensor | None]:
        """(what the network reads, the mask of allowed actions if there is one)"""
        rest, mask = self.split(obs)
        return self.normalised(extra, rest), mask
