from __future__ import annotations

import pytest
import torch
from helpers import conjugate_gradient
from torch import Tensor

from rl_training.ops.linesearch import backtracking

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def spd(n: int, seed: int) -> Tensor:
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T + 0.5 * torch.eye(n, dtype=torch.float64)


def test_conjugate_gradient_solves_in_n_steps() -> None:
    matrix, b = spd(6, 0), torch.randn(6, dtype=torch.float64)
    solution = conjugate_gradient(lambda v: matrix @ v, b, iterations=6, tol=0.0)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, b), rtol=1e-6, atol=1e-8)


def test_first_iterate_is_the_exact_line_search_along_b() -> None:
    matrix, b = torch.diag(torch.tensor([1.0, 3.0])), torch.tensor([1.0, 1.0])
    assert conjugate_gradient(lambda v: matrix @ v, b, iterations=1).tolist() == [0.5, 0.5]  # b.b / b.Ab = 2 / 4


def test_conjugate_gradient_does_not_move_after_convergence() -> None:
    matrix, b = spd(4, 1), torch.randn(4, dtype=torch.float64)
    many = conjugate_gradient(lambda v: matrix @ v, b, iterations=60)
    torch.testing.assert_close(many, torch.linalg.solve(matrix, b), rtol=1e-4, atol=1e-5)
    assert torch.equal(many, conjugate_gradient(lambda v: matrix @ v, b, iterations=30))
    zero = conjugate_gradient(lambda v: matrix @ v, torch.zeros(4, dtype=torch.float64))
    assert torch.equal(zero, torch.zeros(4, dtype=torch.float64))


def test_tolerance_stops_early() -> None:
    matrix, b = spd(6, 2), torch.randn(6, dtype=torch.float64)
    coarse = conjugate_gradient(lambda v: matrix @ v, b, iterations=20, tol=float(b.dot(b)) * 2)
    assert torch.equal(coarse, torch.zeros_like(b))  # the initial residual is already below the tolerance


def test_vmap_stops_each_system_at_its_own_convergence() -> None:
    matrices = torch.stack([torch.eye(4, dtype=torch.float64), spd(4, 3)])  # the first converges after one step
    b = torch.randn(2, 4, dtype=torch.float64)

    def solve(matrix: Tensor, rhs: Tensor) -> Tensor:
        return conjugate_gradient(lambda v: matrix @ v, rhs, iterations=8, tol=1e-16)

    batched = torch.vmap(solve)(matrices, b)
    torch.testing.assert_close(batched, torch.stack([solve(m, r) for m, r in zip(matrices, b)]))
    torch.testing.assert_close(batched, torch.linalg.solve(matrices, b), rtol=1e-6, atol=1e-7)


def test_gradient_of_the_solution_is_finite_after_convergence() -> None:
    matrix, b = spd(3, 4), torch.randn(3, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda rhs: conjugate_gradient(lambda v: matrix @ v, rhs, 12, 1e-14))(b)
    assert jacobian.isfinite().all()


def test_backtracking_takes_the_largest_accepted_fraction() -> None:
    like = torch.zeros((), dtype=torch.float64)
    for limit, expected in ((2.0, 1.0), (1.0, 1.0), (0.6, 0.5), (0.125, 0.125), (0.01, 0.0)):
        chosen = backtracking(lambda f, limit=limit: f <= limit, like, iterations=5, shrink=0.5)
        assert chosen.item() == expected
    limits = torch.tensor([1.0, 0.3, 0.0])
    batched = torch.vmap(lambda limit: backtracking(lambda f: f <= limit, limit, 4, 0.5))(limits)
    assert batched.tolist() == [1.0, 0.25, 0.0]
