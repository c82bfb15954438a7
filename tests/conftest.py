"""What every test shares: one thread (results and timings that do not depend on the machine), one compile cache."""

from __future__ import annotations

import os
import random
import tempfile

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: the short ones at the end let all worker processes finish together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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
