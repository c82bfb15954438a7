"""Checkpoints: directories of safetensors and JSON files that are complete under their final name, or absent.

Save: `<name>.tmp-<uuid>/` -> fsync every file -> manifest.json last -> fsync directory -> one rename -> fsync parent.
The manifest contains the size and SHA-256 of every file and its own checksum, so loading detects any changed byte. The
latest checkpoint is found by looking for valid ones; no pointer can become stale. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from rl_training.envs.vector import EnvError
from rl_training.errors import MismatchError, NonFiniteError, UserError, short_repr
from rl_training.experiment.run import tensor_file
from rl_training.experiment.run.atomic import (
    failpoint,
    fsync_directory,
    map_json,
    open_regular,
    os_reason,
    sha256_of,
    strict_json,
    temporary_sibling,
    try_lock,
    write_durable,
    write_error,
)
from rl_training.experiment.run.run_dir import library_versions
from rl_training.experiment.run.tensor_file import NamedTensors
from rl_training.version import __version__

FORMAT, SCHEMA, MANIFEST = "rl_training.checkpoint", 1, "manifest.json"
_NAME = re.compile(r"(step|best)_([0-9]{12,18})")
_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LEFTOVER = re.compile(r".+\.tmp-[0-9a-f]{32}")
_MAX_MANIFEST = 32 << 20  # far more than needed; limits the memory that a malicious file can use

Warn = Callable[[str], object]
Kind = Literal["step", "best"]


class CheckpointError(UserError):
    """A checkpoint cannot be used: it is missing, damaged, malicious, or not one of this library."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    meta: dict[str, Any]
    manifest: dict[str, Any]
    tensors: dict[str, NamedTensors]  # file stem -> name -> tensor


def step_name(step: int) -> str:
    """Name of a full checkpoint, from which a run resumes."""
    return f"step_{step:012d}"


def best_name(step: int) -> str:
    """Name of a policy-only checkpoint of the best evaluation so far."""
    return f"best_{step:012d}"


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not a checkpoint name")
    return int(match[2])


@contextmanager
def checkpoint_errors(path: Path, versions: dict[str, str] | None = None) -> Iterator[None]:
    """Missing or ill-typed content is a CheckpointError. Errors name the version that wrote the checkpoint if it is
    another version, or if the settings or tensors do not fit."""
    try:
        yield
    except UserError as error:
        written = versions.get("rl_training", __version__) if isinstance(versions, dict) else __version__
        if written != __version__:
            raise UserError(f"{error}. {path} was written by rl_training {written}; this is {__version__}") from None
        if versions and isinstance(error, MismatchError):
            raise UserError(f"{error}. {path} was written by rl_training {written}, perhaps an earlier build") from None
        raise
    except (EnvError, NonFiniteError):
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, AssertionError, RuntimeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{path} is not a checkpoint of a training run, or was written by another version: {what}"
        ) from error


# ---------------------------------------------------------------------------------------------------------------- save


def save_checkpoint(directory: Path, name: str, *, tensors: dict[str, NamedTensors], meta: dict[str, Any]) -> Path:
    """Write `<directory>/<name>` and return its path. A valid checkpoint of that name is never overwritten.

    `tensors`: file stem -> named tensors, one `<stem>.safetensors` each. `meta`: JSON values, also NaN and infinity.
    """
    target = directory / name
    step = checkpoint_step(target)
    for stem in tensors:
        if not _STEM.fullmatch(stem):
            raise ValueError(f"'{stem}' is not a valid file stem")
    headers = {stem: tensor_file.header(named) for stem, named in tensors.items()}
    meta = map_json(meta, lambda x: {"$float": str(x)})
    try:
        if not os.path.isdir(directory):
            directory.mkdir(parents=True, exist_ok=True)
            fsync_directory(directory.parent)
        if os.path.lexists(target):
            if verify(target) is None:
                return target
            os.rename(target, directory / f"{name}.damaged-{uuid.uuid4().hex}")
        older = [path.name for path in list_checkpoints(directory, "step") if checkpoint_step(path) < step]
        manifest = {
            "format": FORMAT,
            "schema": SCHEMA,
            "name": name,
            "parent": older[-1] if older else None,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": library_versions(),
            "meta": meta,
        }
        _write_directory(target, tensors, headers, manifest)
    except OSError as error:
        raise write_error(f"Cannot save checkpoint {target}", error) from error
    return target


def _write_directory(
    target: Path, tensors: dict[str, NamedTensors], headers: dict[str, bytes], manifest: dict[str, Any]
) -> None:
    temporary = temporary_sibling(target)
    lock = None
    try:
        failpoint("checkpoint.mkdir.before")
        temporary.mkdir()
        lock = try_lock(temporary)  # tells `clean_leftovers` that the writer is alive
        failpoint("checkpoint.mkdir.after")
        files = {}
        for stem, named in tensors.items():
            blocks = tensor_file.blocks(headers[stem], named)
            digest, size = write_durable(temporary / f"{stem}.safetensors", blocks, "tensors")
            files[f"{stem}.safetensors"] = {"sha256": digest, "bytes": size, "tensors": len(named)}
        data = _manifest_bytes({**manifest, "files": files})
        if len(data) > _MAX_MANIFEST:
            raise ValueError(f"meta is {len(data)} bytes of JSON; large arrays belong in tensors")
        write_durable(temporary / MANIFEST, [data], "manifest")
        fsync_directory(temporary, "checkpoint.dirsync")
        failpoint("checkpoint.rename.before")
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir() or verify(target) is not None:
                raise
            return  # another writer finished the same step first
        failpoint("checkpoint.rename.after")
        fsync_directory(target.parent, "checkpoint.parentsync")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # does nothing after the rename
        if lock is not None:
            os.close(lock)


def _manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """The manifest with its checksum, always in the same format: verifying compares bytes, which finds any change."""

    def dump(value: dict[str, Any]) -> bytes:
        lines = (
            f"{json.dumps(key)}: {json.dumps(value[key], sort_keys=True, allow_nan=False)}" for key in sorted(value)
        )
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    return dump({**manifest, "checksum": hashlib.sha256(dump(manifest)).hexdigest()})


# -------------------------------------------------------------------------------------------------------- verify, load


def verify(path: Path) -> str | None:
    """None if every byte of the checkpoint is as it was written, otherwise a sentence that says what is wrong."""
    try:
        _check_files(path, _read_manifest(path))
    except CheckpointError as error:
        return str(error)
    return None


def load_checkpoint(path: str | Path, *, stems: Collection[str] | None = None) -> Checkpoint:
    """Verify a checkpoint and read it. `stems` limits this to some files: a policy does not need the replay buffer."""
    path = Path(path)
    manifest = _read_manifest(path)
    present = [name.removesuffix(".safetensors") for name in manifest["files"]]
    chosen = present if stems is None else list(stems)
    for stem in chosen:
        if stem not in present:
            raise CheckpointError(f"Checkpoint {path} has no '{stem}' part; it has: {', '.join(present)}.")
    _check_files(path, manifest, {f"{stem}.safetensors" for stem in chosen})
    try:
        tensors = {stem: tensor_file.read(path / f"{stem}.safetensors") for stem in chosen}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"Checkpoint {path} is refused: {str(error)[:300]}.") from error
    try:
        meta = _restore_floats(manifest["meta"])
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"Checkpoint {path} is refused: its metadata is malformed.") from error
    return Checkpoint(path, meta, manifest, tensors)


def _read_manifest(path: Path) -> dict[str, Any]:
    if os.path.islink(path):  # os.path never raises here, unlike the methods of Path
        raise CheckpointError(f"Checkpoint {path} is a symbolic link, which is refused.")
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is not a checkpoint: there is no such directory.")
    if not os.path.lexists(path / MANIFEST):
        raise CheckpointError(f"{path} is not a checkpoint of rl_training, or is incomplete: it has no {MANIFEST}.")
    try:
        with open_regular(path / MANIFEST) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_MANIFEST:
                raise ValueError("it is too large")
            data = file.read(size)
        manifest = strict_json(data)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError("it was not written by rl_training")
        if manifest.get("schema") != SCHEMA:
            found = short_repr(manifest.get("schema"))
            raise CheckpointError(f"Checkpoint {path} has format version {found}; this version reads {SCHEMA}.")
        body = {key: value for key, value in manifest.items() if key != "checksum"}
        if data != _manifest_bytes(body):
            raise ValueError("its checksum is wrong")
        if not isinstance(manifest.get("meta"), dict) or not isinstance(manifest.get("files"), dict):
            raise ValueError("'meta' or 'files' is missing")
        for name, entry in manifest["files"].items():
            _check_entry(name, entry)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"Cannot read {path / MANIFEST}: {os_reason(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"Checkpoint {path} is damaged or foreign: {MANIFEST}: {error}.") from error
    name = path.absolute().name
    if _NAME.fullmatch(name) and manifest.get("name") != name:  # a copy with another kind of name is fine
        raise CheckpointError(
            f"Checkpoint {path} has the wrong name: it was saved as {short_repr(manifest.get('name'))}."
        )
    return manifest


def _check_entry(name: str, entry: Any) -> None:
    if not name.endswith(".safetensors") or not _STEM.fullmatch(name.removesuffix(".safetensors")):
        raise ValueError(f"the file name {name!r} is refused")
    types = {"sha256": str, "bytes": int, "tensors": int}
    if not isinstance(entry, dict) or any(type(entry.get(key)) is not kind for key, kind in types.items()):
        raise ValueError(f"the entry of {name} is incomplete")


def _check_files(path: Path, manifest: dict[str, Any], hashed: Collection[str] | None = None) -> None:
    """Check that the listed files, and no others, are there; also digest and header of those in `hashed` (or all)."""
    files = manifest["files"]
    try:
        found = set(os.listdir(path))
        for wrong, word in ((set(files) - found, "is missing"), (found - set(files) - {MANIFEST}, "does not belong")):
            if wrong:
                raise CheckpointError(f"Checkpoint {path} is damaged: {min(wrong)!r} {word}.")
        for name, entry in files.items():
            with open_regular(path / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry["bytes"]:
                    raise CheckpointError(
                        f"Checkpoint {path} is damaged: {name} has {size} bytes instead of {entry['bytes']}."
                    )
                if hashed is not None and name not in hashed:
                    continue
                if sha256_of(file) != entry["sha256"]:
                    raise CheckpointError(f"Checkpoint {path} is damaged: the SHA-256 of {name} is wrong.")
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, tensor_file.MAX_HEADER):
                    raise ValueError(f"{name} has an impossible header of {length} bytes")
                header = strict_json(file.read(length))
                if not isinstance(header, dict) or len(header) != entry["tensors"]:
                    raise ValueError(f"{name} does not contain {entry['tensors']} tensors")
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} cannot be read: {os_reason(error)}.") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"Checkpoint {path} is refused: {error}.") from error


def _restore_floats(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: _restore_floats(item) for key, item in value.items()}
    return [_restore_floats(item) for item in value] if isinstance(value, list) else value


# -------------------------------------------------------------------------------------------------- find, prune, clean


def _checkpoints_dir(directory: Path) -> Path:
    inner = directory / "checkpoints"
    return inner if os.path.isdir(inner) else directory


def list_checkpoints(directory: Path, kind: Kind | None = None, *, links: bool = False) -> list[Path]:
    """The checkpoints in a run directory or its `checkpoints/`, found by name, sorted by step; some may be damaged.
    With `links`, also links and files with such a name."""
    directory = _checkpoints_dir(directory)
    if not os.path.isdir(directory):
        return []
    try:
        named = [(_NAME.fullmatch(entry.name), entry) for entry in directory.iterdir()]
    except OSError as error:
        raise CheckpointError(f"Cannot look for checkpoints in {directory}: {os_reason(error)}.") from error
    found = [(int(match[2]), entry) for match, entry in named if match and kind in (None, match[1])]
    return [entry for _, entry in sorted(found) if links or (entry.is_dir() and not entry.is_symlink())]


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def latest_valid(run_dir: Path, warn: Warn = _warn, kind: Kind = "step") -> Path:
    """The newest valid checkpoint; `warn` is called for every newer one that is not valid."""
    skipped = 0
    for path in reversed(list_checkpoints(run_dir, kind, links=True)):
        reason = verify(path)
        if reason is None:
            return path
        skipped += 1
        warn(f"{reason} Trying the previous one.")
    which = "best" if kind == "best" else "complete"
    raise CheckpointError(
        f"{run_dir} has no valid {which} checkpoint" + (f": all {skipped} are damaged." if skipped else ".")
    )


def resolve(path: str | Path, warn: Warn = _warn) -> Path:
    """The checkpoint that a path stands for: its directory, a run directory (latest valid one) or `<run>/best`."""
    path = Path(path)
    if path.name == "best" and not os.path.exists(path):
        if not os.path.isdir(path.parent):
            raise CheckpointError(f"{path.parent} does not exist, so there is no run with a best checkpoint.")
        return latest_valid(path.parent.resolve(), warn, "best")
    if not os.path.exists(path):
        raise CheckpointError(f"{path} does not exist: give a checkpoint directory, a run directory or <run>/best.")
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is a file: give a checkpoint directory, a run directory or <run>/best.")
    path = path.resolve()  # links in the user's path are followed; links inside a checkpoint are not
    if os.path.lexists(path / MANIFEST) or _NAME.fullmatch(path.name):
        return path
    if path.name == "checkpoints" or (path / "checkpoints").is_dir() or list_checkpoints(path):
        return latest_valid(path, warn)
    raise CheckpointError(f"{path} is neither a checkpoint nor a run directory of rl_training.")


def prune(directory: Path, keep_last: int) -> list[Path]:
    """Remove all but the last `keep_last` full checkpoints and the newest best one; returns the removed paths.

    Nothing is removed unless the newest one is valid, and incomplete checkpoints do not count as kept.
    """
    if keep_last < 1:
        raise ValueError("keep_last must be at least 1")
    removed: list[Path] = []
    kinds: tuple[tuple[Kind, int], ...] = (("step", keep_last), ("best", 1))
    for kind, keep in kinds:
        paths = list_checkpoints(directory, kind)
        if len(paths) <= keep or verify(paths[-1]) is not None:
            continue
        complete = [path for path in paths if _looks_complete(path)]
        if len(complete) > keep:
            removed += paths[: paths.index(complete[-keep])]
    for path in removed:
        doomed = temporary_sibling(path)  # a partly removed checkpoint must not keep its name
        try:
            failpoint("prune.rename.before")
            os.rename(path, doomed)
            failpoint("prune.rename.after")
        except OSError as error:
            raise write_error(f"Cannot remove the old checkpoint {path}", error) from error
        shutil.rmtree(doomed, ignore_errors=True)
    return removed


def _looks_complete(path: Path) -> bool:
    try:
        _check_files(path, _read_manifest(path), hashed=())
    except CheckpointError:
        return False
    return True


def set_aside_checkpoints_after(directory: Path, step: int) -> list[Path]:
    """Rename the checkpoints saved after `step`, for a run that goes back to that step; returns the new paths.

    The run may take another course this time (another budget changes the schedules), so a later checkpoint of the
    first course must not be used as one of the second, nor occupy its name.
    """
    if not any(checkpoint_step(path) > step and verify(path) is None for path in list_checkpoints(directory, "step")):
        return []
    later = [path for path in list_checkpoints(directory) if checkpoint_step(path) > step]
    places = [path.with_name(f"{path.name}.replaced-{uuid.uuid4().hex}") for path in later]
    try:
        for path, place in zip(later, places):
            os.rename(path, place)
    except OSError as error:
        raise write_error(f"Cannot set the later checkpoint {path} aside", error) from error
    names = ", ".join(place.name for place in places)
    _warn(f"the run continues from step {step:,}; its later checkpoints were renamed to {names}")
    return places


def clean_leftovers(directory: Path) -> list[Path]:
    """Remove the temporary files that killed processes left in a run or checkpoints directory."""
    removed = []
    for place in {directory, _checkpoints_dir(directory)}:
        for path in [entry for entry in place.iterdir() if _LEFTOVER.fullmatch(entry.name)] if place.is_dir() else []:
            if path.is_symlink() or not path.is_dir():
                with suppress(OSError):
                    path.unlink()
            else:
                try:
                    lock = try_lock(path)
                except OSError:  # its writer is alive, or it has just been removed
                    continue
                shutil.rmtree(path, ignore_errors=True)
                if lock is not None:
                    os.close(lock)
            removed.append(path)
    return removed
