"""Every private name of torch that this library uses, and what happens in a version of torch that lacks it.

A capability is a group of such names. It looks them up when it is first asked. If one is missing, it logs once what is
left out and returns None, and the caller takes the ordinary way, which gives the same results more slowly. No other
module may use a private name of torch.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@cache
def warn_once(what: str, reason: str) -> None:
    """Log what is left out or done differently in this version of torch."""
    log.warning("torch %s: %s (%s)", torch.__version__, what, reason)


class Capability:
    """The private names that one feature needs, as `module` or `module:attribute`. `without`: what happens if one is
    missing."""

    def __init__(self, without: str, **names: str) -> None:
        self.without, self.names = without, names
        self._looked = False
        self._found: SimpleNamespace | None = None

    def find(self) -> Any:
        """The objects by their short names, or None."""
        if not self._looked:
            self._looked = True
            try:
                self._found = SimpleNamespace(**{name: pkgutil.resolve_name(x) for name, x in self.names.items()})
            except Exception as error:  # not only ImportError: importing a changed module can fail in any way
                warn_once(self.without, str(error))
        return self._found

    def required(self) -> Any:
        """The same for modules that cannot be imported without them."""
        if (found := self.find()) is None:
            raise ImportError(self.without)
        return found


def either(*names: str) -> str:
    """The first of several names that this version of torch has, because a name may move; otherwise the last."""
    for name in names[:-1]:
        with suppress(Exception):
            pkgutil.resolve_name(name)
            return name
    return names[-1]


transforms = Capability(
    "gradients are computed by functional transforms, which are slower in eager mode",
    is_wrapped="torch:_C._functorch.is_functorch_wrapped_tensor",
)
recording = Capability(
    "functions are not recorded and run as plain operations",
    make_fx="torch.fx.experimental.proxy_tensor:make_fx",
    is_mutable="torch:ops.aten.add_.Tensor._schema.is_mutable",
)
fake_tensors = Capability(
    "recording a function takes twice as long",
    tracing="torch._guards:tracing",
    TracingContext="torch._guards:TracingContext",
    FakeTensorMode="torch._subclasses:FakeTensorMode",
)
tracing_flag = Capability(
    "functions with compiled pieces are not recorded",
    tracer="torch.fx._symbolic_trace",
    flag=either("torch.fx._symbolic_trace:_is_fx_tracing_context", "torch.fx._symbolic_trace:_is_fx_tracing_flag"),
)
inductor_options = Capability(
    "graphs are compiled with inductor's default options", list_options="torch._inductor:list_options"
)
graph_passes = Capability(
    "graphs are compiled without rewrites",
    CustomGraphPass="torch._inductor.custom_graph_pass:CustomGraphPass",
    get_hash_for_files="torch._inductor.custom_graph_pass:get_hash_for_files",
    stable_topological_sort="torch._inductor.pattern_matcher:stable_topological_sort",
)
product_kernels = Capability(
    "on a GPU, biases and activations are kernels of their own",
    InductorChoices="torch._inductor.choices:InductorChoices",
    expected="torch._inductor.choices:InductorChoices._finalize_template_configs",
    KernelTemplateChoice="torch._inductor.kernel_template_choice:KernelTemplateChoice",
    DictKernelTemplateParams="torch._inductor.template_heuristics.params:DictKernelTemplateParams",
    ExternKernelChoice="torch._inductor.select_algorithm:ExternKernelChoice",
    V="torch._inductor.virtualized:V",
)
lowering = Capability(
    "graphs for the CPU are compiled without rewrites",
    ir="torch._inductor.ir",
    V="torch._inductor.virtualized:V",
    lowerings="torch._inductor.lowering:lowerings",
    register_lowering="torch._inductor.lowering:register_lowering",
    realize_inputs="torch._inductor.select_algorithm:realize_inputs",
    pick_vec_isa="torch._inductor.cpu_vec_isa:pick_vec_isa",
)
wrapper_code = Capability(
    "graphs for the CPU allocate their intermediate results in every call",
    config="torch._inductor.config",
    CppWrapperCpu="torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu",
    ReinterpretLine="torch._inductor.codegen.wrapper:ReinterpretLine",
    ReuseLine="torch._inductor.codegen.wrapper:ReuseLine",
)
direct_entry = Capability(
    "compiled graphs are called through all layers of torch.compile",
    CompiledFxGraph="torch._inductor.output_code:CompiledFxGraph",
)
handles = Capability(
    "compiled graphs check every input in every call",
    take="torch:_C._aoti.unsafe_alloc_void_ptrs_from_tensors",
    give="torch:_C._aoti.alloc_tensors_by_stealing_from_void_ptrs",
)
dispatch = Capability(
    "single operations cannot be watched", TorchDispatchMode="torch.utils._python_dispatch:TorchDispatchMode"
)

CAPABILITIES = {name: value for name, value in globals().items() if isinstance(value, Capability)}


def left_out() -> list[str]:
    """What happens differently in this version of torch."""
    return [capability.without for capability in CAPABILITIES.values() if capability.find() is None]


def always(_: Tensor) -> bool:
    """For `is_wrapped` where torch cannot tell: the functional form is right for every tensor."""
    return True


# Is a tensor inside `vmap` or another functional transform? Called in the hot path, so it is looked up here and now.
is_wrapped: Callable[[Tensor], bool] = getattr(transforms.find(), "is_wrapped", always)


def writes_in_place(operation: Any) -> bool:
    """Does an operation of a recorded graph change one of its inputs?"""
    schema = getattr(operation, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def cpp_function(operation: Any) -> Any:
    """The C++ function behind an operation, which saves a Python call; `operation` itself if there is none."""
    return getattr(operation, "_op", operation)


def shared_fake_mode() -> AbstractContextManager[Any]:
    """While recording, each result is described by a fake tensor. Outside this context make_fx creates a mode for every
    single one, which takes nearly half of the time."""
    names = fake_tensors.find()
    if names is None:
        return nullcontext()
    mode: AbstractContextManager[Any] = names.tracing(
        names.TracingContext(names.FakeTensorMode(allow_fallback_kernels=True))
    )
    return mode


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Dynamo refuses to run while its caller is being traced, unless the tracing flag is cleared first."""
    names = tracing_flag.find()
    if names is None or callable(names.flag):  # a context since torch 2.15, where each thread has its own flag
        with nullcontext() if names is None else names.flag(False):
            yield
        return
    before, names.tracer._is_fx_tracing_flag = names.tracer._is_fx_tracing_flag, False
    try:
        yield
    finally:
        names.tracer._is_fx_tracing_flag = before


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those options of inductor that this version of torch has."""
    names = inductor_options.find()
    if names is None:
        return {}
    known = names.list_options()
    for name in options.keys() - set(known):
        warn_once(f"graphs are compiled without the option {name}", "unknown to inductor")
    return {name: value for name, value in options.items() if name in known}


@contextmanager
def compiling_with(choices: Any) -> Iterator[None]:
    """Inductor asks `choices` which kernels to use; None leaves its own."""
    names = None if choices is None else product_kernels.find()
    with nullcontext() if names is None else names.V.set_choices_handler(choices):
        yield


def without_shim_warnings() -> None:
    """Stop inductor from logging a warning for each operation that its C++ code calls through Python, such as those of
    linear algebra in `acktr`: the result is the same, and there is nothing that a user could do."""
    logging.getLogger("torch._inductor.ir").addFilter(_is_no_shim_warning)


def _is_no_shim_warning(record: logging.LogRecord) -> bool:
    return "missing a c-shim implementation" not in record.getMessage()


def is_compiler_error(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))


def operation_watcher() -> Any:
    """The base class of contexts whose `__torch_dispatch__` is called for every operation, or an empty context."""
    return getattr(dispatch.find(), "TorchDispatchMode", ExitStack)
