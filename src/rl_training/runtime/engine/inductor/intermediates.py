"""Intermediate results of a graph for the CPU keep their memory from call to call.

A small update has fifty of them. Creating and freeing each one (tensor, storage, memory) takes a sixth of a DQN update
and a twelfth of a PPO minibatch; even counting references and asking for addresses takes a fiftieth of the latter.
Results that a call returns are still created in every call, because the caller may keep them. Each thread has its own
intermediate results, so several threads may run the same graph.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rl_training.ops.torch_internals import lowering, wrapper_code

inductor = lowering.required()
SOURCE = Path(__file__).with_suffix(".h")
MAX_BYTES = 2**18  # of one tensor: allocating a larger one is a small part of its cost


@cache
def keep_for(rewrites: type) -> bool:
    """Do this in every graph that a pass of this type rewrites. False where torch does not allow it."""
    names = wrapper_code.find()
    if names is None:
        return False
    ordinary = names.CppWrapperCpu.make_buffer_allocation

    def make_buffer_allocation(wrapper: Any, buffer: Any) -> str:
        code: str = ordinary(wrapper, buffer)
        current = getattr(names.config, "post_grad_custom_post_pass", None)
        if not (isinstance(current, rewrites) and current.keeps_intermediates):  # type: ignore[attr-defined]
            return code
        if not _is_small(buffer) or buffer.get_name() in _returned(wrapper):
            return code
        written = wrapper.wrapper_call._lines
        kept = _kept(written[-1], code, buffer.get_name(), buffer.get_dtype().itemsize)
        if kept is None:
            return code
        if not getattr(wrapper, "has_kept", False):
            wrapper.header.splice(SOURCE.read_text(encoding="utf-8"))
            wrapper.has_kept = True
        written[-1], code = kept
        return code

    names.CppWrapperCpu.make_buffer_allocation = make_buffer_allocation
    return True


def _kept(allocation: Any, code: str, name: str, itemsize: int) -> tuple[str, str] | None:
    """The line that allocates, now in the first call only, and the one that names the result (intermediates.h). None if
    inductor wrote other lines than the known ones."""
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


def _is_small(buffer: Any) -> bool:
    sizes = inductor.V.graph.get_allocation_size(buffer)
    if not all(isinstance(size, int) or size.is_Integer for size in sizes):
        return False
    count = 1
    for size in sizes:
        count *= int(size)
    return count * int(buffer.get_dtype().itemsize) <= MAX_BYTES


def _returned(wrapper: Any) -> set[str]:
    """Names of the results that a call returns, and of the buffers whose memory they use."""
    found: set[str] = getattr(wrapper, "returned_buffers", set())
    if found:
        return found
    graph, ir, names = inductor.V.graph, inductor.ir, wrapper_code.find()
    memory_of: dict[str, list[str]] = {}
    for line in wrapper.lines:
        if isinstance(line, (names.ReuseLine, names.ReinterpretLine)):
            memory_of.setdefault(line.reused_as.get_name(), []).append(line.node.get_name())
    left = list(graph.get_output_names())
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        left += memory_of.get(name, [])
        buffer = graph.try_get_buffer(name)
        if isinstance(buffer, ir.Buffer):
            left += buffer.get_inputs_that_alias_output()
            if isinstance(buffer.layout, ir.NonOwningLayout):
                left.append(buffer.layout.view.get_name())
    wrapper.returned_buffers = found
    return found
