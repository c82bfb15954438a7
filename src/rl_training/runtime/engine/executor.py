"""Execution modes: how functions run that update a tree of tensors in place.

eager      plain PyTorch operations in every call
recorded   a function that is called often runs from a recording of its operations (recorder.py): the same bits, faster
compile    one inductor graph (with the C++ wrapper on the CPU) that writes the state in place (compiler.py)
cudagraph  the compiled graph, captured once and replayed: one launch per call

Functions with long recurrent loops (world models, recurrent Q-learning) are not compiled as a whole, but in pieces such
as the steps of their loops. The rest is captured with them on a GPU and recorded on the CPU.

`auto` decides from facts alone and therefore always in the same way: the device, the planned number of updates, whether
there is a compiler, and on the CPU the version of torch. Before 2.13, graphs for the CPU copy whole columns of the
replay in every step (35 ms for five seeds with 100 000 rows each; tried with 2.11), and some cannot be built at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from rl_training.errors import UserError
from rl_training.ops.torch_internals import recording, tracing_flag
from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.engine.allocator import keep_freed_memory
from rl_training.runtime.engine.compiler import (
    CPU_GRAPHS_SINCE,
    CompiledGraph,
    compiled,
    compiler_available,
    torch_version,
    with_compiled_pieces,
)
from rl_training.runtime.engine.recorder import Recorded

Mode = Literal["eager", "recorded", "compile", "cudagraph"]

# Break-even points: compiling takes 10 to 40 s cold and saves 1 to 1.6 ms an update on the CPU, 5 ms and more on CUDA.
# A study runs through vmap, which has several times the overhead without a graph, so compiling pays off much sooner.
MIN_UPDATES_CPU = 15_000
MIN_UPDATES_STUDY = 4_000
MIN_UPDATES_CUDA = 5_000
MIN_UPDATES_UNROLLED = 40_000  # on the CPU with a recurrent loop in the graph: 150 s to compile, 4 ms saved an update
MIN_UPDATES_STEPS = 300  # on CUDA if only the steps of loops are compiled: updates with such loops take long


class Choice(NamedTuple):
    mode: Mode
    reason: str


def choose_mode(
    requested: str, device: torch.device, planned_updates: int, seeds: int, *, whole: bool = True,
    unrolled: bool = False,
) -> Choice:  # fmt: skip
    """`whole`: is the update compiled as one graph? `unrolled`: does that graph contain an unrolled recurrent loop?"""
    if requested != "auto":
        if requested == "cudagraph" and device.type != "cuda":
            raise UserError(f"execution: cudagraph needs a CUDA device; this run is on {device}. Use compile or auto")
        if requested in ("compile", "cudagraph") and device.type == "cpu" and not compiler_available():
            raise UserError(
                "execution: compile needs a C++ compiler (g++ or clang++) on the PATH; use recorded, eager or auto"
            )
        return Choice(requested, "as configured")  # type: ignore[arg-type]
    if device.type == "cuda":
        if planned_updates >= (MIN_UPDATES_CUDA if whole else MIN_UPDATES_STEPS):
            return Choice("cudagraph", f"{planned_updates:,} updates on a GPU repay compiling")
        return _uncompiled(f"{planned_updates:,} updates are too few to repay compiling")
    if not compiler_available():
        return _uncompiled("no C++ compiler on the PATH")
    if torch_version() < CPU_GRAPHS_SINCE:
        return _uncompiled(f"graphs for the CPU are slow before torch {'.'.join(map(str, CPU_GRAPHS_SINCE))}")
    least = MIN_UPDATES_UNROLLED if unrolled else MIN_UPDATES_STUDY if seeds > 1 else MIN_UPDATES_CPU
    if planned_updates >= least:
        return Choice("compile", f"{planned_updates:,} updates repay compiling")
    return _uncompiled(f"{planned_updates:,} updates are too few to repay compiling (from {least:,})")


def _uncompiled(reason: str) -> Choice:
    return Choice("recorded" if recording.find() is not None else "eager", reason)


def choose_device(requested: str) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise UserError(f"device: '{requested}' is unknown; use auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device: {requested} was asked for, but this machine has no usable CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {requested} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device: '{requested}' is not supported; use auto, cpu, cuda or cuda:1")
    return device


def trial_runs(fn: Callable[..., Any], args: tuple[Any, ...], keep: Any, times: int = 3) -> None:
    """Run `fn` a few times and restore `keep` each time. So each run writes to the same stored rows, which the first
    real call overwrites. If the counts were restored only at the end, the later runs would write to the next rows; at
    the end of a rollout, these are its first ones."""
    saved = tree_map(lambda x: x.clone(), keep)
    for _ in range(times):
        fn(*args)
        for (_, old), (_, value) in zip(tree_items(keep), tree_items(saved)):
            old.copy_(value)


class CapturedGraph:
    """A function of static tensors, captured as one CUDA graph at its first call.

    Capturing needs trial runs, which change the state. What `keep` returns is restored after each of them.
    """

    def __init__(self, fn: Callable[..., Any], keep: Callable[[], Any], device: torch.device) -> None:
        self.fn, self.keep, self.device = fn, keep, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: Any = None

    def capture(self, *args: Any) -> None:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            trial_runs(self.fn, args, self.keep())
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.out = self.fn(*args)
        self.graph = graph

    def __call__(self, *args: Any) -> Any:
        if self.graph is None:
            with torch.no_grad():
                self.capture(*args)
        assert self.graph is not None
        self.graph.replay()
        return self.out


def repeated(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    if times == 1:
        return fn

    def call(*args: Any) -> Any:
        for _ in range(times - 1):
            fn(*args)
        return fn(*args)

    return call


class Executor:
    """Runs functions `fn(tree, ...) -> outputs` that change `tree` in place, in one mode, on one device. The tensors of
    `tree` are static: always the same ones, written in place and never replaced."""

    def __init__(self, mode: Mode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        if device.type == "cpu":
            keep_freed_memory()

    def wrap(
        self, fn: Callable[..., Any], keep: Callable[[], Any], *, whole: bool = True, times: int = 1
    ) -> Callable[..., Any]:
        """`keep()` returns the tensors that the trial runs of a capture must leave unchanged. `whole`: compile the
        function as one graph; otherwise only pieces of it, because unrolling its loops would take too long. `times`:
        calls of the function for each call of the result; a capture contains all of them."""
        if self.mode == "compile":
            return repeated(CompiledGraph(fn, self.device) if whole else _recorded_with_pieces(fn), times)
        if self.mode == "cudagraph":
            once = compiled(fn, self.device) if whole else with_compiled_pieces(fn)
            return CapturedGraph(repeated(once, times), keep, self.device)
        return repeated(self.wrap_uncompiled(fn, keep), times)

    def wrap_uncompiled(self, fn: Callable[..., Any], keep: Callable[[], Any]) -> Callable[..., Any]:
        """The same without a compiler, for a function that is called too rarely to repay compiling."""
        if self.mode == "eager":
            return torch.no_grad()(fn)
        return CapturedGraph(fn, keep, self.device) if self.mode == "cudagraph" else Recorded(fn)


def _recorded_with_pieces(fn: Callable[..., Any]) -> Callable[..., Any]:
    pieces = with_compiled_pieces(fn)
    return Recorded(pieces) if tracing_flag.find() is not None else torch.no_grad()(pieces)
