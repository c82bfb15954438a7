"""Operations with action masks: true where an action is allowed, `[..., A]`."""

from __future__ import annotations

import torch
from torch import Tensor


def forbid(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values or logits that are never the largest where an action is forbidden."""
    if mask is None:
        return values
    # Finite, so that probability 0 times this value is 0, not NaN. Half the minimum keeps log_softmax finite.
    return torch.where(mask, values, torch.finfo(values.dtype).min / 2)


def count_allowed(mask: Tensor) -> Tensor:
    """Number of allowed actions `[...]`; at least 1, since the end of an episode may allow none."""
    return mask.sum(-1).clamp(min=1)


def random_allowed(u: Tensor, mask: Tensor) -> Tensor:
    """A uniform allowed action for each uniform draw u in [0, 1): `[...]`, `[..., A]` -> int64 `[...]`."""
    rank = (u * mask.sum(-1)).to(torch.int64)
    return (mask.cumsum(-1) <= rank.unsqueeze(-1)).sum(-1).clamp(max=mask.shape[-1] - 1)
