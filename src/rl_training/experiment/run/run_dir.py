"""The directory of one run: its name, and the small files that record what was run, where, and how it ended."""

from __future__ import annotations

import functools
import importlib.metadata
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
from rl_training.experiment.run.atomic import (
    atomic_write_json,
    atomic_write_text,
    fsync_directory,
    os_reason,
    read_json_object,
)
from rl_training.version import __version__

_MAX_NAME = 80  # run names match [A-Za-z0-9][A-Za-z0-9._-]{0,79}
_LIBRARIES = {"torch": "torch", "numpy": "numpy", "gymnasium": "gymnasium", "safetensors": "safetensors"}


def create_run_dir(output_dir: str | Path, algo: str, env_id: str, seeds: Sequence[int]) -> Path:
    """Create `<algo>__<env>__seed<N or A-B>__<UTC time>[__k]`; `mkdir` ensures that no two runs share a name."""
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
        raise UserError(f"output_dir {root} is a file or inside one; choose another --output-dir.") from error
    except OSError as error:
        raise UserError(f"Cannot create a run directory in {root}: {os_reason(error)}.") from error
    raise UserError(f"{root} already contains 9999 runs named {name}.")


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def library_versions() -> dict[str, str]:
    """Versions of the libraries that influence results, read without importing them."""
    own = {"python": platform.python_version(), "rl_training": __version__}
    return {**own, **{key: _version(name) for key, name in _LIBRARIES.items()}}


@functools.cache
def _version(distribution: str) -> str:
    """The version of an installed distribution, cached: every checkpoint needs it, and reading it is slow."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def write_metadata(run_dir: Path, *, device: str = "cpu", command: Sequence[str] | None = None) -> dict[str, Any]:
    """Record what is needed to repeat the run. The host is described without its name or paths."""
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
    """Set `status` and further fields. Any status but "running" ends the run; "running" records a resume."""
    path = run_dir / "metadata.json"
    metadata = read_json_object(path)
    metadata.update(extra, status=status, end=None if status == "running" else _now())
    if status == "running":
        metadata["resumed"] = [*metadata.get("resumed", []), _now()]
    atomic_write_json(path, metadata)


def read_status(run_dir: Path) -> str | None:
    """The status that `update_status` wrote, or None if it cannot be read."""
    status = read_json_object(run_dir / "metadata.json").get("status")
    return None if status is None else str(status)


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Save the fully resolved configuration as a file for `--config`."""
    import yaml

    atomic_write_text(run_dir / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Replace summary.json: at every checkpoint and at the end."""
    atomic_write_json(run_dir / "summary.json", summary)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _host(device: str) -> dict[str, Any]:
    host: dict[str, Any] = {"os": platform.system(), "machine": platform.machine(), "cpu_count": os.cpu_count()}
    host["gpu"] = None
    if device.startswith("cuda"):  # reading the name initialises CUDA, which a CPU run must not do
        import torch

        host["gpu"] = torch.cuda.get_device_name(device)
    return host


def _git() -> dict[str, Any] | None:
    """Commit of the working directory's repository, and whether tracked files differ; None outside a repository."""
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
