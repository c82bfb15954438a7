"""What a run changes in its process: signal handlers, float32 precision and the number of threads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_training.algorithms.base import Algorithm

SMALL_NETWORK = 100_000  # parameters


@contextmanager
def stop_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask` on SIGINT and SIGTERM, so that the run saves and ends. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _frame: Any) -> None:
        ask(number)

    old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


@contextmanager
def compute_settings(algorithm: Algorithm[Any]) -> Iterator[None]:
    """Float32 precision and the number of threads, as every run sets them: a resumed run must compute the same.

    Small networks on the CPU get one thread, because several threads mostly wait for each other. OMP_NUM_THREADS
    overrides this.
    """
    torch.set_float32_matmul_precision("high")
    parameters = sum(net.size for net in algorithm.nets.values())
    if algorithm.device.type != "cpu" or parameters > SMALL_NETWORK or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
