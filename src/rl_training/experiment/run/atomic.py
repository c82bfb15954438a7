"""File writes that survive a kill or a power cut, and failpoints that let tests prove it.

A file gets its final name only when its bytes are on disk, so a reader sees either the old content or the new. Names
of unfinished files contain `.tmp-`, so that the next start can find and remove them.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import shutil
import signal
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rl_training.errors import UserError

FAILPOINT_VARIABLE = "RL_TRAINING_FAILPOINTS"
_ACTIONS = ("kill", "ENOSPC", "EIO", "EACCES")
_HASH_BLOCK = 1 << 20


class WriteError(UserError, OSError):
    """A file could not be written; its old content is untouched. `errno` is the number of the system's error."""


@functools.cache
def _plan() -> dict[str, tuple[str, int | None]]:
    """The failpoints in the environment variable, written `name=action[@k]`: name -> (action, k). Read only once."""
    plan: dict[str, tuple[str, int | None]] = {}
    for entry in filter(None, os.environ.get(FAILPOINT_VARIABLE, "").split(",")):
        name, _, rest = entry.strip().partition("=")
        action, at, count = rest.partition("@")
        if action not in _ACTIONS or (at and not count.isdecimal()):
            allowed = ", ".join(_ACTIONS)
            raise UserError(f"{FAILPOINT_VARIABLE}: '{entry}' is not name=ACTION or name=ACTION@k; actions: {allowed}.")
        plan[name] = (action, int(count) if at else None)
    return plan


_hits: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Fail here if the environment variable says so: every time, or only the k-th time (`name=EIO@2`)."""
    plan = _plan()
    if not plan or name not in plan:
        return
    action, at = plan[name]
    _hits[name] = _hits.get(name, 0) + 1
    if at is not None and _hits[name] != at:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, action)
    raise OSError(number, os.strerror(number))


def temporary_sibling(path: Path) -> Path:
    """An unused name in the same directory: a rename is atomic only within one file system."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")


def fsync_directory(directory: Path, point: str = "directory") -> None:
    """Make new names in `directory` durable, which the fsync of the files themselves does not do."""
    failpoint(f"{point}.before")
    if os.name != "nt":  # Windows cannot open a directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    failpoint(f"{point}.after")


def write_durable(path: Path, blocks: Iterable[bytes | memoryview], point: str = "file") -> tuple[str, int]:
    """Write a new file and fsync it. Returns SHA-256 and size of the given data, so that reading detects a bad disk."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for block in blocks:
            failpoint(f"{point}.write.before")
            file.write(block)
            digest.update(block)
            size += len(block)
        file.flush()
        failpoint(f"{point}.write.after")
        failpoint(f"{point}.fsync.before")
        os.fsync(file.fileno())
        failpoint(f"{point}.fsync.after")
    return digest.hexdigest(), size


def atomic_write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step."""
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the name of a file")
    if path.exists() and not path.is_file():  # as root, this would put a file in the place of /dev/null
        raise UserError(f"{path} is a device or pipe; give the name of a file")
    atomic_write_bytes(path, text.encode(errors="backslashreplace"))  # others' messages may not be valid Unicode


def atomic_write_bytes(path: Path, data: bytes) -> None:
    temporary = temporary_sibling(path)
    try:
        write_durable(temporary, [data])
        failpoint("file.rename.before")
        os.replace(temporary, path)
        failpoint("file.rename.after")
        fsync_directory(path.parent, "file.parentsync")
    except OSError as error:
        raise write_error(f"Cannot write {path}", error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def atomic_write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step. JSON has no NaN or infinity: they become null."""
    text = json.dumps(map_json(value, lambda x: None), indent=2, allow_nan=False, ensure_ascii=False)
    atomic_write_text(path, text + "\n")


def replace_directory(path: Path, source: Path) -> Path:
    """Make `path` a copy of `source`, in place of what it was: it is complete under its name, or not there at all."""
    copied, old = temporary_sibling(path), temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copied)
        if path.exists():
            os.rename(path, old)
        os.rename(copied, path)
        fsync_directory(path.parent)
    except OSError as error:
        raise write_error(f"Cannot write {path}", error) from error
    finally:
        for leftover in (copied, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return path


def map_json(value: Any, non_finite: Callable[[float], Any]) -> Any:
    """`value` (also paths, tuples, tensors and NumPy values) as JSON types; `non_finite` replaces NaN and infinity."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else non_finite(float(value))
    if isinstance(value, Mapping):
        return {str(key): map_json(item, non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_json(item, non_finite) for item in value]
    if callable(getattr(value, "tolist", None)):  # NumPy scalar or array, tensor
        return map_json(value.tolist(), non_finite)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def strict_json(data: bytes) -> Any:
    """Parse JSON from an untrusted file. Duplicate keys, NaN and every other error are a ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key appears twice")
        return result

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_regular(path: Path) -> IO[bytes]:
    """Open a plain file for reading. A symbolic link, device or pipe is an OSError, so nothing outside is read."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link")
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file")
    return os.fdopen(descriptor, "rb")


def sha256_of(file: IO[bytes]) -> str:
    """Digest of the rest of an open file, read block by block."""
    digest = hashlib.sha256()
    while block := file.read(_HASH_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def try_lock(directory: Path) -> int | None:
    """Lock a directory until the returned descriptor is closed or the process ends; None where locks do not work."""
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def exclusive_directory(directory: Path, what: str, wait: float = 0.0) -> Iterator[None]:
    """Lock a directory for this process, creating it if needed; a UserError if it is still locked after `wait` s."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{directory} is a file or inside one; choose another --output-dir") from None
    deadline = time.monotonic() + wait
    while True:
        try:
            lock = try_lock(directory)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"another process is working on {what} in {directory}, or another trainer in this process;"
                    " wait for it to finish, or stop it"
                ) from None
            time.sleep(0.05)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def os_reason(error: OSError) -> str:
    """Why a file operation failed, in words that a user can act on."""
    words = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EIO: "the disk reported an input/output error",
        errno.EACCES: "permission denied",
        errno.EROFS: "the file system is read-only",
    }
    return words.get(error.errno or 0, error.strerror or str(error))


def write_error(what: str, error: OSError) -> WriteError:
    """`error` as a sentence for the user."""
    result = WriteError(f"{what}: {os_reason(error)}.")
    result.errno = error.errno
    return result
