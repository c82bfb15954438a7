"""Recurrent loops whose length does not affect the size of a compiled graph.

`scan(name, weights, start, rows)` calls a step for every row. In eager mode that is a loop. In a compiled graph the
whole loop is one opaque operation: its step is compiled once, on its own, and called for each row, so compiling takes
as long for 64 rows as for 8. A scan can be captured in a CUDA graph and runs under `vmap`.

A scan is not differentiable. Gradients through time are another loop (`ops.grad.pullback` of the step, from the last
row to the first); the gradients of the weights are then one product over all rows (see `models/filtering.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_training.ops.operations import operation
from rl_training.ops.pieces import Tensors, compiled_for, pieces_on
from rl_training.ops.torch_internals import outside_tracing

Step = Callable[[Tensors, Tensors, Tensors], Tensors]  # (weights, state, one row) -> the next state

_steps: dict[str, Step] = {}


def register_step(name: str, step: Step) -> None:
    """Compiled graphs, including those that another process cached, contain only the name of a step. The name must
    therefore identify the function and every constant that it uses."""
    _steps[name] = step


def scan(name: str, weights: Tensors, start: Tensors, rows: Tensors, *, reverse: bool = False) -> Tensors:
    """The state after each row: [T, ...] for each part of the state. `rows` [T, ...] are read from last to first if
    `reverse`; each result has the index of its row."""
    if pieces_on() or torch.compiler.is_compiling():
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


# --- the loop as one operation ----------------------------------------------------------------------------------------


def _run(name: str, weights: Tensors, start: Tensors, rows: Tensors, reverse: bool, seeds: int) -> Tensors:
    weights, start, rows = ([x.contiguous() for x in part] for part in (weights, start, rows))
    step = compiled_for(name, _steps[name], seeds, [*start, *weights, *(x[0] for x in rows)])
    with outside_tracing(), torch.no_grad():
        return _loop(step, weights, start, rows, reverse)


def _shapes(name: str, weights: Tensors, start: Tensors, rows: Tensors, reverse: bool, seeds: int) -> Tensors:
    return [x.new_empty((len(rows[0]), *x.shape)) for x in start]


def _batched(info: Any, in_dims: Any, name: str, weights: Tensors, start: Tensors, rows: Tensors, reverse: bool,
             seeds: int) -> tuple[Tensors, list[int]]:  # fmt: skip
    """Under vmap: seeds are the first axis of weights and states, the second of rows."""

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
