"""Random changes of images, which keep values from fitting single pixels (data augmentation)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.ops import rng


def shift_images(images: Tensor, key: Tensor, pad: int) -> Tensor:
    """Each row of images [B, ..., H, W], moved by up to `pad` pixels in both directions, each whole number as likely as
    the others; the edge is repeated where nothing is left (Yarats et al. 2021, section 3.1: padding and a random crop).

    All images of a row move alike, such as the frames of a stack. A pixel is read where it would come from, so there is
    neither a padded copy nor an interpolation.
    """
    rows, (height, width) = images.shape[0], images.shape[-2:]
    moved = rng.randint(key, (rows, 2), 2 * pad + 1) - pad  # [B, 2]
    down = _sources(moved[:, :1], height)  # [B, H]
    right = _sources(moved[:, 1:], width)  # [B, W]
    places = (down.unsqueeze(-1) * width + right.unsqueeze(-2)).view(rows, 1, height * width)
    flat = images.reshape(rows, -1, height * width)
    return flat.gather(-1, places.expand(flat.shape)).view(images.shape)


def _sources(moved: Tensor, size: int) -> Tensor:
    """Where each of `size` pixels comes from, after a move [B, 1]: [B, size]."""
    return (torch.arange(size, device=moved.device) + moved).clamp(0, size - 1)


def scale_intensity(images: Tensor, key: Tensor, scale: float = 0.05) -> Tensor:
    """Each row of images [B, ...] times 1 + scale x n, n standard normal and clipped to [-2, 2] (Schwarzer et al. 2021,
    the authors' code)."""
    noise = rng.normal(key, (images.shape[0],)).clamp(-2.0, 2.0)
    return images.to(torch.float32) * (1.0 + scale * noise).view(-1, *[1] * (images.ndim - 1))
