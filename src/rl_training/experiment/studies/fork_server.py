"""A process that imports everything once and forks a worker for each job, so that no trial waits for `import torch`.

Jobs are JSON lines on standard input: `{"id", "target": "module:function", "arguments", "log", "threads", "allow"}`.
When a worker ends, the line `{"id", "code"}` is written to standard output. When the input ends, because the parent is
done or dead, the workers are told to save and end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from typing import Any

from rl_training.imports import allow_again
from rl_training.registry import resolve


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # without a handler nothing is written to the pipe
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    life_read, life_write = os.pipe()  # a worker reads the end of file when this process is gone
    workers: dict[int, str] = {}  # process id -> job
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(workers)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.close(life_write)
                _work(job, life_read)
            workers[pid] = job["id"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in workers:  # not waited for yet, so the process ids still belong to our workers
        os.kill(pid, signal.SIGTERM)
    for pid in workers:
        os.waitpid(pid, 0)


def _reap(workers: dict[int, str]) -> None:
    """Report the workers that have ended. Waiting for each process id leaves other children alone."""
    for pid in list(workers):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            report = {"id": workers.pop(pid), "code": os.waitstatus_to_exitcode(status)}
            with contextlib.suppress(BrokenPipeError):
                os.write(1, (json.dumps(report) + "\n").encode())


def _work(job: dict[str, Any], life: int) -> None:
    """Run a job in the forked worker process; never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((null, 0), (log, 1), (log, 2)):  # what an environment prints goes to the log
            os.dup2(source, target)
        threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
        if "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(job["threads"])
        allow_again(job["allow"])
        resolve(job["target"])(*job["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_with_parent(life: int) -> None:
    os.read(life, 1)  # nothing is ever written: it returns when the parent is gone
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
