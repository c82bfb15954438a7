"""Order statistics as comparisons of all pairs: exact with ties, without control flow, the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def centred_ranks(x: Tensor, valid: Tensor) -> Tensor:
    """Ranks of `x` [N] among the entries that are `valid`, evenly spread over [-0.5, 0.5]; equal values share the mean
    of their ranks, so that a generation in which nothing differs gives exactly 0 everywhere. Others give 0."""
    among = valid.to(torch.float32)
    below = ((x.unsqueeze(0) < x.unsqueeze(1)) * among).sum(-1)
    equal = ((x.unsqueeze(0) == x.unsqueeze(1)) * among).sum(-1)  # itself included
    ranks = below + 0.5 * (equal - 1.0)
    return torch.where(valid, ranks / (among.sum() - 1.0).clamp(min=1.0) - 0.5, 0.0)


def largest(x: Tensor, k: int, valid: Tensor) -> Tensor:
    """Which of the `valid` entries of `x` [N] are the `k` largest; of equal ones, those that come first."""
    place = torch.arange(x.shape[0], device=x.device)
    before = (x.unsqueeze(0) > x.unsqueeze(1)) | (
        (x.unsqueeze(0) == x.unsqueeze(1)) & (place.unsqueeze(0) < place.unsqueeze(1))
    )
    return valid & ((before & valid).sum(-1) < k)
