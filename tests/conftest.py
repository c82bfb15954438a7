"""What every test shares: one thread (results and timings that do not depend on the machine), one compile cache."""

from __future__ import annotations

import os
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


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
