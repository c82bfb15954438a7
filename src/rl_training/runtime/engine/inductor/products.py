"""Products of small matrices as code of the graph itself (products.h) instead of library calls.

A library call passes two layers that inspect both tensors, and its kernels are made for large matrices. For 256 x 64 x
64 it takes 30 us and for narrow products 2 to 5 us; products.h takes 24 us and 1 to 2 us (one core, AVX2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.ops.operations import operation
from rl_training.ops.torch_internals import lowering

inductor = lowering.required()
ir, realize_inputs, register_lowering = inductor.ir, inductor.realize_inputs, inductor.register_lowering

SOURCE = Path(__file__).with_suffix(".h")
MAX_RIGHT = 2**16  # elements of the right factor: what fits into the second cache
MAX_WORK = 2**29  # multiplications
MAX_WORK_THREADS = 2**21  # the same with several threads, which only the library uses
_KEY = "CompositeExplicitAutograd"


def _product(a: Tensor, b: Tensor, *, parts: int = 1) -> Tensor:
    return torch.matmul(a, b)


def _relu_slope(a: Tensor, b: Tensor, result: Tensor, *, parts: int = 1) -> Tensor:
    return torch.where(result <= 0.0, 0.0, torch.matmul(a, b))


def _relu_layer(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.matmul(a, b) + bias)


# `parts`: in each row of a, or in each column, only one of so many parts may be nonzero (products.h).
product = operation("product(Tensor a, Tensor b, *, int parts=1) -> Tensor", _product, _KEY)
# A layer, relu(a b + bias), and the gradient that such a layer gets from the next one.
relu_layer = operation("relu_layer(Tensor a, Tensor b, Tensor bias) -> Tensor", _relu_layer, _KEY)
relu_slope = operation("relu_slope(Tensor a, Tensor b, Tensor result, *, int parts=1) -> Tensor", _relu_slope, _KEY)


def is_faster(left: Tensor, right: Tensor) -> bool:
    """Is products.h faster than the library for these?"""
    rows, terms, columns = left.shape[-2], *right.shape[-2:]
    most = MAX_WORK if torch.get_num_threads() == 1 else MAX_WORK_THREADS
    small = 0 < terms * columns <= MAX_RIGHT and 0 < rows * terms * columns <= most
    return small and bool(inductor.pick_vec_isa())


@register_lowering(product, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower(a: Any, b: Any, parts: int = 1) -> Any:
    left, right = realize_inputs(a, b)
    for x in (left, right):
        x.freeze_layout()
    if _sizes_and_strides(left, right) is None:
        plain = torch.ops.aten.mm if len(left.get_size()) == 2 else torch.ops.aten.bmm
        return inductor.lowerings[plain.default](a, b)
    return _make(_Product, parts, left, right)


@register_lowering(relu_layer, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_relu_layer(a: Any, b: Any, bias: Any) -> Any:
    return _lower_with(_ReluLayer, 1, a, b, bias)


@register_lowering(relu_slope, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_relu_slope(a: Any, b: Any, result: Any, parts: int = 1) -> Any:
    return _lower_with(_ReluSlope, parts, a, b, result)


def _lower_with(kind: type[_Product], parts: int, a: Any, b: Any, more: Any) -> Any:
    left, right, more = realize_inputs(a, b, ir.ExternKernel.require_contiguous(more))
    for x in (left, right, more):
        x.freeze_layout()
    if _sizes_and_strides(left, right) is None:
        right = realize_inputs(ir.ExternKernel.require_contiguous(b))
    return _make(kind, parts, left, right, more)


def _make(kind: type[_Product], parts: int, left: Any, right: Any, *more: Any) -> Any:
    size = [*left.get_size()[:-1], right.get_size()[-1]]
    layout = ir.FixedLayout(left.get_device(), left.get_dtype(), size)
    kernel = kind(layout, [left, right, *more])
    kernel.parts = parts
    return ir.TensorBox.create(kernel)


def _sizes_and_strides(left: Any, right: Any) -> list[int] | None:
    """M, N, K and the strides a0, a1, b0, b1 for products.h; None if it does not support them."""
    (rows, terms), columns = map(int, left.get_size()[-2:]), int(right.get_size()[-1])
    a0, a1, b0, b1 = map(int, (*left.get_stride()[-2:], *right.get_stride()[-2:]))
    if columns == 1:
        b1 = 1  # the stride of a single column or row is never used
    elif terms == 1 and b1 != 1:
        b0 = 1
    return [rows, columns, terms, a0, a1, b0, b1] if 1 in (b0, b1) else None


class _Product(ir.ExternKernelOut):  # type: ignore[misc, name-defined]
    """Writes its call into the C++ code around the kernels of a graph."""

    epilogue = ""  # of products.h: what happens to the sums, using the third input
    parts = 1

    def codegen(self, wrapper: Any) -> None:
        inputs: list[Any] = list(self.inputs)
        left, right, *more = inputs
        numbers = _sizes_and_strides(left, right)
        assert numbers is not None
        if not getattr(wrapper, "has_products", False):
            wrapper.header.splice(SOURCE.read_text(encoding="utf-8"))
            wrapper.has_products = True
        members = int(left.get_size()[0]) if len(left.get_size()) == 3 else 1

        def place(x: Any, pointer: str) -> str:
            """The address of member i of a batch."""
            shared = len(x.get_size()) < 3 or members == 1
            return pointer if shared else f"{pointer} + i * {int(x.get_stride()[0])}L"

        places = [place(left, _pointer(left)), place(right, _pointer(right))]
        places.append(place(self, f"(float*)({self.codegen_reference()}.data_ptr())"))
        for x in more:
            places.append(f"rl_training::{self.epilogue.format(columns=numbers[1])}{{{place(x, _pointer(x))}}}")
        loop = f"for (long i = 0; i < {members}L; i++) " if members > 1 else ""
        sizes = ", ".join(map(str, (*numbers, self.parts)))
        wrapper.writeline(f"{loop}rl_training::product<{sizes}>({', '.join(places)});")


class _ReluLayer(_Product):
    epilogue = "BiasAndRelu"


class _ReluSlope(_Product):
    epilogue = "ReluSlope<{columns}L>"


def _pointer(x: Any) -> str:
    return f"((const float*)({x.get_name()}.data_ptr()) + {int(x.get_layout().offset)}L)"
