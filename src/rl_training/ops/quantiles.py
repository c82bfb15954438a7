"""Quantile regression: the losses and features of QR-DQN, IQN, FQF and TQC."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def quantile_midpoints(n: int, device: torch.device | str | None = None) -> Tensor:
    """tau_hat_i = (2i + 1) / 2n, `[n]` (QR-DQN, Dabney 2018, Lemma 2)."""
    return (torch.arange(n, device=device, dtype=torch.float32) + 0.5) / n


def quantile_huber(
    predicted: Tensor, target: Tensor, taus: Tensor, kappa: float = 1.0, shares: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Quantile Huber loss per sample, `[..., N]` against `[..., M]` -> `[...]` (QR-DQN, Dabney 2018, Eq. 9 and 10).

    The sum over the N predicted quantiles at fractions `taus` (`[N]` or `[..., N]`), averaged over the M targets. The
    targets have equal weights, or the weights `shares` (`[..., M]`, summing to 1).
    The Huber loss is divided by kappa, as in IQN Eq. 3. That changes nothing at kappa = 1 and is continuous down to
    kappa = 0, the plain quantile loss. Gradients flow into `predicted` only; targets and fractions are constants in
    every algorithm. The derivative is written by hand: one pass over the N x M pairs gives value and gradient.
    """
    constant = predicted.detach()
    td_error = target.detach().unsqueeze(-2) - constant.unsqueeze(-1)  # [..., N, M]
    taus = taus.detach().unsqueeze(-1)
    weight = torch.where(td_error < 0, 1.0 - taus, taus)  # |tau - 1(u < 0)|
    if kappa > 0.0:
        inside = td_error.clamp(-kappa, kappa)  # derivative of the Huber loss, times kappa
        slope = weight * inside if kappa == 1.0 else weight * inside / kappa
        loss = slope * (td_error - 0.5 * inside)
    else:
        slope = torch.where(td_error < 0, -weight, weight)
        loss = slope * td_error
    if shares is None:
        value, gradient = loss.mean(-1).sum(-1), slope.mean(-1)
    else:
        shares = shares.detach().unsqueeze(-2)
        value, gradient = (loss * shares).sum((-1, -2)), (slope * shares).sum(-1)
    # The second term is 0 but has the derivative of the loss: -slope, since the error falls as the prediction rises.
    return value - (gradient * (predicted - constant)).sum(-1)


def cosine_embedding_features(taus: Tensor, n: int) -> Tensor:
    """cos(pi * i * tau) for i = 0 .. n - 1, `[..., N]` -> `[..., N, n]`: the input of IQN's embedding layer (Eq. 4)."""
    frequencies = torch.arange(n, device=taus.device, dtype=taus.dtype) * math.pi
    return torch.cos(taus.unsqueeze(-1) * frequencies)


def fqf_fraction_gradient(quantiles_at_taus: Tensor, quantiles_at_tau_hats: Tensor) -> Tensor:
    """dW1 / dtau_i for i = 1 .. N - 1, `[..., N - 1]` (FQF, Yang 2019, Proposition 1).

    W1 is the 1-Wasserstein error of the N-step approximation. `quantiles_at_taus` `[..., N - 1]` are Z(tau_i) at the
    inner fractions, `quantiles_at_tau_hats` `[..., N]` are Z(tau_hat_i) at the midpoints of tau_i and tau_{i+1}.
    """
    return 2.0 * quantiles_at_taus - quantiles_at_tau_hats[..., 1:] - quantiles_at_tau_hats[..., :-1]
