"""Trees of tensors: nested dicts, tuples and NamedTuples. Deliberately minimal, so faster than a general pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_training.errors import MismatchError

T = TypeVar("T")


def tree_map(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Apply `fn` to every leaf (anything but a dict, tuple, list or None); `rest` are more trees of the same shape."""
    if isinstance(tree, dict):
        return type(tree)((k, tree_map(fn, v, *(r[k] for r in rest))) for k, v in tree.items())
    if isinstance(tree, tuple):
        items = [tree_map(fn, v, *(r[i] for r in rest)) for i, v in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, list):
        return [tree_map(fn, v, *(r[i] for r in rest)) for i, v in enumerate(tree)]  # type: ignore[return-value]
    if tree is None:
        return tree
    return fn(tree, *rest)  # type: ignore[no-any-return]


def tree_items(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, leaf) pairs. Paths are joined by dots and are the names in a checkpoint."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, dict):
        for k, v in tree.items():
            yield from tree_items(v, f"{prefix}.{k}" if prefix else str(k))
    elif isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", range(len(tree)))
        for k, v in zip(names, tree):
            yield from tree_items(v, f"{prefix}.{k}" if prefix else str(k))


def tree_leaves(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree_items(tree)]


def tree_stack(trees: list[T]) -> T:
    """One tree whose leaves have a new leading axis."""
    return tree_map(lambda *leaves: torch.stack(leaves), trees[0], *trees[1:])


def where_rows(mask: Tensor, new: T, old: T) -> T:
    """Rows of `new` where `mask` ([N], or [S, N]) is true, of `old` elsewhere; `old` has the mask's leading axes."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.view(*mask.shape, *[1] * (b.ndim - mask.ndim)), a, b)

    return tree_map(choose, new, old)


def copy_into(target: Any, source: Any) -> None:
    """Copy every leaf of `source` into the leaf of `target` at the same path; identical objects are skipped."""
    for (path, old), (other, new) in zip(tree_items(target), tree_items(source), strict=True):
        if path != other:
            raise ValueError(f"the trees differ: {path} in the target, {other} in the source")
        if old is not new:
            old.copy_(new)


def fill(tree: Any, tensors: dict[str, Tensor], prefix: str, envs: int | None = None) -> Any:
    """Copy the tensors saved under `prefix` into a tree and return the tree. With `envs`, a saved tensor may hold only
    the first rows of each environment, [S, N, rows, ...] (see `Storage.written`)."""
    for name, leaf in tree_items(tree, prefix):
        saved = tensors.get(name)
        if envs and saved is not None and saved.ndim == leaf.ndim + 1 and leaf.shape[1] % envs == 0:
            leaf = torch.unflatten(leaf, 1, (envs, -1))[:, :, : saved.shape[2]]
        if saved is None or saved.shape != leaf.shape:
            found = f"has shape {tuple(saved.shape)}" if saved is not None else "is missing"
            raise MismatchError(
                f"the checkpoint does not fit this configuration: {name} {found}, expected {tuple(leaf.shape)}"
            )
        if saved.dtype != leaf.dtype:
            raise MismatchError(
                f"the checkpoint does not fit this configuration: {name} has the type {saved.dtype}, not {leaf.dtype}"
            )
        leaf.copy_(saved)
    return tree
