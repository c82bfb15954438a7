"""Eager execution without the Python around it.

A function that is called often is recorded once: the tensor operations it ran, in order, as a flat list (make_fx),
written out as Python source that calls them. Trees, views of parameters and autograd's bookkeeping are gone after that;
the operations, and so every bit of the result, stay the same. It needs no compiler, and it asks of a function only what
a compiled graph asks too: the same tensors at every call, written in place, no decision that depends on their values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_training.ops import rng
from rl_training.ops.tree import tree_leaves, tree_map

RECORD_AFTER = 500  # calls: recording costs about a second, and saves about half of each later call

_VIEWS = {"view", "select", "slice", "unsqueeze", "squeeze", "t", "transpose", "permute", "expand", "detach", "alias",
          "split_with_sizes", "split", "unbind"}  # fmt: skip
_FACTORIES = {"arange", "scalar_tensor", "full", "zeros", "ones"}


class Recorded:
    """`fn`, and after `RECORD_AFTER` calls with the same arguments its recording."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.calls = fn, 0
        self.args: tuple[Any, ...] = ()
        self.run: Callable[[], list[Tensor]] | None = None
        self.out: Any = None  # the shape of the result, as a tree

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        if not (self.args and all(a is b for a, b in zip(args, self.args))):
            self.args, self.calls, self.run = args, 0, None
        if self.run is None:
            self.calls += 1
            return self.fn(*args) if self.calls < RECORD_AFTER else self._record()
        with torch.inference_mode():
            leaves = iter(self.run())
        return tree_map(lambda _: next(leaves), self.out)

    def _record(self) -> Any:
        """One ordinary call that is also written down."""
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

        static = tree_leaves(self.args)

        def flat(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            self.out = self.fn(*tree_map(lambda _: next(given), self.args))
            return tree_leaves(self.out)

        # Each result is described by a fake tensor. Without a mode of its own around it, make_fx makes one for every
        # result, which is nearly half of what recording costs.
        with rng.tensors_only(), tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            graph = make_fx(flat)(*static)
        self.run = _source(graph, static)
        self.out, out = tree_map(lambda _: 0, self.out), self.out
        return out


def _name(target: Any) -> str:
    """`mul` for aten.mul.Tensor."""
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else ""


def _writes(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _source(graph: torch.fx.GraphModule, static: list[Tensor]) -> Callable[[], list[Tensor]]:
    """The recording as a function without arguments. What can be known now is computed now: views of the static
    tensors, and constants that nothing writes to."""
    nodes = graph.graph
    nodes.eliminate_dead_code(lambda node: _writes(node) or node.op in ("placeholder", "output"))
    known: dict[torch.fx.Node, Any] = dict(zip((n for n in nodes.nodes if n.op == "placeholder"), static))
    same: dict[torch.fx.Node, torch.fx.Node] = {}  # nodes that only rename another one
    names: dict[str, Any] = {}  # of the operations and constants in the source
    numbers: dict[int, str] = {}
    lines: list[str] = []
    last: dict[str, int] = {}  # line that reads a name last: then its memory is freed, as without a recording

    def constant(value: Any) -> str:
        if id(value) not in numbers:
            numbers[id(value)] = f"c{len(names)}"
            names[numbers[id(value)]] = value
        return numbers[id(value)]

    def text(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            value = same.get(value, value)
            if value in known:
                return constant(known[value])
            last[value.name] = len(lines)
            return str(value.name)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(text, value)) + "]"
        return repr(value) if value is None or isinstance(value, bool | int) else constant(value)

    def fixed(node: torch.fx.Node) -> bool:
        name, inputs = _name(node.target), [same.get(n, n) for n in node.all_input_nodes]
        if name in _VIEWS or node.target is operator.getitem:
            return all(n in known for n in inputs)
        readers = all(not _writes(n) and _name(n.target) not in _VIEWS and n.op != "output" for n in node.users)
        return name in _FACTORIES and not inputs and readers

    for node in nodes.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            known[node] = getattr(graph, str(node.target))
        elif node.op == "output":
            lines.append(f"return {text(node.args[0])}")
        elif fixed(node):
            arguments = torch.fx.map_arg(node.args, lambda n: known[same.get(n, n)])
            known[node] = node.target(*arguments, **node.kwargs)
        elif _name(node.target) == "detach":
            source: Any = node.args[0]
            same[node] = same.get(source, source)
        elif node.target is operator.getitem:
            lines.append(f"{node.name} = {text(node.args[0])}[{node.args[1]}]")
        else:
            call = [text(value) for value in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
            function = node.target._op if isinstance(node.target, torch._ops.OpOverload) else node.target
            if node.target is rng.mix_op:  # straight to the Python that it runs
                function = rng.mix_on_host
            lines.append(f"{node.name} = {constant(function)}({', '.join(call)})")
    for name, number in last.items():
        if number < len(lines) - 1:
            lines[number] += f"; del {name}"
    body = "\n        ".join(lines)
    source_text = f"def make({', '.join(names)}):\n    def run():\n        {body}\n    return run"
    space: dict[str, Any] = {}
    exec(source_text, space)
    run: Callable[[], list[Tensor]] = space["make"](*names.values())
    return run
