"""The one rule about importing code by name: a module is imported only if the person named it.

Files name modules: `env_id: module:Env-v0` in a configuration, a preset, a checkpoint, a dataset's recipe, a sweep or
the ledger. Such a module is imported only if the person typed its name on the command line, passed it in Python, or
allowed it with `--allow-import NAME` or `allow_import("NAME")`. Everything that imports a module by a name that can
come from a file calls `import_named`, which enforces this; nothing else needs to know where a name came from.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from rl_training.errors import UserError, short_repr

_MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_allowed: set[str] = set()
_from_file: ContextVar[bool] = ContextVar("from_file", default=False)


def allow_import(name: str) -> None:
    """Allow files to name this module, and the modules inside it."""
    if not isinstance(name, str) or not re.fullmatch(_MODULE, name):
        raise UserError(f"{short_repr(name)} is not the name of a module, such as my_package or my_package.envs")
    _allowed.add(name)


def allow_imports_in(values: Any) -> None:
    """Allow the modules in all texts `module:name` of `values`, which the person typed or passed in Python."""
    if _from_file.get():
        return
    if isinstance(values, str):
        if match := re.fullmatch(rf"({_MODULE}):\S+", values):
            _allowed.add(match[1])
    elif isinstance(values, Mapping):
        allow_imports_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            allow_imports_in(value)


def allowed_imports() -> list[str]:
    """The modules that were allowed so far, for a process that continues this one's work."""
    return sorted(_allowed)


def is_allowed(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:n]) in _allowed for n in range(1, len(parts) + 1))


def import_named(module: str, named_by: str) -> ModuleType:
    """Import a module whose name may come from a file; `named_by` says where it was named, for the refusal."""
    if not is_allowed(module):
        raise UserError(
            f"{named_by} names the module '{module}', and a module that only a file names is not imported:"
            f" type --allow-import {module} to allow it (in Python: rl_training.allow_import('{module}'))"
        )
    return importlib.import_module(module)


@contextmanager
def values_from_file() -> Iterator[None]:
    """Inside, `allow_imports_in` does nothing: the values that are read come from a file."""
    token = _from_file.set(True)
    try:
        yield
    finally:
        _from_file.reset(token)


@contextmanager
def forget_afterwards() -> Iterator[None]:
    """Inside the block, imports may be allowed; at its end they are forgotten, so that commands do not affect each
    other."""
    before = set(_allowed)
    try:
        yield
    finally:
        _allowed.clear()
        _allowed.update(before)
