"""RMS norm with SiLU: against its definition, its gradient against autograd, and as a compiled piece over seeds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_training.ops import norms, pieces
from rl_training.ops.norms import norm_silu
from rl_training.ops.pieces import compiled_pieces
from rl_training.runtime.engine.compiler import compiler_available

EPS = 1e-4
LAYOUTS = [((3, 5, 7), -1), ((3, 5, 4, 2), -3)]  # rows of features; images, with the norm over channels


def given(shape: tuple[int, ...], axis: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(len(shape))
    size = (shape[axis], *[1] * (-1 - axis))
    x, grad = (torch.randn(shape, generator=g, dtype=dtype) for _ in range(2))
    return x, torch.randn(size, generator=g, dtype=dtype), grad


def pulled(x: Tensor, scale: Tensor, grad: Tensor, axis: int) -> tuple[Tensor, ...]:
    out, pull = torch.func.vjp(lambda x, scale: norm_silu(x, scale, axis, EPS), x, scale)
    return (out, *pull(grad))


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS)
def test_norm_silu_equals_its_definition(shape: tuple[int, ...], axis: int) -> None:
    x, scale, _ = given(shape, axis)
    rows, flat = x.movedim(axis, -1).reshape(-1, shape[axis]), scale.flatten()
    found = norm_silu(x, scale, axis, EPS).movedim(axis, -1).reshape(rows.shape)
    for row, result in zip(rows, found):
        z = row / ((row * row).sum() / len(row) + EPS) ** 0.5 * flat
        torch.testing.assert_close(result, z / (1.0 + torch.exp(-z)))


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS)
def test_gradient_equals_autograd(shape: tuple[int, ...], axis: int) -> None:
    x, scale, grad = given(shape, axis)
    torch.testing.assert_close(norms._back(grad, x, scale, axis=axis, eps=EPS), list(pulled(x, scale, grad, axis)[1:]))


@pytest.mark.slow
@pytest.mark.skipif(not compiler_available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(("shape", "axis"), LAYOUTS)
def test_compiled_norm_equals_eager_alone_and_over_seeds(
    shape: tuple[int, ...], axis: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(norms, "LARGE", 0)
    x, scale, grad = (part.to(device) for part in given(shape, axis, torch.float32))
    seeds = [(x, scale, grad), (2.0 * x - 1.0, scale + 0.5, -grad)]
    plain = [pulled(*one, axis) for one in seeds]
    with compiled_pieces():
        before = len(pieces._compiled)
        torch.testing.assert_close(pulled(*seeds[0], axis), plain[0])
        assert len(pieces._compiled) == before + 2
        both = torch.vmap(lambda x, scale, grad: pulled(x, scale, grad, axis))(*map(torch.stack, zip(*seeds)))
        tracked = [x.clone().requires_grad_(), scale.clone().requires_grad_()]
        out = norm_silu(*tracked, axis, EPS)
        torch.testing.assert_close((out, *torch.autograd.grad(out, tracked, grad)), plain[0])
    for i, one in enumerate(plain):
        torch.testing.assert_close([part[i] for part in both], list(one))
