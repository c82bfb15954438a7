"""What every test shares: one thread (results and timings that do not depend on the machine), one compile cache."""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections.abc import Generator
from typing import Any

import pytest

# Before torch is imported: compiled graphs are shared by all tests and their subprocesses, and by nobody else.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="rl-training-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE.name
if "RL_TRAINING_CACHE" not in os.environ:  # agents that are part of a recipe
    _AGENTS = tempfile.TemporaryDirectory(prefix="rl-training-agents-")
    os.environ["RL_TRAINING_CACHE"] = _AGENTS.name
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compile-all", action="store_true", help="compile every algorithm of the registry, not a few")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Modules and parameters make many objects, and all of them stay: looking for garbage takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# The longest first: the short ones at the end let all worker processes finish together.
LONG = ("cluster", "contract", "examples", "kill", "resume", "export", "probes", "torch_internals", "bench", "docs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: those that take longest, then the others with slow tests."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    ranks = {f"test_{name}": rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: (ranks.get(item.path.stem, len(ranks)), item.path not in slow))


def _seed(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what other packages draw from
    torch.manual_seed(seed)


# Numbers that a test draws without a seed of its own are the same in every run, whatever ran before in the process.


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _seed(1)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_algorithms_left():
    """Algorithms that a test registers are gone after it."""
    yield
    from rl_training import algorithm_class, registry

    while registry._REGISTERED:
        name, _ = registry._REGISTERED.popitem()
        del registry.entries()[name]  # also from the tables that test modules have kept
        algorithm_class.cache_clear()
