"""Recorded execution: plain operations without the Python code around them.

A function that is called often is recorded once: make_fx lists the tensor operations that one call runs, and this
module writes them out as Python source. From then on the source runs instead of the function. Trees, views of
parameters and autograd's bookkeeping disappear; the operations stay, and so does every bit of the result. No compiler
is needed. A function must meet the same conditions as for a compiled graph: it gets the same tensors in every call,
writes to them in place, and takes no decision that depends on their values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_training.ops import rng
from rl_training.ops.torch_internals import cpp_function, recording, shared_fake_mode, warn_once, writes_in_place
from rl_training.ops.tree import tree_leaves, tree_map

RECORD_AFTER = 500  # calls: recording takes about a second and saves about half of every later call

_VIEWS = {"view", "select", "slice", "unsqueeze", "squeeze", "t", "transpose", "permute", "expand", "detach", "alias",
          "split_with_sizes", "split", "unbind"}  # fmt: skip
_FACTORIES = {"arange", "scalar_tensor", "full", "zeros", "ones"}


class Recorded:
    """`fn`, replaced by its recording after `RECORD_AFTER` calls with the same arguments."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.calls = fn, 0
        self.args: tuple[Any, ...] = ()
        self.run: Callable[[], list[Tensor]] | None = None
        self.out: Any = None  # the structure of the result, as a tree

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        if not (self.args and all(a is b for a, b in zip(args, self.args))):
            self.args, self.calls, self.run = args, 0, None
        if self.run is None:
            self.calls += 1
            return self.record() if self.calls >= RECORD_AFTER and can_record() else self.fn(*args)
        with torch.inference_mode():
            leaves = iter(self.run())
        return tree_map(lambda _: next(leaves), self.out)

    def record(self) -> Any:
        """Make one ordinary call and record it."""
        static = tree_leaves(self.args)

        def flat(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            self.out = self.fn(*tree_map(lambda _: next(given), self.args))
            return tree_leaves(self.out)

        with rng.tensors_only(), shared_fake_mode():
            graph = recording.required().make_fx(flat)(*static)
        self.run = _source(graph, static)
        self.out, out = tree_map(lambda _: 0, self.out), self.out
        return out


@cache
def can_record() -> bool:
    """Does recording work in this version of torch? Tried on a small function, because a recording that fails halfway
    has already changed some of the state."""
    if recording.find() is None:
        return False

    def step(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        tree["x"].add_(tree["x"][0] + 1.0)
        return {"twice": tree["x"] * 2.0}

    tree = {"x": torch.zeros(2)}
    trial = Recorded(step)
    trial.args = (tree,)
    try:
        right = [out["twice"].tolist() for out in (trial.record(), trial(tree))] == [[2.0, 2.0], [6.0, 6.0]]
        reason = "wrong result"
    except Exception as error:
        right, reason = False, str(error)
    if not right:
        warn_once(recording.without, reason)
    return right


def _name(target: Any) -> str:
    """`mul` for aten.mul.Tensor."""
    return getattr(getattr(target, "overloadpacket", None), "__name__", "")


def _writes(node: torch.fx.Node) -> bool:
    return writes_in_place(node.target)


def _source(graph: torch.fx.GraphModule, static: list[Tensor]) -> Callable[[], list[Tensor]]:
    """The recording as a function without arguments. Whatever never changes is computed now: views of the static
    tensors, and constants that nothing writes to."""
    nodes = graph.graph
    nodes.eliminate_dead_code(lambda node: _writes(node) or node.op in ("placeholder", "output"))
    known: dict[torch.fx.Node, Any] = dict(zip((n for n in nodes.nodes if n.op == "placeholder"), static))
    same: dict[torch.fx.Node, torch.fx.Node] = {}  # nodes that only rename another node
    names: dict[str, Any] = {}  # of the operations and constants in the source
    numbers: dict[int, str] = {}
    lines: list[str] = []
    last: dict[str, int] = {}  # the last line that reads a name; its memory is freed there, as without a recording

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
            # The generator's mixing operation runs Python code: call that directly.
            function = rng.mix_on_host if node.target is rng.mix_op else cpp_function(node.target)
            lines.append(f"{node.name} = {constant(function)}({', '.join(call)})")
    for name, number in last.items():
        if number < len(lines) - 1:
            lines[number] += f"; del {name}"
    body = "\n        ".join(lines)
    source_text = f"def make({', '.join(names)}):\n    def run():\n        {body}\n    return run"
    scope: dict[str, Any] = {}
    exec(source_text, scope)
    run: Callable[[], list[Tensor]] = scope["make"](*names.values())
    return run
