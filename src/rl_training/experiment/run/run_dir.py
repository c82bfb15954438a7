"""The directory of one run: its name, and the small files that say what ran, where and how it ended."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_json, atomic_write_text, fsync_directory, os_reason

_MAX_NAME = 80  # run names match [A-Za-z0-9][A-Za-z0-9._-]{0,79}
_LIBRARIES = {"torch": "torch", "numpy": "numpy", "gymnasium": "gymnasium", "safetensors": "safetensors"}


def create_run_dir(output_dir: str | Path, algo: str, env_id: str, seeds: Sequence[int]) -> Path:
    """Make `<algo>__<env>__seed<N or A-B>__<UTC time>[__k]`; `mkdir` decides who gets a name: runs never share one."""
    seed = f"seed{seeds[0]}" if len(seeds) == 1 else f"seed{min(seeds)}-{max(seeds)}"
    tail = f"{seed}__{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    head = _plain(algo).lstrip("._-")[:30] or "run"
    room = _MAX_NAME - len(head) - len(tail) - len("____") - len("__9999")
    name = f"{head}__{_plain(env_id)[: max(room, 1)] or 'env'}__{tail}"
    root = Path(output_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for k in range(1, 10_000):
            run_dir = root / (name if k == 1 else f"{name}__{k}")
            try:
                run_dir.mkdir()
            except FileExistsError:
                continue
            (run_dir / "checkpoints").mkdir()
            fsync_directory(run_dir)
            fsync_directory(root)
            return run_dir
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"output_dir {root} cannot hold runs: it, or a part of it, is a file.") from error
    except OSError as error:
        raise UserError(f"Cannot create a run directory in {root}: {os_reason(error)}.") from error
    raise UserError(f"{root} already holds 9999 runs named {name}.")


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def library_versions() -> dict[str, str]:
    """Versions that decide whether two runs can be equal, read without importing the libraries."""
    named = {"rl_training": "rl-training", **_LIBRARIES}
    return {"python": platform.python_version(), **{key: _version(name) for key, name in named.items()}}


@functools.cache
def _version(distribution: str) -> str:
    """Of an installed distribution. Every checkpoint asks, and each time the whole of its metadata would be parsed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def write_metadata(run_dir: Path, *, device: str = "cpu", command: Sequence[str] | None = None) -> dict[str, Any]:
    """Record what is needed to repeat the run. The host is described by class, never by name or path."""
    program, *arguments = command if command is not None else sys.argv
    metadata = {
        "status": "running",
        "start": _now(),
        "end": None,
        "command": [Path(program).name, *arguments],
        "versions": library_versions(),
        "git": _git(),
        "host": _host(device),
    }
    atomic_write_json(run_dir / "metadata.json", metadata)
    return metadata


def update_status(run_dir: Path, status: str, **extra: Any) -> None:
    """Set `status` and further fields; any status but "running" ends the run, "running" again records a resume."""
    path = run_dir / "metadata.json"
    try:
        metadata = json.loads(path.read_text())
        if not isinstance(metadata, dict):
            metadata = {}
    except (OSError, ValueError):  # lost or damaged: the status still matters
        metadata = {}
    metadata.update(extra, status=status, end=None if status == "running" else _now())
    if status == "running":
        metadata["resumed"] = [*metadata.get("resumed", []), _now()]
    atomic_write_json(path, metadata)


def read_status(run_dir: Path) -> str | None:
    """The status that `update_status` left, or None when it cannot be read."""
    try:
        return str(json.loads((run_dir / "metadata.json").read_text())["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Save the fully resolved configuration; the file can be passed to `--config`."""
    import yaml

    atomic_write_text(run_dir / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Replace summary.json: at every checkpoint and at the end."""
    atomic_write_json(run_dir / "summary.json", summary)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _host(device: str) -> dict[str, Any]:
    host: dict[str, Any] = {
        "os": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "gpu": None,
    }
    if device.startswith("cuda"):  # asking for the name starts CUDA, which a CPU run must not do
        import torch

        host["gpu"] = torch.cuda.get_device_name(device)
    return host


def _git() -> dict[str, Any] | None:
    """Commit of the repository around the working directory and whether tracked files differ; None outside one."""
    command = ["git", "status", "--porcelain=v2", "--branch", "-uno"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, env=environment)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    head, lines = "# branch.oid ", done.stdout.splitlines()
    commit = next((line.removeprefix(head) for line in lines if line.startswith(head)), "(initial)")
    if commit == "(initial)":  # nothing has been committed yet
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
