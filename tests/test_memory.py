"""Freed memory stays with the process, so that the intermediate results of a graph cause no page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")

PROBE = """
import resource
from rl_training.runtime.engine.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [bytearray(3 << 20) for _ in range(3)]  # zeroed, so every page is touched
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before, kept = faults(), keep_freed_memory()
faults()
print(before, kept, faults())
"""


def probe(env: Mapping[str, str]) -> list[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**own, **env}, capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout.split()


@glibc
def test_memory_that_was_freed_is_used_again() -> None:
    before, kept, after = probe({})
    assert kept == "True"
    assert int(before) > 10 * 768 > 100 > int(after)  # 768 pages to a block


@glibc
def test_settings_of_the_user_are_kept() -> None:
    assert probe({"MALLOC_TRIM_THRESHOLD_": "131072"})[1] == "False"
