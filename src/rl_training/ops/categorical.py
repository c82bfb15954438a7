"""Categorical value distributions on a fixed, evenly spaced support: C51, Rainbow, D4PG."""

from __future__ import annotations

import torch
from torch import Tensor


def support(v_min: float, v_max: float, n: int, device: torch.device | str | None = None) -> Tensor:
    """The atoms z_i, `[n]`, evenly spaced from v_min to v_max."""
    return torch.linspace(v_min, v_max, n, device=device)


def project(next_probs: Tensor, rewards: Tensor, discounts: Tensor, atoms: Tensor) -> Tensor:
    """Project r + discount * z onto the support: `[..., N]` -> `[..., N]` (C51, Bellemare 2017, Eq. 7, Algorithm 1).

    The mass of an atom is shared between its two neighbours by a triangular kernel, which conserves it also where the
    shifted atom meets the support exactly (the published floor/ceil form loses it there). Shifted atoms are clamped to
    the support; a discount of 0 puts all mass at r.
    """
    n = atoms.shape[-1]
    v_min, v_max = atoms[..., :1], atoms[..., -1:]
    shifted = rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * atoms  # [..., N]
    position = ((shifted - v_min) * ((n - 1) / (v_max - v_min))).clamp(0.0, n - 1.0)  # b_j, in units of atoms
    index = torch.arange(n, device=atoms.device, dtype=atoms.dtype)
    share = (1.0 - (position.unsqueeze(-1) - index).abs()).clamp(min=0.0)  # [..., N from, N to]
    return (next_probs.unsqueeze(-1) * share).sum(-2)  # no matrix product: it may be rounded (TF32), and is not fused


def cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """-sum_i m_i log p_i per sample, `[..., N]` -> `[...]` (C51, the loss of Algorithm 1)."""
    return -(target_probs * logits.log_softmax(-1)).sum(-1)
