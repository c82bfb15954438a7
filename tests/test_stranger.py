"""The path of someone who has just found the library: the wheel in a clean virtual environment, outside the repository,
from a preset by name to an ONNX file that gives the same actions in a Python that has never heard of rl_training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
LIMIT = 240  # seconds a command may take on a busy machine
COMPLETE = "step_" + 12 * "[0-9]"  # a killed run may leave the beginning of another checkpoint, with a longer name

# Run by `python -I -S`: nothing but the standard library and the folder given.
ALONE = """
import importlib.util, json, sys
sys.path.insert(0, sys.argv[1])
for name in ("rl_training", "torch", "gymnasium"):
    assert importlib.util.find_spec(name) is None, name
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[2], providers=["CPUExecutionProvider"])
observations = numpy.array(json.load(open(sys.argv[3])), dtype="float32")
(actions,) = session.run(None, {"obs": observations})
print(json.dumps(actions.tolist()))
"""


class Stranger:
    """A clean environment: rl_training comes from the wheel, other packages from where the tests have theirs."""

    def __init__(self, folder: Path) -> None:
        self.home, venv = folder / "home", folder / "venv"
        self.home.mkdir()
        keep = ("PATH", "LANG", "TMPDIR", "OMP_NUM_THREADS")
        self.environment = {**{k: os.environ[k] for k in keep if k in os.environ}, "HOME": str(self.home)}
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "--directory", str(folder)]
        self.call(build, cwd=ROOT)
        self.call([sys.executable, "-m", "venv", "--without-pip", str(venv)])
        self.bin = venv / "bin"
        (wheel,) = folder.glob("*.whl")
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        self.call([*pip, "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)])
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "third_party.pth").write_text(
            sysconfig.get_path("purelib") + "\n"
        )  # after the wheel's, and no editable

    def call(self, command: list[str], cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, cwd=cwd or self.home, env=self.environment, capture_output=True, text=True, timeout=LIMIT,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def rl(self, *words: str) -> str:
        return self.call([str(self.bin / "rl-training"), *words])

    def train_and_kill(self, *words: str) -> Path:
        """The run directory of a training run that was shot after its first checkpoint."""
        with open(self.home / "train.log", "w") as log:
            process = subprocess.Popen(
                [str(self.bin / "rl-training"), "train", *words], cwd=self.home, env=self.environment, stdout=log,
                stderr=log,
            )  # fmt: skip
            try:
                deadline = time.monotonic() + LIMIT
                while not (found := list(self.home.glob(f"runs/*/checkpoints/{COMPLETE}/manifest.json"))):
                    assert process.poll() is None, (self.home / "train.log").read_text()[-3000:]
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
        return found[0].parents[2]


@pytest.mark.slow
def test_installed_wheel_trains_resumes_and_exports_a_standalone_policy(tmp_path: Path) -> None:
    for package in ("hatchling", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    stranger = Stranger(tmp_path)
    where = stranger.call([str(stranger.bin / "python"), "-c", "import rl_training; print(rl_training.__file__)"])
    assert Path(where.strip()).is_relative_to(tmp_path)

    run = stranger.train_and_kill(
        "--config", "ppo/cartpole", "-n", "50M", "--execution", "eager", "--no-progress",
        "--set", "checkpoint_interval=1000",
    )  # fmt: skip
    assert not (run / "summary.json").exists() or json.loads((run / "summary.json").read_text())["status"] == "running"
    checkpoint = max(run.glob(f"checkpoints/{COMPLETE}"))
    reached = int(checkpoint.name.removeprefix("step_"))
    summary = json.loads(
        stranger.rl("resume", "--run", str(run), "-n", str(reached + 20_000), "--no-progress", "--json")
    )
    assert summary["status"] == "completed"
    assert Path(summary["run_dir"]) == run
    assert reached < summary["env_steps"] <= reached + 20_000

    score = json.loads(stranger.rl("eval", "--checkpoint", str(run), "--num-episodes", "3", "--json"))
    assert score["mean_return"] > 40.0  # a random policy has about 20
    assert "CartPole-v1" in stranger.rl("report", str(run))

    model = tmp_path / "model.onnx"
    exported: dict[str, Any] = json.loads(
        stranger.rl("export", "--checkpoint", str(run), "--output", str(model), "--json")
    )
    assert exported["inputs"] == {"obs": {"dtype": "float32", "shape": ["batch", 4]}}

    observations = np.random.default_rng(5).normal(0.0, 0.1, (100, 4)).round(4).tolist()
    (tmp_path / "observations.json").write_text(json.dumps(observations))
    wanted = json.loads(stranger.rl("predict", "--checkpoint", str(run), "--obs", json.dumps(observations)))
    alone = [sys.executable, "-I", "-S", "-c", ALONE, str(only(tmp_path)), str(model)]
    actions = json.loads(stranger.call([*alone, str(tmp_path / "observations.json")]))
    assert len(set(wanted)) == 2
    assert sum(a == b for a, b in zip(actions, wanted, strict=True)) >= 99  # one tie within rounding, at most


def only(folder: Path) -> Path:
    """A folder with numpy, onnxruntime and what that imports, and nothing else."""
    place, site = folder / "only", Path(sysconfig.get_path("purelib"))
    place.mkdir()
    for pattern in ("numpy", "numpy.libs", "onnxruntime", "flatbuffers", "google", "packaging"):
        if (site / pattern).exists():
            (place / pattern).symlink_to(site / pattern)
    return place
