"""What is shipped: both archives hold the presets, the ledger and py.typed, and nothing else finds its way in."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rl_training
from rl_training import registry
from rl_training.experiment.run.config import preset_path, read_config

ROOT = Path(__file__).parent.parent
if sys.version_info >= (3, 11):
    import tomllib

SOURCE = ROOT / "src" / "rl_training"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, built without a network by the backend itself."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def shipped(suffixes: tuple[str, ...]) -> set[str]:
    """Files of the package that the archives must hold, relative to its parent."""
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(SOURCE.parent).as_posix() for path in files if path.suffix in suffixes}


def test_wheel_holds_the_package_and_its_assets(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"rl_training-{rl_training.__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(f"rl_training-{rl_training.__version__}.dist-info/entry_points.txt").decode()
    files = {name for name in names if ".dist-info/" not in name}
    folder = ROOT / "results"
    results = {f"rl_training/assets/results/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.json")}
    assert files == shipped((".py", ".pyi", ".h", ".yaml", ".typed", ".css", ".js", ".html")) | results
    assert results, "`rl-training list` shows them wherever it is run"
    assert {"rl_training/py.typed", "rl_training/__init__.pyi", "rl_training/assets/ledger.yaml"} <= files
    assert {f"rl_training/assets/configs/{name}.yaml" for name in registry.presets()} <= files
    assert "Requires-Dist: torch<3,>=2.10" in metadata
    assert "rl-training = rl_training.cli:main" in entry_points
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_source_archive_can_be_built_and_tested_from(archives: Path) -> None:
    (sdist,) = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        f"src/{name}" for name in shipped((".py", ".pyi", ".h", ".yaml", ".typed", ".css", ".js", ".html"))
    } <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "tests/conftest.py"} <= names
    allowed = ("src/", "tests/", "docs/", "examples/", "benchmarks/", "results/")
    stray = {name for name in names if "/" in name and not name.startswith(allowed)}
    assert not stray
    assert not {name for name in names if "__pycache__" in name}


def test_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("rl-training") == rl_training.__version__
    assert f"## {rl_training.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_presets_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert registry.presets()
    for name in registry.presets():
        assert read_config(name)["algo"] == name.partition("/")[0]


def test_configs_at_the_top_are_the_packaged_ones() -> None:
    """One copy, not two."""
    for name in registry.presets():
        packaged = preset_path(name)
        assert packaged is not None
        assert (ROOT / "configs" / f"{name}.yaml").resolve() == packaged.resolve()


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().rstrip().endswith("\nmake test")
    plan = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for step in ("ruff check .", "ruff format --check .", "/mypy", "/pytest"):
        assert step in plan


def requirements() -> list[Requirement]:
    """Everything that pyproject.toml asks for, in any extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    found = [Requirement(text) for group in [*groups, project["build-system"]["requires"]] for text in group]
    return [item for item in found if item.name != "rl-training"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_requirements_have_both_bounds_and_the_constraints_meet_them() -> None:
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    exact = {item.name.lower().replace("_", "-"): next(iter(item.specifier)) for item in pinned}
    assert all(one.operator == "==" for one in exact.values())
    assert "torch" not in exact  # the Makefile chooses it by the machine
    lower, upper = {">=", "~=", "=="}, {"<", "~=", "=="}
    for item in requirements():
        operators = {one.operator for one in item.specifier}
        assert operators & upper, f"{item} has no upper bound: a release in a year may break it"
        assert operators & lower or item.name == "mujoco", f"{item} has no lower bound"
    floors = {(item.name, one.version) for item in requirements() for one in item.specifier if one.operator == ">="}
    assert len({name for name, _ in floors}) == len(floors), "a package has two floors: the lower one is out of date"
    for item in (Requirement(text) for text in importlib.metadata.requires("rl-training") or ()):
        wanted = item.marker is None or item.marker.evaluate({"extra": "dev"})
        if wanted and item.name not in ("torch", "rl-training"):
            assert item.specifier.contains(exact[item.name.lower()].version), f"constraints.txt does not meet {item}"
