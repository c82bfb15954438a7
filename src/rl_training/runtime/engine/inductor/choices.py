"""The kernels that compute products and short sums on a GPU.

The library writes a product to memory, and another kernel applies the bias and the activation. Inductor has kernels of
its own that apply them before they store the product. It uses them only after timing dozens of shapes of each, which
takes minutes, so here the shape follows from a rule. Short sums, such as the gradient of a bias over a batch of 256,
are computed in one step: splitting them saves less than the second kernel costs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from rl_training.ops.torch_internals import product_kernels

names = product_kernels.required()

OPTIONS = {
    "max_autotune_gemm": True,  # offers the kernels among which `_finalize_template_configs` chooses one
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "max_autotune_conv_backends": "ATEN",
    "combo_kernels": True,  # kernels that do not depend on each other become one
}

_OURS = ("triton::mm", "triton::bmm")
_SHORT = 1_024  # terms of a sum that is not split
_ALL_BUSY = 132  # tiles that keep every multiprocessor of a large GPU busy
_NARROW = 64  # a product with so few rows, columns or terms takes as long as its memory: what is fused is saved
_SMALL_PRODUCT = 1 << 27  # multiplications: less takes about as long as starting a kernel. Else the library is faster.


class Tile(NamedTuple):
    rows: int
    columns: int
    terms: int  # that are loaded at a time
    warps: int


_LARGE = Tile(64, 64, 64, 4)
_SMALL = Tile(32, 32, 64, 4)  # more blocks, where large tiles would leave multiprocessors idle
_STAGES = 3  # loads in flight


def tile_for(products: int, rows: int, columns: int, terms: int) -> Tile:
    """The part of the result that one block of threads computes."""
    blocks = products * math.ceil(rows / _LARGE.rows) * math.ceil(columns / _LARGE.columns)
    tile = _LARGE if blocks >= _ALL_BUSY else _SMALL

    def fitting(most: int, size: int) -> int:
        return max(16, min(most, 1 << (size - 1).bit_length()))

    return Tile(fitting(tile.rows, rows), fitting(tile.columns, columns), fitting(tile.terms, terms), tile.warps)


def is_ours(products: int, rows: int, columns: int, terms: int) -> bool:
    """Is a kernel that also applies biases and activations faster than the library's?"""
    return min(rows, columns, terms) <= _NARROW or products * rows * columns * terms <= _SMALL_PRODUCT


class GpuChoices(names.InductorChoices):  # type: ignore[misc, name-defined]
    """What inductor asks while it compiles a graph for a GPU."""

    @staticmethod
    def reduction_split_factor(device: Any, terms: int, results: int, inner_reduction: bool) -> int:
        if results > 1 and terms <= _SHORT:
            return 1
        split: int = names.InductorChoices.reduction_split_factor(device, terms, results, inner_reduction)
        return split

    def _finalize_template_configs(
        self, template_choices: dict[str, Any], kernel_inputs: Any, templates: list[Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """One kernel for each product: ours, or the library's where there is none of ours."""
        size = names.V.graph.sizevars.size_hint
        products = math.prod(int(size(n)) for n in kernel_inputs.output_layout().size[:-2])
        shape = (products, *(int(size(n)) for n in kernel_inputs.mnk_symbolic()))
        own = next((name for name in _OURS if name in template_choices), None)
        first = next(iter(template_choices[own]), None) if own is not None and is_ours(*shape) else None
        if first is None:
            library = [t.uid for t in templates if isinstance(t, names.ExternKernelChoice)]
            return [choice for name in library for choice in template_choices[name]]
        tile = tile_for(*shape)
        settings = {
            **first.params.to_kwargs(), "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.terms,
            "EVEN_K": shape[-1] % tile.terms == 0, "num_warps": tile.warps, "num_stages": _STAGES,
        }  # fmt: skip
        return [
            names.KernelTemplateChoice(
                first.template, names.DictKernelTemplateParams(settings), first.extra_kwargs, first.layout, first.inputs
            )
        ]
