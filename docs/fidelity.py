"""The table of docs/fidelity.md: what each algorithm is taken from, how it differs, and which tests check it.

Sources and deviations come from the docstring of the algorithm's module: its first paragraph cites the papers, and its
last one starts with "Deviations:". The tests are found by reading tests/: those that name the algorithm, or use
something from its module.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rl_training import registry

TESTS = Path(__file__).resolve().parent.parent / "tests"
CHECKS = ("test_algorithms_*.py", "test_architectures.py", "test_dynamics.py", "test_models*.py")
DYNAMICS = "rl_training.algorithms.model_based.model_fit"  # what the model-based algorithms share
_NAME = r"(?:van )?[A-Z][\w'-]+"
CITATION = re.compile(rf"{_NAME}(?:(?:, {_NAME})* (?:&|and) {_NAME}|\s+et\s+al\.)?\s+(?:19|20)\d\d[a-z]?")


class Fidelity(NamedTuple):
    """One row: the algorithms of a module."""

    names: tuple[str, ...]
    sources: tuple[str, ...]
    deviations: str
    checks: dict[str, int]  # test file -> number of its tests


def described(doc: str) -> tuple[tuple[str, ...], str]:
    """(papers, deviations) of a docstring; empty where it does not say."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(doc).split("\n\n")]
    sources = tuple(dict.fromkeys(" ".join(match.split()) for match in CITATION.findall(paragraphs[0])))
    last = paragraphs[-1]
    return sources, last.removeprefix("Deviations: ") if last.startswith("Deviations: ") else ""


def rows() -> list[Fidelity]:
    modules: dict[str, list[str]] = {}
    for entry in registry.entries().values():
        if entry.target.startswith("rl_training."):
            modules.setdefault(entry.target.partition(":")[0], []).append(entry.name)
    out = []
    for module, names in {**modules, DYNAMICS: ["Dynamics"]}.items():
        sources, deviations = described(importlib.import_module(module).__doc__ or "")
        out.append(Fidelity(tuple(names), sources, deviations, checks(module, tuple(names))))
    return out


def checks(module: str, names: tuple[str, ...]) -> dict[str, int]:
    """Tests that name one of the algorithms, or use something that their file imports from the module."""
    classes = {registry.entry(name).class_name for name in names if name in registry.entries()}
    found: dict[str, int] = {}
    for path, imports, tests in test_files():
        own = {name for name, source in imports.items() if source == module or (name in classes and "algo" in source)}
        count = sum(bool(strings & {*names} or used & own) for strings, used in tests)
        if count:
            found[path] = count
    return found


@cache
def test_files() -> list[tuple[str, dict[str, str], list[tuple[set[str], set[str]]]]]:
    """Of each test file: its name, imported name -> module, and of each test the strings and the names that it uses."""
    paths = sorted({path for pattern in CHECKS for path in TESTS.glob(pattern)})
    return [_read(path) for path in paths]


def _read(path: Path) -> tuple[str, dict[str, str], list[tuple[set[str], set[str]]]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = {
        alias.asname or alias.name: node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    # What a test uses includes what the constants and helpers of its file use.
    shared = dict(_definitions(tree))
    tests = []
    for name, node in shared.items():
        if name.startswith("test_"):
            strings, used = _uses(node)
            for other in used & shared.keys():
                more, names = _uses(shared[other])
                strings, used = strings | more, used | names
            tests.append((strings, used))
    return path.name, imports, tests


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id, node


def _uses(node: ast.AST) -> tuple[set[str], set[str]]:
    """Strings and names in a piece of code."""
    inside = list(ast.walk(node))
    strings = {part.value for part in inside if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return strings, {part.id for part in inside if isinstance(part, ast.Name)}
