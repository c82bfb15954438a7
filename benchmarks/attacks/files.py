"""Corrupted checkpoints: damage is detected and the older one is used; what was sealed again is refused or harmless."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attacks.base import Attack, Outcome, small
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.checkpoint import (
    _manifest_bytes,
    latest_valid,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify,
)
from rl_training.experiment.run.trainer import Trainer

WORDS: list[Any] = [
    None, True, -1, 0, 2**70, 1e400, float("nan"), "", "x", "../x", "\x1b[31m", [], [[]], ["a"], [1, "b"], {},
    {"a": {}},    {"$float": "nan"}, {"$float": "x"}, "evil:Env-v0", {"preset": "/etc/passwd"}, "9" * 5000, [0] * 1000,
]  # fmt: skip


class Source:
    """The run that is corrupted: its files, and the parameters that a load must give."""

    run: Path
    older: str
    newest: str
    params: dict[str, torch.Tensor]


def prepare_run(scratch: Path) -> None:
    result = Trainer(small("dqn", scratch / "source", checkpoint_interval=32), progress=False).run()
    Source.run = result.run_dir
    Source.older, Source.newest = (path.name for path in list_checkpoints(result.run_dir, "step")[-2:])
    Source.params = dict(Agent.load(result.run_dir, device="cpu").train.params)


# --- corruptions of files; each gets the checkpoint's directory -------------------------------------------------------


def some_file(chance: random.Random, folder: Path) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def edit(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    before = bytes(data)
    change(data)
    if bytes(data) == before:
        data += b"x"
    path.write_bytes(data)


def _bit(chance: random.Random, folder: Path) -> None:
    edit(
        some_file(chance, folder),
        lambda d: d.__setitem__(k := chance.randrange(len(d)), d[k] ^ 1 << chance.randrange(8)),
    )


def _byte(chance: random.Random, folder: Path) -> None:
    edit(some_file(chance, folder), lambda d: d.__setitem__(chance.randrange(len(d)), chance.randrange(256)))


def _block(chance: random.Random, folder: Path, fill: bytes) -> None:
    def change(data: bytearray) -> None:
        start = chance.randrange(len(data))
        count = min(len(data) - start, chance.choice([1, 16, 512, 4096]))
        data[start : start + count] = fill * count

    edit(some_file(chance, folder), change)


def _shift(chance: random.Random, folder: Path) -> None:
    edit(some_file(chance, folder), lambda d: d.insert(chance.randrange(len(d)), chance.randrange(256)))


def _cut_out(chance: random.Random, folder: Path) -> None:
    edit(some_file(chance, folder), lambda d: d.pop(chance.randrange(len(d))))


def _truncate(chance: random.Random, folder: Path) -> None:
    path = some_file(chance, folder)
    os.truncate(path, chance.randrange(path.stat().st_size))


def _swap(chance: random.Random, folder: Path) -> None:
    a, b = chance.sample(sorted(folder.iterdir()), 2)
    data = a.read_bytes(), b.read_bytes()
    a.write_bytes(data[1])
    b.write_bytes(data[0])


def _from_older(chance: random.Random, folder: Path) -> None:
    path = some_file(chance, folder)
    other = Source.run / "checkpoints" / Source.older / path.name
    path.write_bytes(other.read_bytes() if other.read_bytes() != path.read_bytes() else b"")


def _remove(chance: random.Random, folder: Path) -> None:
    some_file(chance, folder).unlink()


def _empty(chance: random.Random, folder: Path) -> None:
    some_file(chance, folder).write_bytes(b"")


def _add(chance: random.Random, folder: Path) -> None:
    (folder / chance.choice(["x", ".hidden", "state2.safetensors", "evil.pkl", "manifest.json.bak"])).write_bytes(b"x")


def _link(chance: random.Random, folder: Path) -> None:
    path = some_file(chance, folder)
    other = folder.parent.parent / "outside"
    shutil.copy(path, other)
    path.unlink()
    path.symlink_to(other)


def _pipe(chance: random.Random, folder: Path) -> None:
    path = some_file(chance, folder)
    path.unlink()
    os.mkfifo(path)


def _directory(chance: random.Random, folder: Path) -> None:
    path = some_file(chance, folder)
    path.unlink()
    path.mkdir()


def _rename(chance: random.Random, folder: Path) -> None:
    path = some_file(chance, folder)
    path.rename(folder / chance.choice(["state.pt", "x.safetensors", path.name.upper()]))


def _linked_checkpoint(chance: random.Random, folder: Path) -> None:
    target = folder.parent.parent / "moved"
    folder.rename(target)
    folder.symlink_to(target)


def _other_step(chance: random.Random, folder: Path) -> None:
    folder.rename(folder.with_name("step_000000999999"))


def _manifest_text(chance: random.Random, folder: Path) -> None:
    texts = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[" * 50_000,
        b'{"a": NaN}',
        b"\xff\xfe",
        b"9" * 10_000,
        b"{" * 9_999,
        b"\0" * 99,
    ]
    (folder / "manifest.json").write_bytes(chance.choice(texts))


def _manifest_value(chance: random.Random, folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_bytes())
    replace_somewhere(chance, data)
    (folder / "manifest.json").write_text(json.dumps(data))


DAMAGE: dict[str, Callable[[random.Random, Path], None]] = {
    "bit": _bit, "byte": _byte, "zeros": lambda c, f: _block(c, f, b"\0"), "ones": lambda c, f: _block(c, f, b"\xff"),
    "inserted byte": _shift, "removed byte": _cut_out, "truncated": _truncate, "swapped files": _swap,
    "file of another checkpoint": _from_older, "missing file": _remove, "empty file": _empty, "added file": _add,
    "linked file": _link, "pipe": _pipe, "directory": _directory, "renamed file": _rename,
    "linked checkpoint": _linked_checkpoint, "another step's name": _other_step, "manifest text": _manifest_text,
    "manifest value": _manifest_value,
}  # fmt: skip


# --- sealed corruptions: somebody who knows the format wrote a consistent manifest ------------------------------------


def replace_somewhere(chance: random.Random, data: Any) -> None:
    """Replace or remove one value of nested JSON."""
    place = data
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chance.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
            place = inner
            continue
        if chance.random() < 0.2:
            del place[key]
        else:
            place[key] = chance.choice(WORDS)
        return


def _sealed_manifest(chance: random.Random, folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_bytes())
    data.pop("checksum")
    replace_somewhere(chance, data if chance.random() < 0.3 else data["meta"])
    try:
        (folder / "manifest.json").write_bytes(_manifest_bytes(data))
    except ValueError:  # NaN has no place in a manifest
        (folder / "manifest.json").write_text(json.dumps(data))


def resave(folder: Path, change: Callable[[dict[str, Any], Any], None]) -> None:
    found = load_checkpoint(folder)
    meta, tensors = json.loads(json.dumps(found.meta)), {k: dict(v) for k, v in found.tensors.items()}
    change(tensors, meta)
    shutil.rmtree(folder)
    save_checkpoint(folder.parent, folder.name, tensors=tensors, meta=meta)


def tensor_change(how: Callable[[random.Random, dict[str, Any], str], None]) -> Callable[[random.Random, Path], None]:
    def corrupt(chance: random.Random, folder: Path) -> None:
        def change(tensors: dict[str, Any], _: Any) -> None:
            named = tensors[chance.choice([stem for stem in tensors if tensors[stem]])]
            how(chance, named, chance.choice(sorted(named)))

        resave(folder, change)

    return corrupt


def _fill(chance: random.Random, named: dict[str, Any], name: str) -> None:
    tensor = named[name].clone()
    values = [float("nan"), float("inf"), 1e30] if tensor.is_floating_point() else [0, 1, 2**31 - 1]
    if tensor.dtype == torch.bool or tensor.dtype == torch.uint8:
        values = [0, 1]
    tensor.view(-1)[: chance.choice([1, tensor.numel()])] = chance.choice(values)
    named[name] = tensor


def _header(chance: random.Random, folder: Path) -> None:
    """A safetensors header that lies, with digests that agree."""
    path = folder / "state.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    replace_somewhere(chance, header)
    text = json.dumps(header).encode()
    size = chance.choice([len(text), len(text), len(text), 2**40, 0])
    path.write_bytes(struct.pack("<Q", size) + text + data[8 + length :])
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest.pop("checksum")
    written = path.read_bytes()
    entry = {"sha256": hashlib.sha256(written).hexdigest(), "bytes": len(written), "tensors": len(header)}
    manifest["files"]["state.safetensors"] = entry
    (folder / "manifest.json").write_bytes(_manifest_bytes(manifest))


SEALED: dict[str, Callable[[random.Random, Path], None]] = {
    "sealed meta data": _sealed_manifest,
    "sealed type": tensor_change(lambda c, n, k: n.__setitem__(k, n[k].to(c.choice([torch.float64, torch.int8])))),
    "sealed shape": tensor_change(lambda c, n, k: n.__setitem__(k, n[k].reshape(-1)[: c.randrange(n[k].numel() + 1)])),
    "sealed values": tensor_change(_fill),
    "sealed without a tensor": tensor_change(lambda c, n, k: n.__delitem__(k)),
    "sealed with a tensor": tensor_change(lambda c, n, k: n.__setitem__(f"{k}.x", torch.zeros(c.randrange(9)))),
    "sealed names exchanged": tensor_change(lambda c, n, k: n.update({k: n[o := c.choice(sorted(n))], o: n[k]})),
    "sealed header": _header,
    "sealed random bytes": tensor_change(
        lambda c, n, k: n.__setitem__(k, torch.randint(0, 255, n[k].shape).to(n[k].dtype))
    ),
    "sealed empty": lambda c, f: resave(f, lambda tensors, meta: tensors.clear() if c.random() < 0.5 else meta.clear()),
}  # fmt: skip


def corrupt(chance: random.Random, case: int, folder: Path) -> Outcome:
    kinds = [*DAMAGE, *SEALED]
    kind = kinds[case % len(kinds)]
    run = folder / "run"
    shutil.copytree(Source.run / "checkpoints", run / "checkpoints")
    place = run / "checkpoints" / Source.newest
    (DAMAGE.get(kind) or SEALED[kind])(chance, place)
    if kind in DAMAGE:
        kept = place if os.path.lexists(place) else place.with_name("step_000000999999")
        if verify(kept) is None:
            return kind, 1, "not detected"
        told: list[str] = []
        found = latest_valid(run, told.append)
        if found.name != Source.older or not told:
            return kind, 1, f"fell back to {found.name} and said {told}"
        return kind, 1, None
    try:
        if chance.random() < 0.25:
            trainer = Trainer.resume(place, progress=False, total_timesteps=96)
            trainer.close()
        else:
            agent = Agent.load(place, device="cpu")
            agent.predict([0.0, 0.0, 0.0, 0.0])
            if not all(torch.isfinite(x).all() for x in agent.train.params.values()):
                return kind, 1, "parameters that are not finite were accepted"
    except UserError as error:
        return kind, 1, None if str(error).strip() and len(str(error)) < 5_000 else f"message: {error}"
    return kind, 1, None


CORRUPT = Attack(
    "corrupt", "corruptions of a checkpoint: detected, the older one used, or refused with a sentence", 20_000, 20_000,
    corrupt, prepare_run, batch=1_000,
)  # fmt: skip
