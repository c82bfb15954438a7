"""Discrete latents of world models (DreamerV2 and V3): S categorical variables with C classes each, `[..., S, C]`."""

from __future__ import annotations

import torch
from torch import Tensor


def unimix(logits: Tensor, share: float) -> Tensor:
    """Log-probabilities `[..., C]` of a mixture: `share` uniform, the rest softmax(logits). Keeps the KL finite."""
    if not share:
        return logits.log_softmax(-1)
    return torch.log((1.0 - share) * logits.softmax(-1) + share / logits.shape[-1])


def sample_codes(log_probs: Tensor, u: Tensor) -> Tensor:
    """Sample a class int64 `[...]` from each distribution `[..., C]`, given uniform numbers `[...]`. Inverting the
    cumulative distribution needs one random number per sample; the Gumbel-max trick needs C."""
    ends = log_probs.detach().exp().cumsum(-1)[..., :-1]  # the last class gets the rest, rounding errors included
    return (u.unsqueeze(-1) >= ends).sum(-1)


def one_hot(codes: Tensor, classes: int) -> Tensor:
    """float32 `[..., C]`; a code below 0 gives zeros."""
    return (codes.unsqueeze(-1) == torch.arange(classes, device=codes.device)).to(torch.float32)


def straight_through(log_probs: Tensor, codes: Tensor) -> Tensor:
    """One-hot samples `[..., C]` with the gradient of the probabilities (Bengio 2013; DreamerV2, Algorithm 1)."""
    probs = log_probs.exp()
    return one_hot(codes, log_probs.shape[-1]) + (probs - probs.detach())


def kl(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) of S independent categoricals, given as log-probabilities, `[..., S, C]` -> `[...]`."""
    return (left.exp() * (left - right)).sum((-2, -1))


def balanced_kl(posterior: Tensor, prior: Tensor, free_nats: float = 1.0) -> tuple[Tensor, Tensor]:
    """(dynamics loss, representation loss), each `[...]` (DreamerV3, Hafner 2023, Eq. 3 and 4).

    Both have the same value. The first trains the prior to predict the posterior; the second trains the posterior to
    be predictable. Below `free_nats` neither has a gradient.
    """
    dynamics = kl(posterior.detach(), prior).clamp(min=free_nats)
    representation = kl(posterior, prior.detach()).clamp(min=free_nats)
    return dynamics, representation
