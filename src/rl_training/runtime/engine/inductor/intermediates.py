"""The intermediate results of a graph for the CPU, in tensors that are kept from call to call.

A small update has fifty of them. Making each anew (the tensor, its storage, its memory) and freeing it again takes a
sixth of a DQN update and a twelfth of a PPO minibatch; counting their uses and asking for their memory in each call,
still a fiftieth of the latter. Results that a call returns are made anew as before: a caller
may keep them. Each thread has its own, so two threads may run the same graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch._inductor import config, ir
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.codegen.wrapper import ReinterpretLine, ReuseLine
from torch._inductor.virtualized import V

SOURCE = Path(__file__).with_suffix(".h")
LARGEST = 2**18  # bytes of one tensor: for larger ones allocating is the smallest part of their cost

_ordinary = CppWrapperCpu.make_buffer_allocation


def keep(rewrites: type) -> None:
    """From now on, in every graph that is rewritten by one of these."""

    def make_buffer_allocation(wrapper: Any, buffer: Any) -> str:
        written = wrapper.wrapper_call._lines
        code: str = _ordinary(wrapper, buffer)  # type: ignore[no-untyped-call]
        ours = isinstance(config.post_grad_custom_post_pass, rewrites)
        if not ours or not _small(buffer) or buffer.get_name() in _returned(wrapper):
            return code
        kept = _kept(written[-1], code, buffer.get_name(), buffer.get_dtype().itemsize)
        if kept is None:
            return code
        if not getattr(wrapper, "has_kept", False):
            wrapper.header.splice(SOURCE.read_text(encoding="utf-8"))
            wrapper.has_kept = True
        written[-1], code = kept
        return code

    CppWrapperCpu.make_buffer_allocation = make_buffer_allocation  # type: ignore[method-assign]


def _kept(allocation: Any, code: str, name: str, itemsize: int) -> tuple[str, str] | None:
    """The line that allocates, in the first call only, and the one that names the result (intermediates.h); None where
    they are not the known ones."""
    text = allocation.strip() if isinstance(allocation, str) else ""
    end = f", &{name}_handle));"
    known = text.startswith("AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(") and text.endswith(end)
    if not known or code != f"RAIIAtenTensorHandle {name}({name}_handle);":
        return None
    first = f"{text.removesuffix(end)}, &{name}_kept)); {name}_data = get_data_ptr_wrapper({name}_kept);"
    memory = f"static thread_local AtenTensorHandle {name}_kept = nullptr; static thread_local void* {name}_data;"
    return f"{memory} if ({name}_kept == nullptr) {{ {first} }}", (
        f"rl_training::Kept {name}({name}_kept, {name}_data, {itemsize});"
    )


def _small(buffer: Any) -> bool:
    sizes = V.graph.get_allocation_size(buffer)
    if not all(isinstance(size, int) or size.is_Integer for size in sizes):
        return False
    count = 1
    for size in sizes:
        count *= int(size)
    return count * int(buffer.get_dtype().itemsize) <= LARGEST


def _returned(wrapper: Any) -> set[str]:
    """Names of the results, and of the buffers whose memory they are in."""
    found: set[str] = getattr(wrapper, "returned_buffers", set())
    if found:
        return found
    memory_of: dict[str, list[str]] = {}
    for line in wrapper.lines:
        if isinstance(line, (ReuseLine, ReinterpretLine)):
            memory_of.setdefault(line.reused_as.get_name(), []).append(line.node.get_name())
    left = list(V.graph.get_output_names())
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        left += memory_of.get(name, [])
        buffer = V.graph.try_get_buffer(name)
        if isinstance(buffer, ir.Buffer):
            left += buffer.get_inputs_that_alias_output()
            if isinstance(buffer.layout, ir.NonOwningLayout):
                left.append(buffer.layout.view.get_name())
    wrapper.returned_buffers = found
    return found
