"""Checkpoints under kill -9, failing disks, random corruption and hostile files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_training.errors import UserError
from rl_training.experiment.run import atomic
from rl_training.experiment.run import checkpoint as ck

OPERATIONS = (
    "checkpoint.mkdir",
    "tensors.write",
    "tensors.fsync",
    "manifest.write",
    "manifest.fsync",
    "checkpoint.dirsync",
    "checkpoint.rename",
    "checkpoint.parentsync",
)
POINTS = [f"{operation}.{side}" for operation in OPERATIONS for side in ("before", "after")]
TORN = ["tensors.write.before@2", "tensors.write.before@4", "tensors.fsync.after@2"]  # inside, and between, the files
POINTS_AND_HITS = [*(f"{point}@1" for point in POINTS), *TORN]


@pytest.fixture(autouse=True)
def _no_failpoints_left() -> Iterator[None]:
    yield
    arm("")


def arm(plan: str) -> None:
    os.environ[atomic.FAILPOINT_VARIABLE] = plan
    atomic._plan.cache_clear()
    atomic._hits.clear()


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "state": {"w": torch.arange(6.0) + step, "n": torch.tensor(step)},
        "replay": {"obs": torch.full((10, 4), step % 256, dtype=torch.uint8)},
    }


def save(run: Path, step: int) -> Path:
    meta = {"step": step, "config": {"algo": "ppo", "seeds": [0, 1]}}
    return ck.save_checkpoint(run / "checkpoints", ck.step_name(step), tensors=tensors(step), meta=meta)


def check_intact(path: Path, step: int) -> None:
    loaded = ck.load_checkpoint(path)
    assert loaded.meta["step"] == step
    for stem, named in tensors(step).items():
        for name, tensor in named.items():
            assert torch.equal(loaded.tensors[stem][name], tensor)


def in_child(action: Callable[[], object]) -> int:
    """Run `action` in a forked child (torch is loaded already: fast) and return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(7)
    return os.waitpid(pid, 0)[1]


# ----------------------------------------------------------------------------------------------------------- failpoints


def next_start(run: Path) -> None:
    """What every start does; then nothing of the failed save may be left, and saving works again."""
    ck.clean_leftovers(run)
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names in ({ck.step_name(1)}, {ck.step_name(1), ck.step_name(2)})
    check_intact(ck.latest_valid(run, warn=pytest.fail), 1 if len(names) == 1 else 2)
    check_intact(save(run, 2), 2)
    check_intact(run / "checkpoints" / ck.step_name(1), 1)


@pytest.mark.parametrize("point", POINTS_AND_HITS)
def test_kill_at_every_point(tmp_path: Path, point: str) -> None:
    save(tmp_path, 1)

    def die() -> None:
        arm(point.replace("@", "=kill@"))
        save(tmp_path, 2)

    status = in_child(die)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    check_intact(tmp_path / "checkpoints" / ck.step_name(1), 1)
    next_start(tmp_path)


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EACCES"])
@pytest.mark.parametrize("point", POINTS_AND_HITS)
def test_disk_error_at_every_point(tmp_path: Path, point: str, fault: str) -> None:
    save(tmp_path, 1)
    arm(point.replace("@", f"={fault}@"))
    with pytest.raises(OSError, match=r"^Cannot save checkpoint .*step_000000000002: ") as caught:
        save(tmp_path, 2)
    assert isinstance(caught.value, UserError)
    assert caught.value.errno == getattr(errno, fault)
    assert str(caught.value).endswith({"ENOSPC": "full.", "EIO": "error.", "EACCES": "denied."}[fault])
    assert "\n" not in str(caught.value)
    assert not any(".tmp-" in path.name for path in (tmp_path / "checkpoints").iterdir())  # cleaned at once
    arm("")
    next_start(tmp_path)


@pytest.mark.slow
def test_repeated_kills_lose_nothing(tmp_path: Path) -> None:
    """A writer killed again and again at random points, also while it prunes: always resumable, never emptied."""
    rng = random.Random(0)
    save(tmp_path, 1)
    newest = 1
    for step in range(2, 42):
        point = rng.choice([*POINTS, "prune.rename.before", "prune.rename.after"])

        def work(step: int = step, point: str = point) -> None:
            arm(f"{point}=kill")
            save(tmp_path, step)
            ck.prune(tmp_path, 2)

        in_child(work)
        ck.clean_leftovers(tmp_path)
        latest = ck.checkpoint_step(ck.latest_valid(tmp_path, warn=pytest.fail))
        assert latest in (newest, step)
        newest = latest
        assert all(ck.verify(path) is None for path in ck.list_checkpoints(tmp_path))
    assert newest > 20
    ck.prune(tmp_path, 2)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("fault", ["kill", "ENOSPC"])
@pytest.mark.parametrize("operation", ["file.write", "file.fsync", "file.rename", "file.parentsync"])
def test_small_files_have_the_old_or_the_new_content(tmp_path: Path, operation: str, fault: str) -> None:
    for side in ("before", "after"):
        path = tmp_path / side
        atomic.atomic_write_json(path, {"v": 1})

        def work(path: Path = path, side: str = side) -> None:
            arm(f"{operation}.{side}={fault}")
            atomic.atomic_write_json(path, {"v": 2})

        if fault == "kill":
            in_child(work)
            ck.clean_leftovers(tmp_path)
        else:
            with pytest.raises(OSError, match=r"^Cannot write .*: the disk is full\.$"):
                work()
            arm("")
        assert json.loads(path.read_text()) in ({"v": 1}, {"v": 2})
        assert not [entry for entry in tmp_path.iterdir() if ".tmp-" in entry.name]


def test_bad_failpoint_plan_is_reported() -> None:
    for plan in ("x=explode", "x", "x=kill@soon"):
        arm(plan)
        with pytest.raises(UserError, match="is not name=ACTION"):
            atomic.failpoint("x")


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OSError, match="Cannot save checkpoint"):
        save(tmp_path, 1)


# ----------------------------------------------------------------------------------------------------------- corruption


def corrupt(rng: random.Random, path: Path, other: Path) -> str:
    """Damage a checkpoint in one random way."""
    files = sorted(path.iterdir())
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    kind = rng.choice(
        ["flip", "flip", "flip", "byte", "truncate", "append", "insert", "missing", "swap", "foreign", "extra"]
    )
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        position = rng.randrange(len(data))
        data[position] = (data[position] + rng.randrange(1, 256)) % 256
    elif kind == "truncate":
        del data[rng.randrange(len(data)) :]
    elif kind == "append":
        data += rng.choice([b"\n", b" ", b"\0", b"{}"])
    elif kind == "insert":
        data.insert(rng.randrange(len(data)), rng.choice(b" \n0,"))
    if kind in ("flip", "byte", "truncate", "append", "insert"):
        file.write_bytes(data)
    elif kind == "missing":
        file.unlink()
    elif kind == "swap":
        first, second = rng.sample(files, 2)
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(b)
        second.write_bytes(a)
    elif kind == "foreign":
        shutil.copy(other / file.name, file)
    else:
        (path / rng.choice(["extra.safetensors", ".hidden", "manifest.json.bak", "x"])).write_bytes(b"extra")
    return f"{kind} {file.name}"


@pytest.mark.slow
def test_every_random_corruption_is_detected(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    pristine = {file.name: file.read_bytes() for file in newer.iterdir()}
    rng = random.Random(20)
    for trial in range(1200):
        what = corrupt(rng, newer, older)
        warned: list[str] = []
        assert ck.latest_valid(tmp_path, warn=warned.append) == older, f"trial {trial}: {what} went unseen"
        assert len(warned) == 1
        with pytest.raises(ck.CheckpointError):
            ck.load_checkpoint(newer)
        for file in newer.iterdir():
            if file.name not in pristine:
                file.unlink()
        for name, data in pristine.items():
            (newer / name).write_bytes(data)
    check_intact(ck.latest_valid(tmp_path, warn=pytest.fail), 2)


def test_every_single_bit_of_the_manifest_matters(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / ck.MANIFEST
    data = path.read_bytes()
    rng = random.Random(1)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert ck.verify(path.parent) is not None, position


# -------------------------------------------------------------------------------------------------------------- hostile


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def forge(path: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Rewrite the manifest with right digests for whatever the files now are: an attacker can do that too."""
    manifest = json.loads((path / ck.MANIFEST).read_text())
    del manifest["checksum"]
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        entry.update(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    change(manifest)
    (path / ck.MANIFEST).write_bytes(ck._manifest_bytes(manifest))


def header(text: str, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


ONE = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
HOSTILE_FILES = {
    "pickle": pickle.dumps(Bomb()),
    "empty": b"",
    "header of a terabyte": header("{}", length=1 << 40),
    "header beyond the end": header("{}", length=1 << 8),
    "negative header": header("{}", length=(1 << 64) - 1),
    "duplicate names": header(f"{{{ONE},{ONE.replace('[2]', '[1]').replace('8', '4')}}}"),
    "shape overflow": header(f'{{{ONE.replace("[2]", "[9223372036854775807,8]")},"b":{{}}}}'),
    "shape beyond the data": header(f'{{{ONE.replace("[2]", "[1099511627776]")},"__metadata__":{{}}}}'),
    "not a dict": header("[1, 2]"),
    "not JSON": header("{'a': 1}"),
    "deep nesting": header("[" * 100_000),
    "hole": header(f'{{{ONE},"b":{{"dtype":"U8","shape":[1],"data_offsets":[900,901]}}}}'),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_tensor_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1)
    (path / "state.safetensors").write_bytes(HOSTILE_FILES[name])
    forge(path)
    tracemalloc.start()
    with pytest.raises(ck.CheckpointError) as caught:
        ck.load_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_pickle_as_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1)
    (path / ck.MANIFEST).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ck.CheckpointError, match="damaged or foreign"):
        ck.load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "1",
        "null",
        "",
        "{",
        '{"format": 1}',
        "[" * 200_000,
        "NaN",
        '{"format":"rl_training.checkpoint","schema":1}',
        '{"a":1,"a":2}',
        "1" * 5000,
        "\x00",
        '{"format":"rl_training.checkpoint","schema":"1"}',
    ],
)
def test_foreign_manifest(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1)
    (path / ck.MANIFEST).write_text(text)
    with pytest.raises(ck.CheckpointError):
        ck.load_checkpoint(path)


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop("state.safetensors")

    return change


def setting(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update({key: value})


FORGERIES = {
    "parent directory": renamed("../secret.safetensors"),
    "absolute": renamed("/tmp/secret.safetensors"),
    "nested": renamed("a/b.safetensors"),
    "other kind": renamed("state.pkl"),
    "manifest itself": renamed("manifest.json"),
    "files as list": setting("files", []),
    "entry as text": setting("files", {"state.safetensors": "x"}),
    "size as text": setting("files", {"state.safetensors": {"sha256": "0", "bytes": "1", "tensors": 1}}),
    "meta as list": setting("meta", []),
    "future schema": setting("schema", 2),
    "bad float": setting("meta", {"x": {"$float": []}}),
    "tensor count": lambda manifest: manifest["files"]["state.safetensors"].update(tensors=3),
    "wrong name": setting("name", "step_000000000099"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_manifest(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    shutil.copy(path / "state.safetensors", path.parent / "secret.safetensors")
    forge(path, FORGERIES[name])
    with pytest.raises(ck.CheckpointError) as caught:
        ck.load_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for name in ("state.safetensors", ck.MANIFEST):
        secret = tmp_path / "secret"
        (path / name).rename(secret)
        (path / name).symlink_to(secret)
        with pytest.raises(ck.CheckpointError, match="symbolic link"):
            ck.load_checkpoint(path)
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(ck.CheckpointError, match="not a plain file"):
            ck.load_checkpoint(path)
        (path / name).unlink()
        secret.rename(path / name)
    check_intact(path, 1)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ck.CheckpointError, match="symbolic link"):
        ck.load_checkpoint(tmp_path / "link")
    check_intact(ck.resolve(tmp_path / "link"), 1)  # named by the user: followed first
