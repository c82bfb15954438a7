"""The resources of this machine that the process may use."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """Number of CPUs that this process may use. taskset, cpusets and batch systems may allow fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
