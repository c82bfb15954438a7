"""RMS norm and SiLU as one function with one gradient. Apart from matrix products, a world model spends most of its
time in them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.ops.pieces import piece, pieces_on

# Where compiling a separate kernel (a second each) pays off: it is no faster on a CPU or for a small model.
DEVICES, LARGE = {"cuda"}, 2**18


def norm_silu(x: Tensor, scale: Tensor, axis: int, eps: float) -> Tensor:
    """SiLU of x / sqrt(mean(x^2) + eps) * scale with the mean along `axis`, which counts from the end (-1, ...).
    `scale` [size, 1 for each later axis]."""
    if pieces_on() and x.device.type in DEVICES and x.numel() >= LARGE:
        out: Tensor = _NormSilu.apply(x, scale, axis, eps)  # type: ignore[no-untyped-call]
        return out
    return _forward(x, scale, axis=axis, eps=eps)[0]


def _forward(x: Tensor, scale: Tensor, *, axis: int, eps: float) -> list[Tensor]:
    return [F.silu(x * torch.rsqrt(x.square().mean(axis, keepdim=True) + eps) * scale)]


def _back(grad: Tensor, x: Tensor, scale: Tensor, *, axis: int, eps: float) -> list[Tensor]:
    """Gradients with respect to x and scale. With r = 1 / sqrt(mean(x^2) + eps) and n = r x:
    dn/dx . g = r (g - n mean(g n))."""
    r = torch.rsqrt(x.square().mean(axis, keepdim=True) + eps)
    n = x * r
    z = n * scale
    s = torch.sigmoid(z)
    into = grad * s * (1.0 + z * (1.0 - s))
    others = [i for i in range(x.ndim) if i != x.ndim + axis]
    through = into * scale
    return [r * (through - n * (through * n).mean(axis, keepdim=True)), (into * n).sum(others).reshape(scale.shape)]


class _NormSilu(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, axis: int, eps: float) -> Tensor:
        return piece(f"norm_silu {axis} {eps}", partial(_forward, axis=axis, eps=eps), [x, scale])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, scale, ctx.axis, ctx.eps = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        fn = partial(_back, axis=ctx.axis, eps=ctx.eps)
        return (*piece(f"norm_silu back {ctx.axis} {ctx.eps}", fn, [*grads, *ctx.saved_tensors]), None, None)
