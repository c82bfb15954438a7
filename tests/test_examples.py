"""The example scripts run as they stand, with a small budget, and leave a run that can be loaded.

Each has a process of its own. Most are forked from one that has imported torch already, which is half of what such a
short run costs, and are evaluated twice instead of twenty times; the others are started as a user starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import driver
import pytest

from rl_training import load

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ARGUMENTS = {  # enough steps that learning has begun
    "dqn_cartpole_reference.py": ["--total-timesteps", "1400"],
    "ppo_cartpole_reference.py": ["--total-timesteps", "512"],
    "sac_pendulum_reference.py": ["--total-timesteps", "130"],
    "c51_cartpole_reference.py": ["--total-timesteps", "1290"],
    "qr_dqn_cartpole_reference.py": ["--total-timesteps", "1290"],
    "iqn_cartpole_reference.py": ["--total-timesteps", "1290"],
    "fqf_cartpole_reference.py": ["--total-timesteps", "1290"],
    "naf_pendulum_reference.py": ["--total-timesteps", "530"],
    "mbpo_pendulum_reference.py": ["--total-timesteps", "205"],
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


class Runner:
    """Runs scripts as forked children of a process that has done their imports (driver.py)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            driver.command("scripts"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )  # fmt: skip

    def __call__(self, command: list[str], cwd: Path) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"command": command, "cwd": str(cwd)}) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        assert status == 0, (cwd / "stderr.txt").read_text()[-3000:]
        return (cwd / "stdout.txt").read_text()

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def run_example(script: str, *arguments: str, cwd: Path, runner: Runner | None = None) -> str:
    """Its standard output."""
    command = [str(EXAMPLES / script), *ARGUMENTS[script], *arguments]
    if runner is not None:
        return runner(command, cwd)
    command = [sys.executable, *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("script", [n for n in ARGUMENTS if n.endswith("_reference.py") and "atari" not in n])
def test_reference_example(tmp_path: Path, runner: Runner, script: str) -> None:
    out = run_example(script, cwd=tmp_path, runner=runner)
    run = next((tmp_path / "runs").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["gradient_steps"] > 0
    assert summary["final_eval"]["episodes"] == 20
    assert f"mean return over 20 episodes: {summary['final_eval']['mean_return']:.1f}" in out
    agent = load(run)
    shape = agent.algorithm.spec.observation.shape
    assert agent.predict([[0.0] * shape[0]] * 3).shape[0] == 3


@pytest.mark.slow
def test_atari_example(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    out = run_example("dreamer_atari_reference.py", cwd=tmp_path)
    summary = json.loads((next((tmp_path / "runs").iterdir()) / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert f"mean score of 1 games: {summary['final_eval']['mean_return']:.1f}" in out
    assert "from a black screen: 0.00" in out  # nothing learned yet: the critic starts at zero


@pytest.mark.slow
def test_reference_example_as_a_study(tmp_path: Path) -> None:
    out = run_example("ppo_cartpole_reference.py", "--seeds", "3,5", cwd=tmp_path)
    run = next((tmp_path / "runs").iterdir())
    assert json.loads((run / "summary.json").read_text())["seeds"] == [3, 5]
    assert "over 40 episodes" in out


@pytest.mark.slow
def test_custom_environment_and_callback(tmp_path: Path) -> None:
    out = run_example("custom_env.py", cwd=tmp_path)
    assert "step 1000: mean return" in out  # the callback was called at the evaluation
    run = next((tmp_path / "runs").iterdir())
    assert run.name.startswith("dqn__Corridor-v0__seed0__")
    assert "actions along the corridor: [" in out
