"""The one rule about what files name: a module is imported, and a cluster joined, only if the person named it.

Files name modules: `env_id: module:Env-v0` in a configuration, a preset, a checkpoint, a dataset's recipe, a sweep or
the ledger. Such a module is imported only if the person typed its name on the command line, passed it in Python, or
allowed it with `--allow-import NAME` or `allow_import("NAME")`. Everything that imports a module by a name that can
come from a file calls `import_named`, which enforces this; nothing else needs to know where a name came from. What
somebody else's code may import, such as an environment with its arguments, goes through `check_arguments`, and the
address of a cluster through `check_address`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from rl_training.errors import UserError, short_repr

_MODULE = r"\w[\w-]*(?:\.\w[\w-]*)*"
HERE = ("local", "auto")  # addresses of a cluster on this machine
_allowed: set[str] = set()
_addresses: set[str] = set()
_from_file: ContextVar[bool] = ContextVar("from_file", default=False)


def allow_import(name: str) -> None:
    """Allow files to name this module, and the modules inside it."""
    if not isinstance(name, str) or not re.fullmatch(_MODULE, name):
        raise UserError(f"{short_repr(name)} is not the name of a module, such as my_package or my_package.envs")
    _allowed.add(name)


def allow_imports_in(values: Any) -> None:
    """Allow the modules in all texts `module:name` of `values`, which the person typed or passed in Python, and the
    address of the cluster in them."""
    if _from_file.get():
        return
    for path, text in _texts(values, ""):
        if path.endswith("cluster.address"):
            _addresses.add(text)
        elif module := _module_in(text):
            _allowed.add(module)


def allow_address(address: str) -> None:
    """Allow to join the cluster at this address, which the person typed or passed in Python."""
    _addresses.add(address)


def allowed_imports() -> list[str]:
    """The modules that were allowed so far."""
    return sorted(_allowed)


def allowances() -> dict[str, list[str]]:
    """All that was allowed so far, for a process that continues this one's work: it calls `allow_again`."""
    return {"modules": sorted(_allowed), "addresses": sorted(_addresses)}


def allow_again(given: Mapping[str, list[str]]) -> None:
    _allowed.update(given["modules"])
    _addresses.update(given["addresses"])


def _module_in(text: str) -> str | None:
    """The module in `module:name`."""
    module, colon, name = text.partition(":")
    return module if colon and name and re.fullmatch(_MODULE, module) else None


def _texts(values: Any, path: str) -> Iterator[tuple[str, str]]:
    """All texts of nested values, with their keys."""
    values = values.model_dump() if hasattr(values, "model_dump") else values
    if isinstance(values, str):
        yield path, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts(value, f"{path}.{key}")
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value, path)


def is_allowed(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:n]) in _allowed for n in range(1, len(parts) + 1))


def import_named(module: str, named_by: str) -> ModuleType:
    """Import a module whose name may come from a file; `named_by` says where it was named, for the refusal."""
    _require(module, named_by)
    return importlib.import_module(module)


def check_arguments(values: Mapping[str, Any], key: str) -> None:
    """Refuse arguments with a text `module:name` of a module that exists and is not allowed: whoever gets them may
    import it, as gymnasium.make does. `key` is where they are in the configuration."""
    for path, text in _texts(values, key):
        module = _module_in(text)
        if module and not is_allowed(module) and not text.startswith("http://") and _exists(module):
            _require(module, path)


def check_address(address: str) -> None:
    """Refuse to join a cluster at an address that only a file names."""
    if address not in HERE and address not in _addresses:
        raise UserError(
            f"cluster.address names the Ray cluster at {address}, and one that only a file names is not joined:"
            f" type --cluster {address}, or --set cluster.address={address}, to join it (in Python: cluster='{address}'"
            " or cluster={'address': ...})"
        )


def _exists(module: str) -> bool:
    """Could this module be imported? Nothing is imported to find out, so only its first part is looked for."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ValueError, ImportError):  # it is loaded and does not say from where
        return True


def _require(module: str, named_by: str) -> None:
    if not is_allowed(module):
        raise UserError(
            f"{named_by} names the module '{module}', and a module that only a file names is not imported:"
            f" type --allow-import {module} to allow it (in Python: rl_training.allow_import('{module}'))"
        )


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
    """Inside the block, names may be allowed; at its end they are forgotten, so that commands do not affect each
    other."""
    before = allowances()
    try:
        yield
    finally:
        _allowed.clear()
        _addresses.clear()
        allow_again(before)
