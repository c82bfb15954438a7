"""The campaign of attacks at a small size: no bad outcome. docs/reliability.md has the table of the full size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_training import registry

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_small_campaign_has_no_bad_outcome(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "campaign.py"), "--size", "0.002", "--json", str(results)]
    command += ["--attacks", "corrupt,fuzz,datasets,faults,disk,train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    found = json.loads(results.read_text())
    assert {name: row["examples"] for name, row in found.items() if row["bad"]} == {}
    assert done.returncode == 0, done.stderr
    assert found["corrupt"]["tried"] == 40
    again = subprocess.run([*command, "--table"], capture_output=True, text=True)
    assert again.stdout.count("\n| ") == len(found)  # one row for each attack, below the head


def test_kills_reach_every_loop_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from attacks import runs

    configs = [runs.config(scenario, tmp_path, seed=0) for scenario in runs.SCENARIOS.values()]
    modes = {(registry.entry(config.algo).loop, config.execution) for config in configs}
    loops = {entry.loop for entry in registry.entries().values()}
    assert {(loop, mode) for loop in loops for mode in ("eager", "recorded", "compile")} <= modes
    assert {"auto", "threads", "async", "vector", "device"} <= {config.vectorization for config in configs}
    assert {config.algo for config in configs if config.seeds} >= {"dqn", "ppo", "td3_bc"}
    assert any(config.cluster for config in configs)


def test_parts_of_a_campaign_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import campaign
    from attacks.base import Attack

    attack = Attack("x", "an attack", 10, 7, lambda chance, case, folder: (f"kind {case % 2}", 1, None), batch=2)
    files = [tmp_path / f"{k}.json" for k in (1, 2, 3)]
    for part, path in enumerate(files, start=1):
        campaign.run(attack, 1.0, path, part, 3)
    campaign.merge(files, tmp_path / "all.json")
    row = campaign.read(tmp_path / "all.json")["x"]
    assert (row["tried"], row["bad"], row["next"]) == (7, 0, 7)
    assert row["kinds"] == {"kind 0": 4, "kind 1": 3}
