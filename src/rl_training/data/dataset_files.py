"""Dataset files: npz, HDF5 in the layout of D4RL, and Minari. Only arrays are read; no code in a file is executed.

Large arrays that are stored without compression are memory-mapped, so a dataset may be larger than memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from rl_training.data.dataset import OPTIONAL, REQUIRED, TransitionDataset
from rl_training.errors import UserError, did_you_mean
from rl_training.spec import Array

MAPPED_FROM = 256 << 20  # arrays of at least this many bytes are mapped instead of read
_D4RL = {"observations": "obs", "next_observations": "next_obs", "terminals": "terminated", "timeouts": "truncated"}
_MAX_RATIO = 1200  # of compression; deflate reaches 1032
MINARI_VERSION = "0.5.0"  # whose layout is written
FORMATS = ("npz", "hdf5", "minari")


def format_of(path: str | Path) -> str:
    """The format of a path, by its suffix; without a suffix it is a Minari directory or id."""
    suffix = Path(path).suffix.lower()
    return {".npz": "npz", ".hdf5": "hdf5", ".h5": "hdf5"}.get(suffix, "minari")


def read_dataset(path: str | Path, kind: str | None = None) -> TransitionDataset:
    kind = kind or format_of(path)
    readers = {"npz": _read_npz, "hdf5": _read_hdf5, "minari": _read_minari}
    return readers[kind](Path(path).expanduser())


def write_dataset(dataset: TransitionDataset, path: str | Path, kind: str | None = None, env_id: str = "") -> None:
    """Write a dataset; a file with that name is always complete."""
    path, kind = Path(path).expanduser(), kind or format_of(path)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "npz":
            with open(temporary, "wb") as file:
                np.savez(file, allow_pickle=False, **dataset.arrays())
        elif kind == "hdf5":
            _write_hdf5(dataset, temporary)
        else:
            _write_minari(dataset, temporary, path, env_id)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write the dataset to {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink() if temporary.is_file() else shutil.rmtree(temporary)


def _existing(path: Path, what: str) -> Path:
    if not path.is_file():
        raise UserError(f"the dataset {what} {path} does not exist")
    return path


def _build(arrays: Mapping[str, Any], path: Path) -> TransitionDataset:
    """The dataset of named arrays; the names may be those of D4RL."""
    renamed = {_D4RL.get(name, name): value for name, value in arrays.items()}
    known = (*REQUIRED, *OPTIONAL)
    columns: dict[str, Any] = {k: v for k, v in renamed.items() if k in known}
    for name, value in renamed.items():
        column, slash, part = name.partition("/")
        if slash and column in ("obs", "next_obs"):
            columns.setdefault(column, {})[part] = value
    for name in ("obs", "actions", "rewards", "terminated"):
        if name not in columns:
            raise UserError(
                f"{path} has no '{name}'.{did_you_mean(name, map(str, arrays))} Needed: {', '.join(REQUIRED)}; it"
                f" contains {', '.join(sorted(map(str, arrays))) or 'nothing'}"
            )
    lengths = {name: len(value) for name, value in columns.items() if isinstance(value, np.ndarray) and value.ndim}
    if len(set(lengths.values())) > 1 or len(lengths) < sum(isinstance(v, np.ndarray) for v in columns.values()):
        described = ", ".join(f"{name} has {n:,}" for name, n in lengths.items())
        raise UserError(f"{path}: the arrays of a dataset must have the same length: {described} rows")
    for name in ("terminated", "truncated"):
        if name in columns:
            columns[name] = _flags(columns[name], name, path)
        else:
            columns[name] = np.zeros(len(columns["rewards"]), np.bool_)
    columns["rewards"] = _one_per_row(columns["rewards"], "rewards", path)
    if "has_next" in columns:
        columns["has_next"] = _flags(columns["has_next"], "has_next", path)
    if "next_obs" in columns:
        return _checked(columns, path)
    # Without next observations: use those of the next row, and leave out rows without one, as D4RL's loader does.
    if not isinstance(columns["obs"], np.ndarray):
        raise UserError(f"{path} has no 'next_obs', which dict observations need")
    ends = columns["terminated"] | columns["truncated"]
    ends[-1] = True
    keep = np.flatnonzero(~ends | columns["terminated"])
    if not len(keep):
        raise UserError(f"{path} has no 'next_obs', and no two consecutive rows to take it from")
    following = np.concatenate([columns["obs"][1:], columns["obs"][-1:]])
    following[ends] = columns["obs"][ends]
    # The row before one that is left out becomes the last of its episode.
    lost = np.flatnonzero(ends & ~columns["terminated"]) - 1
    truncated = columns["truncated"].copy()
    truncated[lost[lost >= 0]] = True
    truncated &= ~columns["terminated"]
    whole = {**columns, "next_obs": following, "truncated": truncated}
    return _checked({name: value[keep] for name, value in whole.items()}, path)


def _checked(columns: Mapping[str, Any], path: Path) -> TransitionDataset:
    try:
        return TransitionDataset(**columns)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _one_per_row(value: Array, name: str, path: Path) -> Array:
    if value.size != len(value):
        raise UserError(f"{path}: {name} must be one number per row; their shape is {value.shape}")
    return value.reshape(-1)


def _flags(value: Array, name: str, path: Path) -> Array:
    value = _one_per_row(value, name, path)
    if value.dtype == np.bool_:
        return value
    if value.dtype.kind not in "iuf" or not np.isin(value, (0, 1)).all():
        raise UserError(f"{path}: {name} must be true or false (1 or 0) in each row")
    return value.astype(np.bool_)


# --- npz -------------------------------------------------------------------------------------------------------------


def _read_npz(path: Path) -> TransitionDataset:
    _existing(path, "file")
    arrays: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.endswith(".npy"):
                    arrays[info.filename.removesuffix(".npy")] = _member(path, archive, info)
    except zipfile.BadZipFile:
        raise UserError(f"{path} is not an npz file (numpy.savez writes them)") from None
    except UserError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, struct.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return _build(arrays, path)


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    """One array of an npz file; mapped if it is large and not compressed."""
    with archive.open(info) as file:
        try:
            version = npy.read_magic(file)
            reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = reader(file)
            if dtype.hasobject:
                raise UserError(
                    f"{path}: '{info.filename}' contains pickled objects, which are never loaded; save plain arrays"
                )
            header, size = file.tell(), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            if header + size != info.file_size:
                raise ValueError(f"its header claims {size:,} bytes, {info.file_size - header:,} are there")
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{path}: '{info.filename}' is not a valid array: {error}") from None
        if info.compress_type == zipfile.ZIP_STORED and size >= MAPPED_FROM and not fortran:
            with open(path, "rb") as raw:  # the local header has an extra field whose length must be read
                raw.seek(info.header_offset + 26)
                name, extra = struct.unpack("<HH", raw.read(4))
            offset = info.header_offset + 30 + name + extra + header
            return np.memmap(path, dtype, "c", offset, shape)
        flat = np.frombuffer(bytearray(file.read()), dtype)
        return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


# --- HDF5, as D4RL ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path, mode: str = "r") -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise UserError("HDF5 and Minari datasets need the offline extra: pip install 'rl-training[offline]'") from None
    try:
        with h5py.File(path, mode) as file:
            yield file
    except UserError:
        raise
    except (
        OSError,
        KeyError,
        RuntimeError,
        ValueError,
        TypeError,
    ) as error:  # all of them are h5py's for damaged files
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} is not an HDF5 file that can be {'read' if mode == 'r' else 'written'}: {reason}"
        ) from None


def _item(group: Any, name: str, path: Path) -> Any:
    """An object of an HDF5 file. Links could lead to another file, or in circles."""
    if type(group.get(name, getlink=True)).__name__ != "HardLink":
        raise UserError(f"{path}: '{name}' is a link to another place, which is refused")
    return group[name]


def _array(node: Any, path: Path, name: str) -> Array:
    """One array of an HDF5 file; mapped if it is large and neither chunked nor compressed."""
    if type(node).__name__ != "Dataset":
        raise UserError(
            f"{path}: '{name}' is a {type(node).__name__.lower()}, not an array; dict observations cannot be read from"
            " this layout"
        )
    if node.dtype.kind not in "fiub":
        raise UserError(f"{path}: '{name}' contains {node.dtype}, not numbers")
    if not node.ndim:
        raise UserError(f"{path}: '{name}' is a single value, not an array")
    if node.external or node.is_virtual:
        raise UserError(f"{path}: '{name}' is stored in another file, which is refused")
    if node.nbytes > _MAX_RATIO * node.id.get_storage_size() + 2**20:
        raise UserError(f"{path}: '{name}' claims {node.nbytes:,} bytes, far more than the file can hold")
    offset = node.id.get_offset() if node.chunks is None and node.compression is None else None
    if offset is not None and node.nbytes >= MAPPED_FROM:
        return np.memmap(node.file.filename, node.dtype, "c", offset, node.shape)
    return np.asarray(node[()])


def _read_hdf5(path: Path) -> TransitionDataset:
    wanted = (*REQUIRED, *OPTIONAL, *_D4RL)
    with _opened(_existing(path, "file")) as file:
        arrays = {name: _array(_item(file, name, path), path, name) for name in file if name in wanted}
        return _build(arrays if arrays else dict.fromkeys(file), path)


def _write_hdf5(dataset: TransitionDataset, path: Path) -> None:
    theirs = {ours: name for name, ours in _D4RL.items()}
    with _opened(path, "w") as file:
        for name, array in dataset.arrays().items():
            if "/" in name:
                raise UserError("the layout of D4RL has no dict observations; write npz instead")
            file.create_dataset(theirs.get(name, name), data=array)


# --- Minari ----------------------------------------------------------------------------------------------------------


def minari_file(name: Path) -> Path:
    """`main_data.hdf5` of a dataset given by its directory, its file or its id."""
    root = Path(os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")).expanduser()
    for base in (name, root / name):
        for path in (base, base / "main_data.hdf5", base / "data" / "main_data.hdf5"):
            if path.is_file():
                return path
    raise UserError(f"there is no Minari dataset '{name}' here or below {root}; `minari download {name}` fetches one")


def _read_minari(name: Path) -> TransitionDataset:
    path = minari_file(name)
    with _opened(path) as file:
        found = (group for group in file if re.fullmatch(r"episode_[0-9]{1,12}", group))
        groups = sorted(found, key=lambda group: int(group.rpartition("_")[2]))
        if not groups:
            raise UserError(f"{path} has no episodes (groups called episode_0, episode_1, ...)")
        parts: dict[str, list[Array]] = {column: [] for column in REQUIRED}
        for group in groups:
            episode = _item(file, group, path)
            arrays = {}
            for key in ("observations", "actions", "rewards", "terminations", "truncations"):
                if key not in episode:
                    raise UserError(f"{path}: {group} has no '{key}'")
                arrays[key] = _array(_item(episode, key, path), path, f"{group}/{key}")
            steps = len(arrays["rewards"])
            if any(len(arrays[key]) != steps + (key == "observations") for key in arrays):
                lengths = ", ".join(f"{key} {len(value)}" for key, value in arrays.items())
                raise UserError(f"{path}: {group} must have one observation more than steps; it has {lengths}")
            columns = (arrays["observations"][:-1], arrays["actions"], arrays["rewards"], arrays["observations"][1:],
                       _flags(arrays["terminations"], "terminations", path),
                       _flags(arrays["truncations"], "truncations", path))  # fmt: skip
            for column, value in zip(REQUIRED, columns):
                parts[column].append(value)
            ended = parts["terminated"][-1], parts["truncated"][-1]
            if steps and not (ended[0][-1] or ended[1][-1]):  # incomplete: the next row belongs to another episode
                ended[1][-1] = True
        return _checked({name: np.concatenate(values) for name, values in parts.items()}, path)


def _write_minari(dataset: TransitionDataset, path: Path, final: Path, env_id: str) -> None:
    if isinstance(dataset.obs, dict):
        raise UserError("dict observations cannot be written as a Minari dataset; write npz instead")
    episodes = dataset.closed().episodes()
    for part in episodes:
        if not np.array_equal(dataset.next_obs[part][:-1], dataset.obs[part][1:]):
            raise UserError(
                "a Minari dataset needs whole episodes, but these rows are not consecutive; write npz instead"
            )
    truncated = dataset.closed().truncated
    data = path / "data"
    data.mkdir(parents=True)
    with _opened(data / "main_data.hdf5", "w") as file:
        for number, part in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs["id"], group.attrs["total_steps"] = number, part.stop - part.start
            group["observations"] = np.concatenate([dataset.obs[part], dataset.next_obs[part][-1:]])
            group["actions"], group["rewards"] = dataset.actions[part], dataset.rewards[part]
            group["terminations"], group["truncations"] = dataset.terminated[part], truncated[part]
        file.attrs["total_episodes"], file.attrs["total_steps"] = len(episodes), len(dataset)
    meta = {
        "total_episodes": len(episodes), "total_steps": len(dataset), "data_format": "hdf5",
        "dataset_id": "/".join(final.absolute().parts[-2:]), "minari_version": MINARI_VERSION,
        "observation_space": _space(dataset.obs), "action_space": _space(dataset.actions), "env_id": env_id,
    }  # fmt: skip
    (data / "metadata.json").write_text(json.dumps(meta))


def _space(values: Array) -> str:
    """The space of some values, as Minari writes it: Discrete for a column of whole numbers, otherwise a Box without
    bounds (for images, with those of their type)."""
    if values.ndim == 1 and values.dtype.kind in "iu":
        low = min(0, int(values.min()))
        count = int(values.max()) - low + 1
        return json.dumps({"type": "Discrete", "dtype": "int64", "start": low, "n": count})
    if values.dtype.kind == "f":
        low_high: tuple[float, float] = (-np.inf, np.inf)
    else:
        info = np.iinfo(values.dtype)
        low_high = (int(info.min), int(info.max))
    low, high = (np.full(values.shape[1:], bound).tolist() for bound in low_high)
    return json.dumps({"type": "Box", "dtype": values.dtype.name, "shape": values.shape[1:], "low": low, "high": high})
