"""Order statistics by comparing all pairs: exact for ties, no control flow, identical on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def centred_ranks(x: Tensor, valid: Tensor) -> Tensor:
    """Ranks of `x` [N] among its `valid` entries, evenly spread over [-0.5, 0.5]. Equal values share the mean of their
    ranks, so a generation of identical scores gives exactly 0 everywhere. Invalid entries give 0."""
    counted = valid.to(torch.float32)
    below = ((x.unsqueeze(0) < x.unsqueeze(1)) * counted).sum(-1)
    equal = ((x.unsqueeze(0) == x.unsqueeze(1)) * counted).sum(-1)  # including the entry itself
    ranks = below + 0.5 * (equal - 1.0)
    return torch.where(valid, ranks / (counted.sum() - 1.0).clamp(min=1.0) - 0.5, 0.0)


def top_k_mask(x: Tensor, k: int, valid: Tensor) -> Tensor:
    """Mask of the `k` largest of the `valid` entries of `x` [N]; among equal values, earlier entries win."""
    place = torch.arange(x.shape[0], device=x.device)
    before = (x.unsqueeze(0) > x.unsqueeze(1)) | (
        (x.unsqueeze(0) == x.unsqueeze(1)) & (place.unsqueeze(0) < place.unsqueeze(1))
    )
    return valid & ((before & valid).sum(-1) < k)
