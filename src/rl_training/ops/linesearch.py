"""Conjugate gradient and backtracking line search with a fixed number of iterations, for a trust-region step (TRPO)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Solver = dict[str, Tensor]  # state of the conjugate gradient: solution, residual and direction, each [P]


def begin_solver(b: Tensor) -> Solver:
    """The initial state for solving A x = b from x = 0, with `b` [P]."""
    return {"solution": torch.zeros_like(b), "residual": b, "direction": b}


def solver_step(matvec: Callable[[Tensor], Tensor], solver: Solver, tol: float = 1e-10) -> Solver:
    """One iteration (Hestenes and Stiefel 1952) with one matrix-vector product. The solution no longer changes once
    the squared residual is at or below `tol`."""
    solution, residual, direction = (solver[k] for k in ("solution", "residual", "direction"))
    residual_sq = residual.dot(residual)
    running = residual_sq > tol
    product = matvec(direction)
    curvature = torch.where(running, direction.dot(product), 1.0)
    step = torch.where(running, residual_sq, 0.0) / curvature
    residual = residual - step * product
    grown = residual.dot(residual) / torch.where(running, residual_sq, 1.0)
    return {"solution": solution + step * direction, "residual": residual, "direction": residual + grown * direction}


def backtracking(
    accepts: Callable[[Tensor], Tensor], like: Tensor, iterations: int = 10, shrink: float = 0.8
) -> Tensor:
    """The largest step fraction among 1, shrink, shrink^2, ... that `accepts` allows; 0 if none (TRPO, app. C).

    `accepts` maps a 0-dim fraction to a 0-dim bool. All fractions are tried at once as a batch, so a compiled graph
    contains the trial only once. The result has the dtype and device of `like`.
    """
    fractions = torch.pow(shrink, torch.arange(iterations, dtype=like.dtype, device=like.device))
    return torch.where(torch.vmap(accepts)(fractions), fractions, 0.0).amax()
