"""The example scripts run as they stand, with a small budget, and leave a run that can be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_training import load

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {  # enough steps that learning has begun
    "dqn_cartpole_reference.py": ["--total-timesteps", "1400"],
    "ppo_cartpole_reference.py": ["--total-timesteps", "512"],
    "sac_pendulum_reference.py": ["--total-timesteps", "130"],
    "c51_cartpole_reference.py": ["--total-timesteps", "1290"],
    "qr_dqn_cartpole_reference.py": ["--total-timesteps", "1290"],
    "iqn_cartpole_reference.py": ["--total-timesteps", "1290"],
    "fqf_cartpole_reference.py": ["--total-timesteps", "1290"],
    "naf_pendulum_reference.py": ["--total-timesteps", "530"],
    "mbpo_pendulum_reference.py": ["--total-timesteps", "405"],
    "mopo_pendulum_reference.py": ["--total-timesteps", "20"],
    "d4pg_pendulum_reference.py": ["--total-timesteps", "530"],
    "td3_pendulum_reference.py": ["--total-timesteps", "10030"],
    "tqc_pendulum_reference.py": ["--total-timesteps", "130"],
    "iql_pendulum_reference.py": ["--total-timesteps", "50"],
    "cql_pendulum_reference.py": ["--total-timesteps", "20"],
    "rlpd_pendulum_reference.py": ["--total-timesteps", "110"],
    "gail_cartpole_reference.py": ["--total-timesteps", "1024", "--expert-timesteps", "256"],
    "dagger_cartpole_reference.py": ["--total-timesteps", "60", "--expert-timesteps", "256"],
    "evolution_cartpole_reference.py": ["--total-timesteps", "2000"],
    "dreamer_atari_reference.py": ["--total-timesteps", "20", "--size", "tiny", "--games", "1", "--max-frames", "200"],
    "custom_env.py": ["--total-timesteps", "1200"],
}


def run_example(script: str, *arguments: str, cwd: Path) -> str:
    """Its standard output."""
    command = [sys.executable, str(EXAMPLES / script), *ARGUMENTS[script], *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.parametrize("script", [n for n in ARGUMENTS if n.endswith("_reference.py") and "atari" not in n])
def test_reference_example(tmp_path: Path, script: str) -> None:
    out = run_example(script, cwd=tmp_path)
    run = next((tmp_path / "runs").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["gradient_steps"] > 0
    assert summary["final_eval"]["episodes"] == 20
    assert f"mean return over 20 episodes: {summary['final_eval']['mean_return']:.1f}" in out
    agent = load(run)
    shape = agent.algorithm.spec.observation.shape
    assert agent.predict([[0.0] * shape[0]] * 3).shape[0] == 3


def test_atari_example(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    out = run_example("dreamer_atari_reference.py", cwd=tmp_path)
    summary = json.loads((next((tmp_path / "runs").iterdir()) / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert f"mean score of 1 games: {summary['final_eval']['mean_return']:.1f}" in out
    assert "from a black screen: 0.00" in out  # nothing learned yet: the critic starts at zero


def test_reference_example_as_a_study(tmp_path: Path) -> None:
    out = run_example("ppo_cartpole_reference.py", "--seeds", "3,5", cwd=tmp_path)
    run = next((tmp_path / "runs").iterdir())
    assert json.loads((run / "summary.json").read_text())["seeds"] == [3, 5]
    assert "over 40 episodes" in out


def test_custom_environment_and_callback(tmp_path: Path) -> None:
    out = run_example("custom_env.py", cwd=tmp_path)
    assert "step 1000: mean return" in out  # the callback was called at the evaluation
    run = next((tmp_path / "runs").iterdir())
    assert run.name.startswith("dqn__Corridor-v0__seed0__")
    assert "actions along the corridor: [" in out
