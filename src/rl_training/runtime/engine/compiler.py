"""Functions of static tensors as compiled graphs, called at the lowest cost that this version of torch allows."""

from __future__ import annotations

import itertools
import operator
import os
import shutil
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.ops import torch_internals as internals
from rl_training.ops.pieces import compiled_pieces
from rl_training.ops.tree import tree_leaves, tree_map

CPU_GRAPHS_SINCE = (2, 13)  # the first version of torch with good graphs for the CPU

_numbers = itertools.count()


def compiler_available() -> bool:
    """Is there a C++ compiler that inductor can call?"""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++", "c++"))


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def compiled(fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`fn` as one inductor graph. If compiling with our rewrites fails, it is compiled again without them."""
    rewrites = _rewrites(device)
    run, ran = _one_graph(fn, device, rewrites), False

    def call(*args: Any) -> Any:
        nonlocal run, ran
        if ran:
            return run(*args)
        try:
            with internals.compiling_with(_choices(device) if rewrites else None):
                out = run(*args)
        except Exception as error:
            if not rewrites or not internals.is_compiler_error(error):
                raise
            internals.warn_once(f"'{fn.__name__}' is compiled again without rewrites", _first_line(error))
            run = _one_graph(fn, device, {})
            out = run(*args)
        ran = True
        return out

    return _explained(call, fn.__name__)


def _one_graph(fn: Callable[..., Any], device: torch.device, rewrites: dict[str, Any]) -> Callable[..., Any]:
    """Shapes never change between calls, so guards (30 us a call) are left out."""
    options = dict(rewrites)
    if device.type == "cpu":
        options |= {"cpp_wrapper": True, "size_asserts": False}  # the tensors are static: their sizes cannot change
        internals.without_shim_warnings()
    options = {**internals.known_options(options), "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(_own_code(fn), fullgraph=True, dynamic=False, options=options)


def _rewrites(device: torch.device) -> dict[str, Any]:
    """Options that make inductor apply our rewrites; none where this version of torch lacks what they need."""
    on_cpu = device.type == "cpu"
    if on_cpu and torch_version() < CPU_GRAPHS_SINCE:  # 2.11 generates C++ for transposed products that does not build
        return {}
    if internals.graph_passes.find() is None or (on_cpu and internals.lowering.find() is None):
        return {}
    try:
        if on_cpu:
            from rl_training.runtime.engine.inductor.passes import CpuRewrites  # slow to import: not in eager runs

            contract = {"cpp.enable_floating_point_contract_flag": "fast"}  # x * y + z as one instruction
            return {"post_grad_custom_post_pass": CpuRewrites(), **contract}
        from rl_training.runtime.engine.inductor.shared_weights import GpuRewrites

        return {"post_grad_custom_post_pass": GpuRewrites(), **_kernel_options()}
    except Exception as error:  # a name is there and works differently
        internals.warn_once(internals.graph_passes.without, str(error))
        return {}


def _kernel_options() -> dict[str, Any]:
    if internals.product_kernels.find() is None:
        return {}
    from rl_training.runtime.engine.inductor.choices import OPTIONS

    return OPTIONS


def _choices(device: torch.device) -> Any:
    """Which kernels compute products and sums; None where inductor decides."""
    if device.type == "cpu" or internals.product_kernels.find() is None:
        return None
    from rl_training.runtime.engine.inductor.choices import GpuChoices

    return GpuChoices()


def with_compiled_pieces(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as it is, except that small parts of it, such as the steps of its loops, are graphs (ops/pieces.py)."""

    def call(*args: Any) -> Any:
        with compiled_pieces():
            return fn(*args)

    return _explained(call, fn.__name__)


def _explained(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Turn compiler errors into a sentence that says what to do."""

    def call(*args: Any) -> Any:
        try:
            return fn(*args)
        except Exception as error:
            if not internals.is_compiler_error(error):
                raise
            raise UserError(
                f"torch {torch.__version__} cannot compile '{name}' ({_first_line(error)}): set execution to eager or"
                " recorded, which give the same results more slowly, or install another version of torch"
            ) from error

    return call


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its own code object. torch keeps compiled graphs by code object, and without guards it would run the
    graph of one learner for the next."""

    def call(*args: Any) -> Any:
        return fn(*args)

    code = call.__code__.replace(co_name=f"{fn.__name__}_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, fn.__name__, None, call.__closure__)


class CompiledGraph:
    """A compiled function of static tensors. The second call is watched to learn which tensors reach inductor's entry
    point and which outputs come back. Every later call goes straight there and skips the Python layers above it
    (dynamo, AOTAutograd: 35 to 70 us), which have nothing to do while tensors and shapes stay the same.

    If the call cannot be mapped with certainty, it keeps the ordinary path: slower, with the same numbers.
    """

    def __init__(self, fn: Callable[..., Any], device: torch.device) -> None:
        self.fn = torch.no_grad()(compiled(fn, device))
        self.calls = 0
        self.args: tuple[Any, ...] = ()
        self.entry: Callable[[list[Tensor]], list[Tensor]] | None = None
        self.inputs: list[Tensor] = []
        self.leaves: list[int | Tensor] = []  # of the result: the number of an output, or a static tensor
        self.out: Any = None  # the structure of the result, as a tree
        self.names: list[str] | None = None  # of a result that is a dict of tensors
        self.static = False  # does the result consist of static tensors alone?

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
        names = internals.direct_entry.find()
        if names is None:
            return self.fn(*args)
        seen: list[tuple[Any, list[Any], list[Any]]] = []
        graph_class = names.CompiledFxGraph
        ordinary = graph_class.__call__

        def watched(graph: Any, inputs: Any) -> Any:
            given = list(inputs)  # the graph empties the list that it gets
            outputs = ordinary(graph, inputs)
            seen.append((getattr(graph, "current_callable", None), given, list(outputs)))
            return outputs

        graph_class.__call__ = watched
        try:
            out = self.fn(*args)
        finally:
            graph_class.__call__ = ordinary
        if len(seen) == 1 and callable(seen[0][0]):
            self._map(args, out, *seen[0])
        return out

    def _map(self, args: tuple[Any, ...], out: Any, entry: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Go straight to the entry point from now on, if every input and every result can be told."""
        static = {id(leaf) for leaf in tree_leaves(args)}
        leaves = [_origin(leaf, inputs, outputs) for leaf in tree_leaves(out)]
        if any(id(x) not in static for x in inputs) or any(leaf is None for leaf in leaves):
            return
        self.args, self.entry, self.inputs, self.out = args, _unwrapped(entry), inputs, out
        _hold(inputs, self)
        self.leaves = leaves  # type: ignore[assignment]
        if self.leaves and all(isinstance(leaf, Tensor) for leaf in self.leaves):
            given = iter(self.leaves)
            self.static, self.out = True, tree_map(lambda _: next(given), out)
        flat = isinstance(out, dict) and all(isinstance(x, Tensor) for x in out.values())
        self.names = list(out) if flat else None


# The names in the wrapper of a graph that has no constants and returns no plain numbers.
_WRAPPER = {
    "torch", "_C", "_aoti", "unsafe_alloc_void_ptrs_from_tensors", "alloc_tensors_by_stealing_from_void_ptrs", "clear",
}  # fmt: skip


def _unwrapped(entry: Callable[[list[Any]], Any]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Inductor's entry point as a function that leaves its list of inputs unchanged. The C++ function is wrapped in
    Python that checks every input again (5 us). If that wrapper is the known one, its two calls are made here."""
    cells: tuple[Any, ...] = getattr(entry, "__closure__", None) or ()
    handles = internals.handles.find()
    names = set(getattr(getattr(entry, "__code__", None), "co_names", ()))
    if len(cells) != 1 or handles is None or not _WRAPPER <= names <= _WRAPPER | {"isinstance", "Tensor", "tensor"}:
        return lambda inputs: entry(inputs.copy())
    call, take, give = cells[0].cell_contents, handles.take, handles.give
    return lambda inputs: give(call(take(inputs)))


def _hold(tensors: list[Tensor], owner: Any) -> None:
    """Keep a second reference to each tensor as long as `owner` lives. If a tensor's Python object is its only
    reference, that object must be told, under the interpreter's lock, whenever a graph takes or returns a handle: 2 us
    a call for 19 tensors."""
    handles = internals.handles.find()
    if handles is not None:
        weakref.finalize(owner, handles.give, handles.take(tensors)).atexit = False


def _origin(leaf: Tensor, inputs: list[Tensor], outputs: list[Tensor]) -> int | Tensor | None:
    """Where a result comes from: an output of the graph, an input that it wrote to, or neither."""

    def same(x: Any) -> bool:
        return isinstance(x, Tensor) and x.data_ptr() == leaf.data_ptr() and x.shape == leaf.shape

    found = [i for i, x in enumerate(outputs) if same(x)]
    return found[0] if found else next((x for x in inputs if same(x)), None)
