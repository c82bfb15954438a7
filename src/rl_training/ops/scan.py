"""Recurrent loops that do not grow a compiled graph with their length.

`scan(name, weights, start, rows)` calls a step for every row. In eager mode that is a loop. Inside a compiled graph the
whole loop is one opaque operation: its step is compiled once, on its own, and called for each row, so that compiling
costs the same for 8 rows and for 64. All of it can be captured in a CUDA graph, and runs under `vmap`.

Nothing is differentiated here. Gradients through time are a loop too (`ops.grad.pullback` of the step, from the last
row to the first); those of the weights are then one product over all rows (see `models/filtering.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_training.ops.operations import operation

Tensors = list[Tensor]
Step = Callable[[Tensors, Tensors, Tensors], Tensors]  # (weights, state, one row) -> the next state

_steps: dict[str, Step] = {}
_compiled: dict[tuple[Any, ...], Step] = {}
_always = False


@contextmanager
def compiled_steps() -> Iterator[None]:
    """Steps are compiled here although the function around them is not: most of the speed on a GPU, in seconds."""
    global _always
    before, _always = _always, True
    try:
        yield
    finally:
        _always = before


def register_step(name: str, step: Step) -> None:
    """Make a step known. Compiled graphs hold its name, also those that were cached by another process: the name must
    say all that the step depends on."""
    _steps[name] = step


def scan(name: str, weights: Tensors, start: Tensors, rows: Tensors, *, reverse: bool = False) -> Tensors:
    """The states after each row: [T, ...] for each part of the state. `rows` [T, ...], from the last one if `reverse`;
    results stand at the place of their row."""
    if _always or torch.compiler.is_compiling():
        out: Tensors = _scan(name, weights, start, rows, reverse, 0)
        return out
    return _loop(_steps[name], weights, start, rows, reverse)


def _loop(step: Step, weights: Tensors, start: Tensors, rows: Tensors, reverse: bool) -> Tensors:
    state, states = start, []
    steps = list(zip(*(x.unbind(0) for x in rows)))
    for row in reversed(steps) if reverse else steps:
        state = step(weights, state, list(row))
        states.append(state)
    if reverse:
        states.reverse()
    return [torch.stack(parts) for parts in zip(*states)]


# --- the same as one operation of a graph ----------------------------------------------------------------------------


def _run(name: str, weights: Tensors, start: Tensors, rows: Tensors, reverse: bool, seeds: int) -> Tensors:
    shapes = tuple((tuple(x.shape), x.dtype) for x in (*weights, *start, *(x[0] for x in rows)))
    key = (name, seeds, start[0].device, shapes)
    if key not in _compiled:
        step = _steps[name]
        _compiled[key] = _compile(torch.vmap(step) if seeds else step)
    weights, start, rows = ([x.contiguous() for x in part] for part in (weights, start, rows))
    with torch.no_grad(), _not_traced():
        return _loop(_compiled[key], weights, start, rows, reverse)


@contextmanager
def _not_traced() -> Iterator[None]:
    """In a recording (runtime/recorder.py) the loop is one operation. Its step is not looked into, but dynamo refuses
    to run anything while its caller is traced, unless the mark of that is taken down."""
    tracer: Any = torch.fx._symbolic_trace
    before, tracer._is_fx_tracing_flag = tracer._is_fx_tracing_flag, False
    try:
        yield
    finally:
        tracer._is_fx_tracing_flag = before


def _compile(step: Step) -> Step:
    def call(weights: Tensors, state: Tensors, row: Tensors) -> Tensors:
        return [x.contiguous() for x in step(weights, state, row)]  # laid out as the next call expects it

    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    # A code object of its own: without guards the graph of one step would be run for another.
    call.__code__ = call.__code__.replace(co_name=f"step_{len(_compiled)}")
    compiled: Step = torch.compile(call, fullgraph=True, dynamic=False, options=options)
    return compiled


def _shapes(name: str, weights: Tensors, start: Tensors, rows: Tensors, reverse: bool, seeds: int) -> Tensors:
    return [x.new_empty((len(rows[0]), *x.shape)) for x in start]


def _batched(info: Any, in_dims: Any, name: str, weights: Tensors, start: Tensors, rows: Tensors, reverse: bool,
             seeds: int) -> tuple[Tensors, list[int]]:  # fmt: skip
    """Under vmap: the seeds come first in weights and states, second in rows."""

    def moved(tensors: Tensors, dims: Any, place: int) -> Tensors:
        spread = [x.unsqueeze(0).expand(info.batch_size, *x.shape) for x in tensors]
        return [y.movedim(0, place) if d is None else x.movedim(d, place) for x, y, d in zip(tensors, spread, dims)]

    parts = (moved(x, d, place) for x, d, place in zip((weights, start, rows), in_dims[1:4], (0, 0, 1)))
    out = _scan(name, *parts, reverse, info.batch_size)
    return out, [1] * len(out)


_scan = operation(
    "scan(str name, Tensor[] weights, Tensor[] start, Tensor[] rows, bool reverse, int seeds) -> Tensor[]",
    _run, "CPU", "CUDA", shapes=_shapes, batched=_batched,
)  # fmt: skip
