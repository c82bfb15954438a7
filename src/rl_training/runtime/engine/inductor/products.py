"""Products of small matrices as code of the graph itself (products.h) instead of calls of a library.

The library is called through two layers that look at both tensors anew, and its kernels are made for large matrices: it
takes 30 us for 256 x 64 x 64 and 2 to 5 us for the narrow ones, products.h 24 us and 1 to 2 us (one core, AVX2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.select_algorithm import realize_inputs

from rl_training.ops.operations import operation

SOURCE = Path(__file__).with_suffix(".h")
LARGEST_RIGHT = 2**16  # elements of the right factor: what the second cache holds
LARGEST_SHARED = 2**21  # multiplications, where several threads could share the work: the library does that
LARGEST = 2**29
_KEY = "CompositeExplicitAutograd"


def _product(a: Tensor, b: Tensor, *, parts: int = 1) -> Tensor:
    return torch.matmul(a, b)


def _relu_slope(a: Tensor, b: Tensor, result: Tensor, *, parts: int = 1) -> Tensor:
    return torch.where(result <= 0.0, 0.0, torch.matmul(a, b))


def _relu_layer(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.matmul(a, b) + bias)


# `parts`: each row of a, or each column, may have values in one of so many parts only (products.h).
product = operation("product(Tensor a, Tensor b, *, int parts=1) -> Tensor", _product, _KEY)
# A layer, relu(a b + bias), and the gradient that reaches such a layer from the next one.
relu_layer = operation("relu_layer(Tensor a, Tensor b, Tensor bias) -> Tensor", _relu_layer, _KEY)
relu_slope = operation("relu_slope(Tensor a, Tensor b, Tensor result, *, int parts=1) -> Tensor", _relu_slope, _KEY)


def suits(left: Tensor, right: Tensor) -> bool:
    """Is `products.h` the faster one for these?"""
    rows, terms, columns = left.shape[-2], *right.shape[-2:]
    largest = LARGEST if torch.get_num_threads() == 1 else LARGEST_SHARED
    small = 0 < terms * columns <= LARGEST_RIGHT and 0 < rows * terms * columns <= largest
    return small and bool(pick_vec_isa())


@register_lowering(product, type_promotion_kind=None)
def _lower(a: Any, b: Any, parts: int = 1) -> Any:
    left, right = realize_inputs(a, b)  # type: ignore[no-untyped-call]
    for x in (left, right):
        x.freeze_layout()
    if _numbers(left, right) is None:
        plain = torch.ops.aten.mm if len(left.get_size()) == 2 else torch.ops.aten.bmm
        return lowerings[plain.default](a, b)
    return _make(_Product, parts, left, right)


@register_lowering(relu_layer, type_promotion_kind=None)
def _lower_relu_layer(a: Any, b: Any, bias: Any) -> Any:
    return _lower_with(_ReluLayer, 1, a, b, bias)


@register_lowering(relu_slope, type_promotion_kind=None)
def _lower_relu_slope(a: Any, b: Any, result: Any, parts: int = 1) -> Any:
    return _lower_with(_ReluSlope, parts, a, b, result)


def _lower_with(kind: type[_Product], parts: int, a: Any, b: Any, more: Any) -> Any:
    left, right, more = realize_inputs(a, b, ir.ExternKernel.require_contiguous(more))  # type: ignore[no-untyped-call]
    for x in (left, right, more):
        x.freeze_layout()
    if _numbers(left, right) is None:
        right = realize_inputs(ir.ExternKernel.require_contiguous(b))  # type: ignore[no-untyped-call]
    return _make(kind, parts, left, right, more)


def _make(kind: type[_Product], parts: int, left: Any, right: Any, *more: Any) -> Any:
    size = [*left.get_size()[:-1], right.get_size()[-1]]
    layout = ir.FixedLayout(left.get_device(), left.get_dtype(), size)
    kernel = kind(layout, [left, right, *more])
    kernel.parts = parts
    return ir.TensorBox.create(kernel)


def _numbers(left: Any, right: Any) -> list[int] | None:
    """M, N, K and the strides a0, a1, b0, b1, as products.h has them; None where it cannot work with them."""
    (rows, terms), columns = map(int, left.get_size()[-2:]), int(right.get_size()[-1])
    a0, a1, b0, b1 = map(int, (*left.get_stride()[-2:], *right.get_stride()[-2:]))
    if columns == 1:
        b1 = 1  # the stride of a single column or row is never used
    elif terms == 1 and b1 != 1:
        b0 = 1
    return [rows, columns, terms, a0, a1, b0, b1] if 1 in (b0, b1) else None


class _Product(ir.ExternKernelOut):
    """Written into the C++ around the kernels of a graph."""

    end = ""  # what products.h does to the sums, with the third input
    parts = 1

    def codegen(self, wrapper: Any) -> None:
        inputs: list[Any] = list(self.inputs)
        left, right, *more = inputs
        numbers = _numbers(left, right)
        assert numbers is not None
        if not getattr(wrapper, "has_products", False):
            wrapper.header.splice(SOURCE.read_text(encoding="utf-8"))
            wrapper.has_products = True
        members = int(left.get_size()[0]) if len(left.get_size()) == 3 else 1

        def place(x: Any, pointer: str) -> str:
            """Of the member i of a batch."""
            shared = len(x.get_size()) < 3 or members == 1
            return pointer if shared else f"{pointer} + i * {int(x.get_stride()[0])}L"

        places = [place(left, _pointer(left)), place(right, _pointer(right))]
        places.append(place(self, f"(float*)({self.codegen_reference()}.data_ptr())"))
        for x in more:
            places.append(f"rl_training::{self.end.format(columns=numbers[1])}{{{place(x, _pointer(x))}}}")
        loop = f"for (long i = 0; i < {members}L; i++) " if members > 1 else ""
        sizes = ", ".join(map(str, (*numbers, self.parts)))
        wrapper.writeline(f"{loop}rl_training::product<{sizes}>({', '.join(places)});")


class _ReluLayer(_Product):
    end = "BiasAndRelu"


class _ReluSlope(_Product):
    end = "ReluSlope<{columns}L>"


def _pointer(x: Any) -> str:
    return f"((const float*)({x.get_name()}.data_ptr()) + {int(x.get_layout().offset)}L)"
