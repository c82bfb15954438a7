"""Hostile dataset files: npz, HDF5 and Minari. They are read as finite numbers or refused; nothing is executed."""

from __future__ import annotations

import os
import random
import resource
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from attacks.base import Attack, Outcome
from attacks.files import DAMAGE
from rl_training.data.dataset import TransitionDataset
from rl_training.data.dataset_files import read_dataset, write_dataset
from rl_training.errors import UserError


class Source:
    """The files that are changed."""

    run: Path


def prepare_datasets(scratch: Path) -> None:
    generator = np.random.default_rng(0)
    rows = 40
    ends = np.arange(rows) % 10 == 9
    obs = generator.normal(size=(rows + 1, 3)).astype(np.float32)
    Source.run = scratch / "datasets"
    Source.run.mkdir()
    dataset = TransitionDataset(
        obs=obs[:-1], actions=generator.normal(size=(rows, 1)).astype(np.float32), rewards=np.ones(rows, np.float32),
        next_obs=obs[1:], terminated=ends, truncated=np.zeros(rows, np.bool_),
    )  # fmt: skip
    for name in ("d.npz", "d.hdf5", "d"):
        write_dataset(dataset, Source.run / name)


def hostile_npz(chance: random.Random, path: Path) -> str:
    with np.load(Source.run / "d.npz") as saved:
        arrays: dict[str, Any] = dict(saved)
    name = chance.choice(sorted(arrays))
    how = chance.choice(["dtype", "shape", "missing", "values", "object", "member", "header", "compressed", "longer"])
    if how == "dtype":
        arrays[name] = arrays[name].astype(chance.choice(["complex64", "S5", "U3", "M8[s]", "int8", "float16", "bool"]))
    elif how == "shape":
        arrays[name] = arrays[name].reshape(chance.choice([(1, -1), (-1, 1, 1), (-1,)]))
    elif how == "missing":
        del arrays[name]
    elif how == "values":
        arrays[name] = np.full_like(
            arrays[name], chance.choice([np.nan, np.inf, 1e30]) if arrays[name].dtype.kind == "f" else 1
        )
    elif how == "object":
        arrays[name] = np.array([Owned(path.parent)] * 40, object)
    elif how == "longer":
        arrays[name] = np.concatenate([arrays[name]] * 2)
    (np.savez_compressed if how == "compressed" or chance.random() < 0.3 else np.savez)(path, **arrays)
    if how == "member":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(
                chance.choice(["../../x.npy", "/x.npy", "obs.npy", "x.npy", "a/b.npy"]), b"\x93NUMPY" + bytes(20)
            )
    elif how == "header":
        lies = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 3), }" % chance.choice([2**40, -1, 0, 41])
        text = lies + b" " * (118 - len(lies)) + b"\n"
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("obs.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(480))
    return f"npz {how}"


class Owned:
    """Unpickling it would write a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "owned"),)


def hostile_hdf5(chance: random.Random, path: Path, minari: bool) -> str:
    source = Source.run / ("d/data/main_data.hdf5" if minari else "d.hdf5")
    shutil.copy(source, path)
    how = chance.choice(
        ["dtype", "shape", "missing", "group", "soft", "external link", "external", "huge", "name", "values"]
    )
    with h5py.File(path, "a") as file:
        node = file[chance.choice(sorted(file))] if minari else file
        name = chance.choice(sorted(node))
        old = node[name][()]
        if how != "values":
            del node[name]
        if how == "dtype":
            node[name] = old.astype(chance.choice(["complex64", "S5", "int8", "float16"]))
        elif how == "shape":
            node[name] = old.reshape(chance.choice([(1, -1), (-1, 1, 1)])) if chance.random() < 0.7 else np.float32(1)
        elif how == "group":
            node.create_group(name)["x"] = old
        elif how == "soft":
            node[name] = h5py.SoftLink(chance.choice(["/nowhere", f"{node.name}/{name}", "/"]))
        elif how == "external link":
            node[name] = h5py.ExternalLink(
                chance.choice(["/etc/passwd", str(Source.run / "d.hdf5"), "missing"]), "observations"
            )
        elif how == "external":
            node.create_dataset(name, old.shape, old.dtype, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
        elif how == "huge":
            node.create_dataset(name, (2 ** chance.choice([34, 40, 50]), *old.shape[1:]), old.dtype, chunks=True)
        elif how == "name":
            node[chance.choice(["episode_x", "episode_", "\u202e", "x" * 300])] = old
            file.create_group(chance.choice(["episode_-1", "episode_1e9", "episode_z"]))
        elif how == "values":
            node[name][...] = chance.choice([np.nan, np.inf]) if old.dtype.kind == "f" else 1
    return f"{'Minari' if minari else 'HDF5'} {how}"


def datasets(chance: random.Random, case: int, folder: Path) -> Outcome:
    """Half of the files are changed in their bytes, half in their structure."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    form = ("npz", "hdf5", "minari")[case % 3]
    path = folder / {"npz": "d.npz", "hdf5": "d.hdf5", "minari": "main_data.hdf5"}[form]
    if case % 2:
        kind = hostile_npz(chance, path) if form == "npz" else hostile_hdf5(chance, path, form == "minari")
    else:
        source = Source.run / {"npz": "d.npz", "hdf5": "d.hdf5", "minari": "d/data/main_data.hdf5"}[form]
        shutil.copy(source, path)
        how = chance.choice(["bit", "byte", "zeros", "ones", "inserted byte", "removed byte", "truncated"])
        only = folder / "only"
        only.mkdir()
        shutil.move(path, only / path.name)
        DAMAGE[how](chance, only)
        shutil.move(only / path.name, path)
        kind = f"{form} {how}"
    try:
        found = read_dataset(path, form)
        arrays = found.arrays()
        if any(
            a.dtype.kind not in "fiub" or (a.dtype.kind == "f" and not np.isfinite(a).all()) for a in arrays.values()
        ):
            return kind, 1, "values that are no finite numbers were accepted"
    except UserError:
        pass
    except MemoryError:
        return kind, 1, "the file made us ask for more than 16 GiB"
    if (folder / "owned").exists():
        return kind, 1, "code in the file was executed"
    return kind, 1, None


DATASETS = Attack(
    "datasets", "hostile npz, HDF5 and Minari files: read as finite numbers or refused with a sentence", 9_000, 9_000,
    datasets, prepare_datasets, batch=500,
)  # fmt: skip
