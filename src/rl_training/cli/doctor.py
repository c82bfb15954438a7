"""`rl-training doctor`"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import one_line, tell
from rl_training.cli.output import lines, show
from rl_training.machine import usable_cpus

# The modules that each extra installs. They are looked up without being imported.
EXTRAS = {
    "atari": ("ale_py", "cv2"),
    "box2d": ("Box2D",),
    "mujoco": ("mujoco",),
    "dm-control": ("dm_control", "shimmy"),
    "envpool": ("envpool",),
    "offline": ("minari", "h5py"),
    "tuning": ("optuna",),
    "video": ("imageio_ffmpeg",),
    "ray": ("ray",),
    "tracking": ("wandb", "mlflow", "trackio"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "bench": ("stable_baselines3", "sb3_contrib"),
    "docs": ("mkdocs", "material"),
    "dev": ("pytest", "pytest_timeout", "ruff", "mypy", "scipy", "pre_commit"),
}
_COMPILE_LIMIT = 180  # seconds; a cold compiler on a busy machine has taken 45
_PROBE = """
import torch
from rl_training.runtime.engine.compiler import compiled
from rl_training.runtime.engine.executor import choose_device
device = choose_device("auto")
x = torch.arange(8.0, device=device)
assert torch.equal(compiled(lambda x: x * 2 + 1, device)(x), x * 2 + 1)
"""


def doctor(
    output_dir: Annotated[
        str, typer.Option("--output-dir", "-o", metavar="DIR", help="Directory to check for write access.")
    ] = "runs",
    compiles: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also test torch.compile, which can take a minute.")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Check this machine: versions, device, compiler, extras, write access, memory."""
    from rl_training.experiment.run.run_dir import library_versions
    from rl_training.ops.torch_internals import left_out

    report: dict[str, Any] = {"versions": {**library_versions(), "os": f"{platform.system()} {platform.machine()}"}}
    report["device"] = _device()
    report["machine"] = _machine()
    report["left_out"] = left_out()
    report["output_dir"] = {"path": output_dir, **_writable(Path(output_dir))}
    report["compile"] = _compile(try_it=compiles)
    report["extras"] = {name: _extra(name, modules) for name, modules in EXTRAS.items()}
    report["problems"] = _problems(report)
    show(report, as_json, _show)


def _device() -> dict[str, Any]:
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {"auto": "cuda" if gpus else "cpu", "cuda_build": torch.version.cuda, "gpus": gpus}


def _machine() -> dict[str, Any]:
    import torch

    return {
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "torch_threads": torch.get_num_threads(),
        **_memory(),
    }


def _memory() -> dict[str, float | None]:
    """Total memory and memory available for new programs, in gigabytes; None if the system does not report it."""
    import torch

    from rl_training.data.storage import available_memory

    try:
        total: float | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, OSError, ValueError):
        total = None
    available = available_memory(torch.device("cpu"))
    return {
        "memory_gb": round(total, 1) if total is not None else None,
        "available_gb": round(available / 1e9, 1) if available is not None else None,
    }


def _writable(path: Path) -> dict[str, Any]:
    """Write a temporary file: permission bits do not show quotas and read-only mounts."""
    place = path
    while not place.exists() and place.parent != place:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return {"writable": False, "reason": error.strerror or str(error)}
    return {"writable": True, "free_gb": round(shutil.disk_usage(place).free / 1e9, 1)}


def _compile(try_it: bool) -> dict[str, Any]:
    """Compile a small function in a separate process with an empty cache: a cached graph would prove nothing."""
    names = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
    found = next((path for name in names if (path := shutil.which(name))), None)
    result: dict[str, Any] = {"compiler": Path(found).name if found else None, "works": None}
    if found and (reason := _builds(found)):
        return {**result, "works": False, "reason": reason}
    if not try_it:
        return result
    tell(f"compiling a small function (up to {_COMPILE_LIMIT} s; without --compile this is skipped) ...")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-training-doctor-") as cache:
        try:
            subprocess.run(
                [sys.executable, "-c", _PROBE], env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}, check=True,
                capture_output=True, text=True, errors="replace", timeout=_COMPILE_LIMIT,
            )  # fmt: skip
            result["works"] = True
        except subprocess.TimeoutExpired:
            result.update(works=False, reason=f"no result after {_COMPILE_LIMIT} s")
        except subprocess.CalledProcessError as error:
            last = [line for line in error.stderr.splitlines() if line.strip()][-1:] or [f"status {error.returncode}"]
            result.update(works=False, reason=one_line(last[0]))
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def _builds(compiler: str) -> str:
    """Why this compiler cannot build an empty library; nothing if it can. Takes a tenth of a second."""
    with tempfile.TemporaryDirectory(prefix="rl-training-doctor-") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text('extern "C" int probe() { return 0; }')
        command = [compiler, "-shared", "-fPIC", "-o", f"{folder}/probe.so", str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return one_line(str(error))
    return "" if done.returncode == 0 else one_line((done.stderr.strip().splitlines() or ["it fails"])[-1])


def _extra(name: str, modules: tuple[str, ...]) -> dict[str, Any]:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    install = {"missing": missing, "install": f"pip install 'rl-training[{name}]'"} if missing else {}
    return {"installed": not missing, **install}


def _problems(report: dict[str, Any]) -> list[str]:
    out = []
    if not report["output_dir"]["writable"]:
        where = report["output_dir"]
        out.append(f"{where['path']} cannot be written ({where['reason']}): choose another --output-dir")
    if report["compile"]["compiler"] is None and report["device"]["auto"] == "cpu":
        out.append("no C++ compiler: long runs are recorded, not compiled, and slower; install g++ or clang++")
    elif report["compile"]["works"] is False:
        out.append(f"compiling fails ({report['compile']['reason']}): use --execution recorded")
    return out


def _show(report: dict[str, Any]) -> None:
    device, machine, compiler = report["device"], report["machine"], report["compile"]
    works = {True: "works", False: "does not work", None: "not tried (--compile)"}[compiler["works"]]
    took = f" ({compiler['seconds']} s)" if "seconds" in compiler else ""
    gpus = ", ".join(device["gpus"]) or "no CUDA device"
    free = f", {machine['available_gb']} GB free" if machine["available_gb"] is not None else ""
    place = report["output_dir"]
    access = f"writable, {place['free_gb']} GB free" if place["writable"] else f"NOT writable: {place['reason']}"
    rows = [*report["versions"].items()]
    rows += [
        ("device", f"{device['auto']} ({gpus})"),
        ("cpu", f"{machine['usable_cpus']} of {machine['cpus']} usable, torch uses {machine['torch_threads']} threads"),
        ("memory", f"{machine['memory_gb']} GB{free}"),
        ("compiler", f"{compiler['compiler'] or 'none found'}; torch.compile {works}{took}"),
        ("engine", "; ".join(report["left_out"]) or "every optional part of torch was found"),
        ("output", f"{place['path']}: {access}"),
    ]
    for name, extra in report["extras"].items():
        rows.append((f"[{name}]", "installed" if extra["installed"] else extra["install"]))
    print(lines(rows))
    print("\n" + ("\n".join(f"problem: {text}" for text in report["problems"]) or "No problems found."))
