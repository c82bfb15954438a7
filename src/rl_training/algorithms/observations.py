"""Observations as networks read them: without the action mask and, if asked for, normalised.

The statistics, of a run or of a dataset, are entries of the state's `extra`: part of the policy, and saved with it.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from rl_training.algorithms.hyper import AugmentFields, ObservationFields
from rl_training.algorithms.state import Obs, TrainState
from rl_training.data.dataset import TransitionDataset
from rl_training.data.storage import Batch
from rl_training.envs.masks import split_mask
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.images import scale_intensity, shift_images
from rl_training.ops.running_stats import Moments, init_moments, normalise, update_moments
from rl_training.spec import MASK, ArraySpec, EnvSpec


def check_can_normalise(spec: EnvSpec, asked: bool) -> None:
    """Raise UserError if observations are to be normalised that are not vectors."""
    observation = spec.unmasked.observation
    if asked and not (isinstance(observation, ArraySpec) and len(observation.shape) == 1):
        raise UserError(
            "normalize_observations needs a vector observation (images are scaled by the network): set it to false"
        )


def check_cnn(spec: EnvSpec, settings: BaseModel) -> None:
    """Raise UserError if a network for images is chosen where there are none."""
    for name in ("cnn", "cnn_width"):
        field = type(settings).model_fields.get(name)
        if field and not spec.has_images and (value := getattr(settings, name)) != field.default:
            raise UserError(f"{name}: {value} needs image observations; {spec.env_id} has none: leave out {name}")


def normalises(hyper: object) -> bool:
    """Do the settings ask for running statistics? (TD3+BC normalises by the moments of its dataset instead.)"""
    return isinstance(hyper, ObservationFields) and hyper.normalize_observations


AUGMENT = 11  # random stream within an update; those of algorithms and critics have smaller numbers


class Augmentation:
    """The random changes of images that the settings ask for."""

    def __init__(self, spec: EnvSpec, settings: AugmentFields, owner: str) -> None:
        self.pad, seen = settings.augment_pad, spec.observation
        self.intensity = settings.augment == "shift_intensity"
        parts = seen if isinstance(seen, dict) else {"": seen}
        self.images = {name: number for number, (name, part) in enumerate(parts.items()) if part.is_image}
        if not self.images:
            raise UserError(
                f"{owner}: augment: {settings.augment} needs image observations; {spec.env_id} has {seen}:"
                " set it to none"
            )

    def changed(self, obs: Obs, key: Tensor) -> Obs:
        """The observations of a batch with each image changed; the other parts of a mixed observation stay."""
        if not isinstance(obs, dict):
            return self.image(obs, key)
        return {**obs, **{name: self.image(obs[name], rng.fold(key, n)) for name, n in self.images.items()}}

    def image(self, images: Tensor, key: Tensor) -> Tensor:
        """Changed images [B, ..., C, H, W]."""
        shifted = shift_images(images, key, self.pad)
        return scale_intensity(shifted, rng.fold(key, AUGMENT)) if self.intensity else shifted

    def __call__(self, batch: Batch, key: Tensor) -> Batch:
        """The batch with changed images; those of `obs` and `next_obs` change independently."""
        key = rng.fold(key, AUGMENT)
        read: Batch = {k: self.changed(batch[k], rng.fold(key, n)) for n, k in enumerate(("obs", "next_obs"))}
        return {**batch, **read}


def augmentation(spec: EnvSpec, hyper: object, owner: str) -> Augmentation | None:
    """What an algorithm's settings ask for; None if images are learned from as they are."""
    if not isinstance(hyper, AugmentFields) or hyper.augment == "none":
        return None
    return Augmentation(spec, hyper, owner)


class ObservationReader:
    def __init__(self, spec: EnvSpec, normalize: bool, augment: Augmentation | None = None) -> None:
        check_can_normalise(spec, normalize)
        self.spec, self.normalize, self.augment = spec, normalize, augment

    def init_extra(self) -> dict[str, Moments]:
        """The statistics before the first observation; nothing if observations are not normalised."""
        return {"observations": init_moments((self.spec.unmasked.obs_dim,))} if self.normalize else {}

    def split(self, obs: Obs) -> tuple[Obs, Tensor | None]:
        """(the observation without its mask, the mask of allowed actions if there is one)"""
        return split_mask(obs, self.spec.masked)

    def normalised(self, extra: dict[str, Any], obs: Obs) -> Obs:
        """The observation with a normalised vector; a mask beside it stays as it is."""
        if not self.normalize:
            return obs
        if isinstance(obs, dict):
            return {name: x if name == MASK else normalise(extra["observations"], x) for name, x in obs.items()}
        return normalise(extra["observations"], obs)

    def read(self, extra: dict[str, Any], obs: Obs) -> tuple[Obs, Tensor | None]:
        """(what the network reads, the mask of allowed actions if there is one)"""
        rest, mask = self.split(obs)
        return self.normalised(extra, rest), mask

    def learn(
        self, state: TrainState, batch: Batch, weights: Tensor, key: Tensor | None = None
    ) -> tuple[TrainState, Batch]:
        """(the state with the observations of a replayed batch in its statistics, the batch as it is learned from: with
        normalised observations, or with changed images, which needs the key of the update). `weights` has the shape of
        the rewards; rows of weight 0 do not count."""
        if self.augment is not None:
            assert key is not None, "an algorithm with the setting augment must pass the key of its update"
            batch = self.augment(batch, key)
        if not self.normalize:
            return state, batch
        rows = self.split(batch["obs"])[0].flatten(0, -2)  # [B, D], or [B * T, D] of sequences
        moments = update_moments(state.extra["observations"], rows, (weights.flatten() > 0).to(rows.dtype))
        extra = {**state.extra, "observations": moments}
        read: Batch = {name: self.normalised(extra, batch[name]) for name in ("obs", "next_obs") if name in batch}
        return state._replace(extra=extra), {**batch, **read}


class DatasetNormalizer:
    """Subtracts a dataset's mean observation and divides by its deviation plus `eps`."""

    def __init__(self, spec: EnvSpec, normalize: bool, eps: float = 1e-3) -> None:
        check_can_normalise(spec, normalize)
        self.size, self.normalize, self.eps = spec.obs_dim if normalize else 0, normalize, eps

    def init_extra(self, dataset: TransitionDataset | None) -> dict[str, Tensor]:
        """The dataset's statistics; nothing if observations are not normalised."""
        if not self.normalize:
            return {}
        if dataset is None:  # a policy that is about to be loaded
            return {"obs_mean": torch.zeros(self.size), "obs_std": torch.ones(self.size)}
        mean, std = dataset.moments(self.eps)
        return {"obs_mean": torch.tensor(mean).float(), "obs_std": torch.tensor(std).float()}

    def __call__(self, extra: dict[str, Any], obs: Obs) -> Obs:
        """Observations [..., D] as the networks see them."""
        return (obs - extra["obs_mean"]) / extra["obs_std"] if self.normalize else obs
