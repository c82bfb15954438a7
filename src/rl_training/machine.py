"""The resources of this machine that the process may use, and how it starts another Python."""

from __future__ import annotations

import os
import sys


def usable_cpus() -> int:
    """Number of CPUs that this process may use. taskset, cpusets and batch systems may allow fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory_in_use() -> int | None:
    """Bytes of memory that this process holds; None where the system does not say (Linux does)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line of a new Python that runs `module`. It imports from the same directories as this process:
    `python -m` would also put the working directory on the import path."""
    code = (
        "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); import runpy;"
        " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, os.pathsep.join(sys.path), module, *arguments]
