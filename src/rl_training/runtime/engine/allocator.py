"""How the C library treats memory that was freed."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of the settings in glibc's malloc.h
_LARGEST = 32 << 20  # the largest block that glibc agrees to keep; larger ones always go back to the system
_KEPT = 512 << 20


def keep_freed_memory() -> bool:
    """Keep what is freed for the next allocation; True where the C library can.

    A call of a graph allocates its intermediate results and frees them again. By default glibc hands blocks of
    megabytes back to the system each time, and the next call pays a page fault for every 4 KiB it touches: with the
    ten critics of redq that was a fifth of an update.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False  # not glibc, or set by the user
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
