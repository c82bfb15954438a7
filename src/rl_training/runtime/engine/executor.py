"""Execution modes: how a function that updates a tree of tensors in place is run.

eager      call it; a function that is called often is run from a recording of its operations (recorder.py)
compile    one inductor graph (C++ wrapper on the CPU); state is written in place by the graph itself
cudagraph  the compiled graph captured once and replayed: one launch a call

Of functions with long recurrent loops (world models, recurrent Q-learning) only pieces are compiled, such as the steps
of the loops: on a GPU the rest is captured as it is.

`auto` decides from facts alone, the same way every time: device, planned number of updates, is there a compiler, and on
the CPU the version of torch: before 2.13 its graphs for the CPU copy whole columns of the replay at every step (35 ms
for five seeds with 100 000 rows each; tried with 2.11), and some cannot be built at all.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import shutil
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.ops.pieces import compiled_pieces
from rl_training.ops.tree import tree_items, tree_leaves, tree_map
from rl_training.runtime.engine.allocator import keep_freed_memory
from rl_training.runtime.engine.recorder import Recorded

Mode = Literal["eager", "compile", "cudagraph"]

# Break-even points: compiling costs 10 to 40 s cold and saves 1 to 1.6 ms an update on the CPU, 5 ms and more on CUDA.
# A study runs through vmap, whose eager overhead is several times larger, so it pays much sooner.
MIN_UPDATES_CPU = 15_000
MIN_UPDATES_STUDY = 4_000
MIN_UPDATES_CUDA = 5_000
MIN_UPDATES_UNROLLED = 40_000  # on the CPU, with a recurrent loop in the graph: 150 s to compile, 4 ms saved an update
MIN_UPDATES_STEPS = 300  # on CUDA, where only the steps of loops are compiled: the updates with such loops are long
CPU_GRAPHS_SINCE = (2, 13)

_numbers = itertools.count()
log = logging.getLogger(__name__)


class Choice(NamedTuple):
    mode: Mode
    reason: str


def compiler_available() -> bool:
    """Is there a C++ compiler that inductor can call?"""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++", "c++"))


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def choose_mode(
    requested: str, device: torch.device, planned_updates: int, seeds: int, *, whole: bool = True,
    unrolled: bool = False,
) -> Choice:  # fmt: skip
    """`whole`, `unrolled`: is the update one graph, and does it hold a recurrent loop written out?"""
    if requested != "auto":
        if requested == "cudagraph" and device.type != "cuda":
            raise UserError(f"execution: cudagraph needs a CUDA device; this run is on {device}. Use compile or auto")
        if requested in ("compile", "cudagraph") and device.type == "cpu" and not compiler_available():
            raise UserError("execution: compile needs a C++ compiler (g++ or clang++) on the PATH; use eager or auto")
        return Choice(requested, "as configured")  # type: ignore[arg-type]
    if device.type == "cuda":
        if planned_updates >= (MIN_UPDATES_CUDA if whole else MIN_UPDATES_STEPS):
            return Choice("cudagraph", f"{planned_updates:,} updates on a GPU repay compiling")
        return Choice("eager", f"{planned_updates:,} updates are too few to repay compiling")
    if not compiler_available():
        return Choice("eager", "no C++ compiler on the PATH")
    if torch_version() < CPU_GRAPHS_SINCE:
        return Choice("eager", f"graphs for the CPU are slow before torch {'.'.join(map(str, CPU_GRAPHS_SINCE))}")
    least = MIN_UPDATES_UNROLLED if unrolled else MIN_UPDATES_STUDY if seeds > 1 else MIN_UPDATES_CPU
    if planned_updates >= least:
        return Choice("compile", f"{planned_updates:,} updates repay compiling")
    return Choice("eager", f"{planned_updates:,} updates are too few to repay compiling (from {least:,})")


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


def compiled(fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`fn` as one inductor graph. Shapes never change between calls, so guards (30 us a call) are left out."""
    torch._inductor.config.fx_graph_cache = True
    fn = _own_code(fn)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if device.type == "cpu":
        options |= {"cpp_wrapper": True, "size_asserts": False}  # the tensors are static: their sizes cannot change
        if torch_version() >= CPU_GRAPHS_SINCE:  # 2.11 makes C++ of the transposed products that does not build
            options |= _cpu_rewrites()
    else:
        from rl_training.runtime.engine.inductor.passes import GpuRewrites

        options["post_grad_custom_post_pass"] = GpuRewrites()
    return _explained(torch.compile(fn, fullgraph=True, dynamic=False, options=options), fn.__name__)


def _cpu_rewrites() -> dict[str, Any]:
    """What makes small graphs fast on the CPU. It reaches into inductor, where names may move in a later version."""
    try:
        from rl_training.runtime.engine.inductor.passes import CpuRewrites  # slow to import: not in eager runs

        rewrites = CpuRewrites()
    except (ImportError, AttributeError) as error:
        log.warning("graphs are slower: torch %s is newer than this library knows (%s)", torch.__version__, error)
        return {}
    contract = {"cpp.enable_floating_point_contract_flag": "fast"}  # x * y + z as one instruction
    return {"post_grad_custom_post_pass": rewrites, **contract}


def with_compiled_pieces(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as it is, but for small parts of it, such as the steps of its loops: each is a graph (ops/pieces.py)."""

    def call(*args: Any) -> Any:
        with compiled_pieces():
            return fn(*args)

    return _explained(call, fn.__name__)


def _explained(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Errors of the compiler as a sentence that says what to do."""

    def call(*args: Any) -> Any:
        try:
            return fn(*args)
        except Exception as error:
            if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                reason = str(error).strip().splitlines()[0]
                raise UserError(
                    f"torch {torch.__version__} cannot compile '{name}' ({reason}): set execution to eager,"
                    " which gives the same results more slowly, or take another version of torch"
                ) from error
            raise

    return call


def _own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under a code object of its own: compiled graphs are kept by code object, and without guards the graph of one
    learner would be run for the next."""

    def call(*args: Any) -> Any:
        return fn(*args)

    code = call.__code__.replace(co_name=f"{fn.__name__}_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, fn.__name__, None, call.__closure__)


class CompiledGraph:
    """A compiled function of static tensors. Its second call is watched to learn which tensors reach inductor's entry
    point and which outputs come back; every later call goes straight there. That leaves out the Python layers above it
    (dynamo, AOTAutograd: 35 to 70 us), which have nothing to do when neither tensors nor shapes ever change.

    Where the call cannot be mapped without doubt, the ordinary path is kept: slower, the same numbers.
    """

    def __init__(self, fn: Callable[..., Any], device: torch.device) -> None:
        self.fn = torch.no_grad()(compiled(fn, device))
        self.calls = 0
        self.args: tuple[Any, ...] = ()
        self.entry: Callable[[list[Tensor]], list[Tensor]] | None = None
        self.inputs: list[Tensor] = []
        self.leaves: list[int | Tensor] = []  # of the result: number of an output, or a static tensor
        self.out: Any = None  # the shape of the result, as a tree
        self.names: list[str] | None = None  # of a result that is a dict of tensors
        self.static = False  # is the result made of static tensors alone?

    def __call__(self, *args: Any) -> Any:
        if self.entry is not None and not any(map(operator.is_not, args, self.args)):
            outputs = self.entry(self.inputs)
            if self.static:
                return self.out
            leaves = [outputs[leaf] if isinstance(leaf, int) else leaf for leaf in self.leaves]
            if self.names is not None:  # the usual case, at a fifth of the cost of the general one
                return dict(zip(self.names, leaves))
            given = iter(leaves)
            return tree_map(lambda _: next(given), self.out)
        self.calls += 1
        return self._watch(*args) if self.calls == 2 else self.fn(*args)

    def _watch(self, *args: Any) -> Any:
        try:
            from torch._inductor.output_code import CompiledFxGraph as graph_class  # slow to import: not in eager runs
        except ImportError:  # another torch keeps it elsewhere: nothing to watch
            return self.fn(*args)

        seen: list[tuple[Any, list[Any], list[Any]]] = []
        ordinary = graph_class.__call__

        def watched(graph: Any, inputs: Any) -> Any:
            given = list(inputs)  # the graph empties the list it is given
            outputs = ordinary(graph, inputs)
            seen.append((graph.current_callable, given, list(outputs)))
            return outputs

        graph_class.__call__ = watched  # type: ignore[method-assign, assignment]
        try:
            out = self.fn(*args)
        finally:
            graph_class.__call__ = ordinary  # type: ignore[method-assign]
        if len(seen) == 1:
            entry, inputs, outputs = seen[0]
            static = {id(leaf) for leaf in tree_leaves(args)}
            leaves = [_place(leaf, inputs, outputs) for leaf in tree_leaves(out)]
            if all(id(x) in static for x in inputs) and all(leaf is not None for leaf in leaves):
                self.args, self.entry, self.inputs, self.out = args, _unwrapped(entry), inputs, out
                _hold(inputs, self)
                self.leaves = leaves  # type: ignore[assignment]
                if self.leaves and all(isinstance(leaf, Tensor) for leaf in self.leaves):
                    given = iter(self.leaves)
                    self.static, self.out = True, tree_map(lambda _: next(given), out)
                flat = isinstance(out, dict) and all(isinstance(x, Tensor) for x in out.values())
                self.names = list(out) if flat else None
        return out


def _unwrapped(entry: Callable[[list[Any]], Any]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Inductor's entry point as a function that leaves the list of its inputs as it is. Around its C++ stands a Python
    function that looks at each input again (5 us): where it is the one known, its two calls are made here."""
    cells: tuple[Any, ...] = getattr(entry, "__closure__", None) or ()
    handles = getattr(torch._C, "_aoti", None)
    names = set(getattr(getattr(entry, "__code__", None), "co_names", ()))
    if len(cells) != 1 or handles is None or not _WRAPPER <= names <= _WRAPPER | {"isinstance", "Tensor", "tensor"}:
        return lambda inputs: entry(inputs.copy())
    call = cells[0].cell_contents
    take, give = handles.unsafe_alloc_void_ptrs_from_tensors, handles.alloc_tensors_by_stealing_from_void_ptrs
    return lambda inputs: give(call(take(inputs)))


def _hold(tensors: list[Tensor], owner: Any) -> None:
    """A second use of each tensor, as long as `owner` lives. Where its Python object is the only one, that object must
    be told, under the interpreter's lock, whenever a handle for a graph comes and goes: 2 us a call for 19 tensors."""
    handles = getattr(torch._C, "_aoti", None)
    take = getattr(handles, "unsafe_alloc_void_ptrs_from_tensors", None)
    give = getattr(handles, "alloc_tensors_by_stealing_from_void_ptrs", None)
    if take is not None and give is not None:  # else a torch that has them elsewhere
        weakref.finalize(owner, give, take(tensors)).atexit = False


# What the wrapper of a graph mentions that has no constants and returns no plain numbers.
_WRAPPER = {
    "torch", "_C", "_aoti", "unsafe_alloc_void_ptrs_from_tensors", "alloc_tensors_by_stealing_from_void_ptrs", "clear",
}  # fmt: skip


def _place(leaf: Tensor, inputs: list[Tensor], outputs: list[Tensor]) -> int | Tensor | None:
    """Where a result comes from: an output of the graph, an input that it wrote to, or neither."""

    def same(x: Any) -> bool:
        return isinstance(x, Tensor) and x.data_ptr() == leaf.data_ptr() and x.shape == leaf.shape

    found = [i for i, x in enumerate(outputs) if same(x)]
    return found[0] if found else next((x for x in inputs if same(x)), None)


class CapturedGraph:
    """A function of static tensors, captured as one CUDA graph at its first call.

    Capturing needs trial runs, which would change the state: what they change is put back afterwards.
    """

    def __init__(self, fn: Callable[..., Any], device: torch.device) -> None:
        self.fn, self.device = fn, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: Any = None

    def capture(self, *args: Any, keep: Any) -> None:
        saved = tree_map(lambda x: x.clone(), keep)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.fn(*args)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.out = self.fn(*args)
        for (_, old), (_, value) in zip(tree_items(keep), tree_items(saved)):
            old.copy_(value)
        self.graph = graph

    def __call__(self, *args: Any, keep: Any) -> Any:
        if self.graph is None:
            self.capture(*args, keep=keep)
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
        """`keep()` names the tensors that trial runs of a capture must leave as they were. `whole`: compile the
        function as one graph; or only pieces of it, where unrolling its loops is too much. `times`: each call runs it
        so often; a capture holds all of them."""
        if self.mode == "eager":
            return repeated(Recorded(fn), times)
        if self.mode == "compile":
            return repeated(CompiledGraph(fn, self.device) if whole else Recorded(with_compiled_pieces(fn)), times)
        once = compiled(fn, self.device) if whole else with_compiled_pieces(fn)
        captured = CapturedGraph(repeated(once, times), self.device)

        def call(*args: Any) -> Any:
            with torch.no_grad():
                return captured(*args, keep=keep())

        return call
