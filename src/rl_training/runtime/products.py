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

SOURCE = Path(__file__).with_suffix(".h")
LARGEST_RIGHT = 2**16  # elements of the right factor: what the second cache holds
LARGEST_SHARED = 2**21  # multiplications, where several threads could share the work: the library does that
LARGEST = 2**25

_library = torch.library.Library("rl_training", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("product(Tensor a, Tensor b) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("product", torch.matmul, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
product = torch.ops.rl_training.product.default


def suits(left: Tensor, right: Tensor) -> bool:
    """Is `products.h` the faster one for these?"""
    rows, terms, columns = left.shape[-2], *right.shape[-2:]
    largest = LARGEST if torch.get_num_threads() == 1 else LARGEST_SHARED
    small = 0 < terms * columns <= LARGEST_RIGHT and 0 < rows * terms * columns <= largest
    return small and bool(pick_vec_isa())


@register_lowering(product, type_promotion_kind=None)
def _lower(a: Any, b: Any) -> Any:
    left, right = realize_inputs(a, b)  # type: ignore[no-untyped-call]
    for x in (left, right):
        x.freeze_layout()
    if _numbers(left, right) is None:
        operation = torch.ops.aten.mm if len(left.get_size()) == 2 else torch.ops.aten.bmm
        return lowerings[operation.default](a, b)
    size = [*left.get_size()[:-1], right.get_size()[-1]]
    return ir.TensorBox.create(_Product(ir.FixedLayout(left.get_device(), left.get_dtype(), size), [left, right]))


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

    def codegen(self, wrapper: Any) -> None:
        left: Any = self.inputs[0]
        right: Any = self.inputs[1]
        numbers = _numbers(left, right)
        assert numbers is not None
        if not getattr(wrapper, "has_products", False):
            wrapper.header.splice(SOURCE.read_text(encoding="utf-8"))
            wrapper.has_products = True
        name = f"rl_training::product<{', '.join(map(str, (*numbers, numbers[1])))}>"
        pointers = [_pointer(left), _pointer(right), f"(float*)({self.codegen_reference()}.data_ptr())"]
        if len(left.get_size()) == 2:
            wrapper.writeline(f"{name}({', '.join(pointers)});")
            return
        steps = [int(x.get_stride()[0]) for x in (left, right, self)]
        moved = ", ".join(f"{pointer} + i * {step}L" for pointer, step in zip(pointers, steps))
        wrapper.writeline(f"for (long i = 0; i < {int(left.get_size()[0])}L; i++) {name}({moved});")


def _pointer(x: Any) -> str:
    return f"((const float*)({x.get_name()}.data_ptr()) + {int(x.get_layout().offset)}L)"
