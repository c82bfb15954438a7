"""Another package adds an algorithm: the example in tests/plugin_example, installed, is one like ours in every command;
a broken one costs a warning and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent / "plugin_example"

# One process for all commands: what is tested is the registry, not how often torch can be imported.
SCRIPT = """
import contextlib, io, json, sys
from pathlib import Path
from rl_training.cli import main

def call(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(list(words))
    return {"status": status, "out": out.getvalue()}

results = {"list": call("list", "--json"), "modules": sorted(m for m in sys.modules if m.startswith("rl_training_b"))}
results["wrong"] = call("train", "--algo", "boltzman_dqn", "--env", "CartPole-v1", "-n", "300")
results["train"] = call(
    "train", "--algo", "boltzmann_dqn", "--env", "CartPole-v1", "-n", "300", "--no-progress", "--json",
    "--set", "temperature=0.5", "--set", "learning_starts=50", "--set", "hidden_sizes=[16]", "--set", "eval_episodes=2",
)
run = json.loads(results["train"]["out"])["run_dir"]
results["resume"] = call("resume", "--run", run, "-n", "400", "--no-progress", "--json")
results["predict"] = call("predict", "--checkpoint", run, "--obs", "[0, 0, 0, 0]", "--json")
import rl_training
results["class"] = rl_training.BoltzmannDQN.algo
results["temperature"] = rl_training.load(run).algorithm.hp.temperature
results["from"] = rl_training.load(run).algorithm.__class__.__module__
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("hatchling")
    place, work = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("work")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "--directory", str(work)]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    broken = place / "broken_plugin-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    points = ("gone = broken_plugin:ENTRY", "dqn = rl_training_boltzmann:ENTRY", "odd = builtins:dict")
    (broken / "entry_points.txt").write_text("[rl_training.algorithms]\n" + "\n".join(points) + "\n")
    paths = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=work, env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**results, "stderr": done.stderr}


@pytest.mark.slow
def test_it_is_listed_without_being_imported(installed: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in json.loads(installed["list"]["out"])["algorithms"]}
    assert rows["boltzmann_dqn"]["family"] == "value-based"
    assert rows["boltzmann_dqn"]["summary"].startswith("DQN that explores by sampling")
    assert installed["modules"] == ["rl_training_boltzmann"]  # not its module with torch in it
    assert installed["wrong"]["status"] == 2
    assert "Did you mean 'boltzmann_dqn'?" in installed["stderr"]


@pytest.mark.slow
def test_it_trains_resumes_and_loads(installed: dict[str, Any]) -> None:
    assert installed["train"]["status"] == installed["resume"]["status"] == installed["predict"]["status"] == 0
    summary = json.loads(installed["resume"]["out"])
    assert summary["algo"] == "boltzmann_dqn"
    assert summary["env_steps"] == 400
    assert json.loads(installed["predict"]["out"])["action"] in (0, 1)
    assert installed["class"] == "boltzmann_dqn"
    assert installed["temperature"] == 0.5
    assert installed["from"] == "rl_training_boltzmann.algorithm"


@pytest.mark.slow
def test_broken_plug_ins_are_a_sentence_each(installed: dict[str, Any]) -> None:
    warnings = [line for line in installed["stderr"].splitlines() if "plug-in" in line]
    assert len(warnings) == 3
    assert all(line.startswith("warning: the plug-in ") for line in warnings)
    text = "\n".join(warnings)
    assert "gone (broken_plugin:ENTRY) was not loaded: ModuleNotFoundError: No module named 'broken_plugin'" in text
    needed = "the entry point must be, or return, a registry Entry named 'dqn'"
    assert f"dqn (rl_training_boltzmann:ENTRY) was not loaded: {needed}" in text
    assert "odd (builtins:dict) was not loaded" in text
    assert "Traceback" not in installed["stderr"]
