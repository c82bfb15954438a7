"""Categorical value distributions on a fixed, evenly spaced support: C51, Rainbow, D4PG."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def support(v_min: float, v_max: float, n: int, device: torch.device | str | None = None) -> Tensor:
    """The atoms z_i, `[n]`, evenly spaced from v_min to v_max."""
    return torch.linspace(v_min, v_max, n, device=device)


def project(next_probs: Tensor, rewards: Tensor, discounts: Tensor, atoms: Tensor) -> Tensor:
    """Project r + discount * z onto the support: `[..., N]` -> `[..., N]` (C51, Bellemare 2017, Eq. 7, Algorithm 1).

    A triangular kernel splits each atom's mass between its two neighbours. Unlike the published floor/ceil form, it
    also conserves the mass of a shifted atom that falls exactly on the support. Shifted atoms are clamped to the
    support; a discount of 0 puts all mass at r.
    """
    n = len(atoms)
    first = (n, *[1] * rewards.ndim)  # atoms first: batch rows are contiguous, so vector instructions have no tail
    shifted = rewards + discounts * atoms.view(first)  # [N, ...]
    position = ((shifted - atoms[0]) * ((n - 1) / (atoms[-1] - atoms[0]))).clamp(0.0, n - 1.0)  # b_j, in units of atoms
    index = torch.arange(n, device=atoms.device, dtype=atoms.dtype).view(first).unsqueeze(1)
    share = torch.relu(1.0 - (position - index).abs())  # [N to, N from, ...]
    # Not a matrix product: that may be rounded to TF32, and it is not fused.
    return (next_probs.movedim(-1, 0) * share).sum(1).movedim(0, -1)


def gaussian_histogram(x: Tensor, edges: Tensor, sigma: Tensor | float) -> Tensor:
    """Mass of a Gaussian around x in each bin, given that it lies in one of them: `[...]` -> `[..., N]` (HL-Gauss,
    Farebrother et al. 2024, section 3.1). `edges` `[N + 1]` ascend. Values beyond the ends are clamped to them.
    """
    centre = x.clamp(edges[0], edges[-1]).unsqueeze(-1)
    below = torch.erf((edges - centre) / (sigma * math.sqrt(2.0)))  # 2 Phi - 1; the constants cancel
    return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])


def log_softmax_and_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, probabilities), each `[..., N]`. They and their gradients share one exponential."""
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    mass = shifted.exp()
    total = mass.sum(-1, keepdim=True)
    return shifted - total.log(), mass * total.reciprocal()


def cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """-sum_i m_i log p_i per sample, `[..., N]` -> `[...]` (C51, the loss of Algorithm 1)."""
    return -(target_probs * log_softmax_and_softmax(logits)[0]).sum(-1)
