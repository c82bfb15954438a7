"""Kronecker-factored approximate curvature (Martens and Grosse 2015): the Fisher matrix of a layer is close to A (x) G.

A layer maps inputs a (with a 1 appended for the bias) to outputs s = W a. Then A = E[a a^T] over the inputs, and
G = E[g g^T] over the gradients g = d log p / d s of the log-probability of a sample from the model. The inverse of a
Kronecker product is the product of the inverses, so the natural gradient of W is G^-1 (dW) A^-1.

The factors of all layers are one flat vector, like parameters, and so are their inverses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = Sequence[tuple[int, int]]  # (inputs, outputs) of each layer; the inputs include the 1 of the bias


def covariance(rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over B samples of the sum over L locations of x x^T: rows [B, L, D], weights [B] -> [D, D]."""
    weighted = rows * (weights / weights.sum().clamp(min=1e-30)).view(-1, 1, 1)
    return weighted.flatten(0, 1).mT @ rows.flatten(0, 1)


def pack(factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The factors (A, G) of all layers as one vector."""
    return torch.cat([matrix.flatten() for pair in factors for matrix in pair])


def unpack(vector: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """(A, G) of each layer, as views of the vector."""
    parts = torch.split(vector, [n * n for pair in sizes for n in pair], -1)
    return [(a.view(i, i), g.view(o, o)) for a, g, (i, o) in zip(parts[::2], parts[1::2], sizes)]


def running_average(old: Tensor, new: Tensor, count: Tensor, decay: float) -> Tensor:
    """The average after `count` values: their plain mean at first, then with weight 1 - decay for the newest."""
    return torch.lerp(old, new, torch.clamp(1.0 / count, min=1.0 - decay))


def inverse(matrix: Tensor) -> Tensor:
    """Inverse of a positive definite matrix. These operations neither wait for the device nor check for errors, as a
    CUDA graph needs it (with a batch of `cholesky_inverse`, torch 2.11 aborts there). A matrix that is not positive
    definite gives numbers that mean nothing."""
    lower = torch.linalg.cholesky_ex(matrix)[0]
    half: Tensor = torch.linalg.solve_triangular(lower, torch.eye(matrix.shape[-1], device=matrix.device), upper=False)
    return half.mT @ half


def damped_inverses(factors: Tensor, sizes: Sizes, damping: float) -> Tensor:
    """(A + pi sqrt(damping) I)^-1 and (G + sqrt(damping) / pi I)^-1 of all layers. pi^2 is the ratio of the mean
    eigenvalues of A and G (Martens and Grosse 2015, section 6.3), which keeps the damping in scale with both."""
    root, out = math.sqrt(damping), []
    for a, g in unpack(factors, sizes):
        means = [(m.diagonal().mean()).clamp(min=1e-20) for m in (a, g)]
        pi = torch.sqrt(means[0] / means[1])
        eye_a, eye_g = (torch.eye(len(m), device=m.device) for m in (a, g))
        out.append((inverse(a + root * pi * eye_a), inverse(g + root / pi * eye_g)))
    return pack(out)


def precondition(gradients: Sequence[Tensor], inverses: Tensor, sizes: Sizes) -> list[Tensor]:
    """The natural gradient of each layer's matrix [outputs, inputs]."""
    return [g @ gradient @ a for gradient, (a, g) in zip(gradients, unpack(inverses, sizes))]


def trusted_rate(rate: Tensor | float, slope: Tensor, bound: float) -> Tensor:
    """min(rate, sqrt(2 bound / slope)) (Wu et al. 2017, section 3.2). `slope` is the gradient times the natural
    gradient v, which is v F v: a step of that size changes the policy by a KL divergence of about `bound`."""
    return torch.clamp(torch.sqrt(2.0 * bound / slope.clamp(min=1e-20)), max=rate)
