"""Conjugate gradient and backtracking with a fixed number of iterations: pieces of a trust-region step (TRPO)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor], b: Tensor, iterations: int = 10, tol: float = 1e-10
) -> Tensor:
    """Solve A x = b for a symmetric positive definite A given by `matvec`, with `b` `[P]` (Hestenes and Stiefel 1952).

    Always runs `iterations` products; once the squared residual is at or below `tol` the solution stands still.
    """
    solution, residual, direction = torch.zeros_like(b), b, b
    residual_sq = residual.dot(residual)
    for _ in range(iterations):
        running = residual_sq > tol
        product = matvec(direction)
        curvature = torch.where(running, direction.dot(product), 1.0)
        step = torch.where(running, residual_sq, 0.0) / curvature
        solution = solution + step * direction
        residual = residual - step * product
        next_residual_sq = residual.dot(residual)
        direction = residual + direction * (next_residual_sq / torch.where(running, residual_sq, 1.0))
        residual_sq = next_residual_sq
    return solution


def backtracking(
    accepts: Callable[[Tensor], Tensor], like: Tensor, iterations: int = 10, shrink: float = 0.8
) -> Tensor:
    """The first step fraction among 1, shrink, shrink^2, ... that `accepts`; 0 if none (TRPO, app. C).

    `accepts` maps a 0-dim fraction to a 0-dim bool. Every fraction is tried; dtype and device are those of `like`.
    """
    chosen = torch.zeros((), dtype=like.dtype, device=like.device)
    for i in range(iterations - 1, -1, -1):  # from the smallest: the largest accepted fraction has the last word
        fraction = torch.full((), shrink**i, dtype=like.dtype, device=like.device)
        chosen = torch.where(accepts(fraction), fraction, chosen)
    return chosen
