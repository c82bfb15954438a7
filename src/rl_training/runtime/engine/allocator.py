"""What the C library does with freed memory."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # settings in glibc's malloc.h
_LARGEST = 32 << 20  # bytes of the largest block that glibc can keep; it always returns larger ones to the system
_KEPT = 512 << 20


def keep_freed_memory() -> bool:
    """Keep freed memory for the next allocation. Returns whether the C library supports it.

    Every call of a graph allocates its intermediate results and frees them again. By default glibc returns blocks of
    megabytes to the system each time, and the next call pays a page fault for every 4 KiB that it touches. With the ten
    critics of redq that was a fifth of an update.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False  # not glibc, or set by the user
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
