"""Small functions that are compiled on their own while the code around them is not.

An update with long recurrent loops takes too long to compile as a whole (docs/world_models.md), but it spends most of
its time in a few small functions: the steps of the loops (`ops/scan.py`) and the norms between its matrix products
(`ops/norms.py`). Each of these is one graph, compiled for its shapes at its first call. From outside it is a single
operation: to a CUDA graph, to a recording, and to `vmap` over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_training.ops.operations import operation
from rl_training.ops.torch_internals import outside_tracing

Tensors = list[Tensor]
Piece = Callable[..., Tensors]  # a pure function of tensors

_pieces: dict[str, Piece] = {}
_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
_on = False


@contextmanager
def compiled_pieces() -> Iterator[None]:
    """Pieces are compiled in this context. On a GPU that gives most of the speed after seconds of compiling."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


def pieces_on() -> bool:
    """Are pieces compiled here? Not inside a function that is compiled as a whole: the compiler divides it better."""
    return _on and not torch.compiler.is_compiling()


def piece(name: str, fn: Piece, inputs: Tensors) -> Tensors:
    """`fn(*inputs)`, compiled inside `compiled_pieces()`. It is not differentiable. The name must identify the function
    and every constant that it uses."""
    if not pieces_on():
        return fn(*inputs)
    _pieces[name] = fn
    out: Tensors = _piece(name, inputs, 0)
    return out


def compiled_for(name: str, fn: Callable[..., Any], seeds: int, given: Tensors) -> Callable[..., Any]:
    """`fn` compiled for the shapes and types of `given`, once. `seeds`: how many it runs over by vmap, or 0."""
    key = (name, seeds, given[0].device, tuple((tuple(x.shape), x.dtype) for x in given))
    if key not in _compiled:
        _compiled[key] = _compile(torch.vmap(fn) if seeds else fn)
    return _compiled[key]


def _compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return [x.contiguous() for x in fn(*args)]  # the layout that the next call expects

    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    # Its own code object: without guards, torch would run the graph of one piece for another.
    call.__code__ = call.__code__.replace(co_name=f"piece_{len(_compiled)}")
    return torch.compile(call, fullgraph=True, dynamic=False, options=options)


# --- one operation ---------------------------------------------------------------------------------------------------


def _run(name: str, inputs: Tensors, seeds: int) -> Tensors:
    inputs = [x.contiguous() for x in inputs]
    with outside_tracing(), torch.no_grad():  # a recording sees one operation
        out: Tensors = compiled_for(name, _pieces[name], seeds, inputs)(*inputs)
        return out


def _batched(info: Any, in_dims: Any, name: str, inputs: Tensors, seeds: int) -> tuple[Tensors, list[int]]:
    """Under vmap: seeds are the first axis."""
    spread = [x.unsqueeze(0).expand(info.batch_size, *x.shape) for x in inputs]
    rows = [y if d is None else x.movedim(d, 0) for x, y, d in zip(inputs, spread, in_dims[1])]
    out = _piece(name, rows, info.batch_size)
    return out, [0] * len(out)


_piece = operation("piece(str name, Tensor[] inputs, int seeds) -> Tensor[]", _run, "CPU", "CUDA", batched=_batched)
