"""What a run changes in its process: signal handlers, float32 precision and the number of threads."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_training.algorithms.base import Algorithm

SMALL_NETWORK = 100_000  # parameters
GRACE = 1.0  # seconds that a call may take to return after the second signal
_STOP = (signal.SIGINT, signal.SIGTERM)


class RunInterrupted(BaseException):
    """A second signal ended a call that did not return. Not an Exception: environments catch those."""

    def __init__(self, number: int) -> None:
        super().__init__(f"a second {signal.Signals(number).name} ended a call that did not return")
        self.number = number


def _leave_signals_to_the_parent() -> None:
    """In a forked child: its signals must not be counted as signals of the run."""
    if StopSignals.active:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_signals_to_the_parent)


class StopSignals:
    """Obeys SIGINT and SIGTERM while a run is active; does nothing outside the main thread.

    The first signal calls `ask`, so that the run saves and ends. After the second, a call inside `interruptible` that
    does not return within GRACE seconds is ended by RunInterrupted. The third ends the process at once. A thread
    counts the signals, because the main thread may be stuck in code that is not Python.
    """

    active = 0  # in this process

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._inside = self._overdue = False
        self._own = 0  # signals that the thread sent to wake up the main thread

    def __enter__(self) -> StopSignals:
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            StopSignals.active += 1
            self._read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._handlers = {number: signal.signal(number, self._handle) for number in _STOP}
            self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            StopSignals.active -= 1
            signal.set_wakeup_fd(self._wakeup)
            for number, previous in self._handlers.items():
                signal.signal(number, previous)
            self._write.close()  # ends the thread

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Code of environments and callbacks, which may hang. Everything else, such as a save, is left to finish."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _handle(self, number: int, _frame: Any) -> None:
        if self._overdue and self._inside:
            self._overdue = False
            raise RunInterrupted(number)
        self._ask(number)

    def _watch(self) -> None:
        count, last, deadline = 0, signal.SIGINT, float("inf")
        with self._read:
            while True:
                left = deadline - time.monotonic()
                self._read.settimeout(None if left == float("inf") else max(left, 0.001))
                try:
                    numbers = self._read.recv(64)
                except TimeoutError:
                    deadline, self._overdue, self._own = float("inf"), True, self._own + 1
                    signal.pthread_kill(threading.main_thread().ident or 0, last)
                    continue
                if not numbers:
                    return
                for last in (number for number in _STOP for byte in numbers if byte == number):
                    if self._own:
                        self._own -= 1
                        continue
                    count += 1
                    if count == 2:
                        deadline = time.monotonic() + GRACE
                    elif count > 2:
                        os.write(2, b"ended at once by a third signal; the last checkpoint is complete\n")
                        os._exit(128 + last)


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
