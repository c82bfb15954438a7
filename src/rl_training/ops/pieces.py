"""Small functions that are compiled on their own, where the code around them is not.

An update with long recurrent loops is more than a compiler can take (docs/world_models.md), but most of its time goes
into a few small functions: the steps of the loops (`ops/scan.py`) and the norms between its products (`ops/norms.py`).
Each of these is one graph, compiled at its first call for its shapes, and one operation to whoever looks from outside:
a CUDA graph, a recording, or `vmap` over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_training.ops.operations import operation

Tensors = list[Tensor]
Piece = Callable[..., Tensors]  # a pure function of tensors

_pieces: dict[str, Piece] = {}
_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
_on = False


@contextmanager
def compiled_pieces() -> Iterator[None]:
    """Pieces are compiled here: most of the speed on a GPU, in seconds."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


def pieces_on() -> bool:
    """Are pieces compiled here? Not while a compiler looks at all of the code anyway: it finds a better cut."""
    return _on and not torch.compiler.is_compiling()


def piece(name: str, fn: Piece, inputs: Tensors) -> Tensors:
    """`fn(*inputs)`, compiled where that is switched on. Nothing is differentiated here. The name must say all that the
    function depends on."""
    if not pieces_on():
        return fn(*inputs)
    _pieces[name] = fn
    out: Tensors = _piece(name, inputs, 0)
    return out


def compiled_for(name: str, fn: Callable[..., Any], seeds: int, given: Tensors) -> Callable[..., Any]:
    """`fn` compiled for tensors such as those given, over seeds if there are any; made once."""
    key = (name, seeds, given[0].device, tuple((tuple(x.shape), x.dtype) for x in given))
    if key not in _compiled:
        _compiled[key] = _compile(torch.vmap(fn) if seeds else fn)
    return _compiled[key]


def _compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return [x.contiguous() for x in fn(*args)]  # laid out as the next call expects it

    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    # A code object of its own: without guards the graph of one piece would be run for another.
    call.__code__ = call.__code__.replace(co_name=f"piece_{len(_compiled)}")
    return torch.compile(call, fullgraph=True, dynamic=False, options=options)


@contextmanager
def not_traced() -> Iterator[None]:
    """Inside a recording (runtime/engine/recorder.py) a piece is one operation. Dynamo refuses to run while its caller
    is being traced, unless the tracing flag is cleared first."""
    tracer: Any = torch.fx._symbolic_trace
    before, tracer._is_fx_tracing_flag = tracer._is_fx_tracing_flag, False
    try:
        with torch.no_grad():
            yield
    finally:
        tracer._is_fx_tracing_flag = before


# --- one operation ---------------------------------------------------------------------------------------------------


def _run(name: str, inputs: Tensors, seeds: int) -> Tensors:
    inputs = [x.contiguous() for x in inputs]
    with not_traced():
        out: Tensors = compiled_for(name, _pieces[name], seeds, inputs)(*inputs)
        return out


def _batched(info: Any, in_dims: Any, name: str, inputs: Tensors, seeds: int) -> tuple[Tensors, list[int]]:
    """Under vmap: the seeds come first."""
    spread = [x.unsqueeze(0).expand(info.batch_size, *x.shape) for x in inputs]
    rows = [y if d is None else x.movedim(d, 0) for x, y, d in zip(inputs, spread, in_dims[1])]
    out = _piece(name, rows, info.batch_size)
    return out, [0] * len(out)


_piece = operation("piece(str name, Tensor[] inputs, int seeds) -> Tensor[]", _run, "CPU", "CUDA", batched=_batched)
