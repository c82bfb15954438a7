"""Exact resume: a run that was cut three times, each time continued in a fresh process, equals one that never stopped.

Equal means: SHA-256 over every tensor of the final checkpoint (learner, replay, environments), its counters, and the
metric log without wall times.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from driver import command
from helpers import ALGORITHMS, SHORT_EVALUATION, config_for

from rl_training import registry

FULL = ("dqn", "ppo", "sac")  # every other algorithm is one more cell
CUTS = (32, 52, 80)  # before and after learning starts, none of them a multiple of every interval
TOTAL = 96
LONGER = {"evolution": 2}  # times as long: two generations take that


def _cells() -> dict[str, dict[str, Any]]:
    cells = {}
    for name in ALGORITHMS:
        full = name in FULL
        for envs in (1, 4) if full else (4,):
            for vectorization in ("sync", "async") if full else ("sync",):
                changes: dict[str, Any] = {"num_envs": envs, "vectorization": vectorization, "eval_interval": 40}
                if name == "sac":  # updates in blocks: a cut can fall between two of them
                    changes["algo_kwargs"] = {"train_freq": 3, "gradient_steps": 2}
                if name == "ppo" and envs == 4:
                    changes["algo_kwargs"] = {
                        "n_steps": 4, "normalize_observations": True, "normalize_rewards": True,
                        "learning_rate": {"kind": "linear", "start": 1e-3},
                    }  # fmt: skip
                elif registry.entry(name).loop == "on_policy" and envs == 4:  # rollouts that end where the cuts are
                    fields = registry.entry(name).load().Hyper.model_fields
                    normalise = {"normalize_observations": True} if "normalize_observations" in fields else {}
                    changes["algo_kwargs"] = {"n_steps": 4, **normalise}
                elif registry.entry(name).loop == "evolution":  # one direction: several generations, rows that wait
                    changes["algo_kwargs"] = {"n_delta": 1}
                cells[f"{name}-{envs}-{vectorization}"] = {"name": name, **changes}
    return cells


CELLS = _cells()


def length(key: str, steps: int) -> int:
    return steps * LONGER.get(registry.entry(CELLS[key]["name"]).loop, 1)


def launch(jobs: list[dict[str, Any]]) -> subprocess.Popen[str]:
    start = command("jobs", json.dumps(jobs))
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    return subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def results(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return [json.loads(line.removeprefix("RESULT ")) for line in out.splitlines() if line.startswith("RESULT ")]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every cell that is asked for, uninterrupted and cut three times; all cells share one process per leg."""
    asked = {item.name.partition("[")[2][:-1] for item in request.session.items if item.path == request.path}
    cells = [key for key in CELLS if key in asked] or list(CELLS)
    root = tmp_path_factory.mktemp("resume")

    def job(key: str, side: str) -> dict[str, Any]:
        cell = {"total_timesteps": length(key, TOTAL), "log_interval": 20, **SHORT_EVALUATION, **CELLS[key]}
        name = cell.pop("name")
        if "target_update_interval" in registry.entry(name).load().Hyper.model_fields:
            cell["algo_kwargs"] = {**cell.get("algo_kwargs", {}), "target_update_interval": 6}
        return {"config": config_for(name, root / side / key, **cell).to_dict()}

    whole = launch([job(key, "whole") for key in cells])
    # The odd cells are cut by SIGTERM, the others by a callback.
    ways = {key: "term_at" if i % 2 else "stop_at" for i, key in enumerate(CELLS)}
    legs = [results(launch([{**job(key, "cut"), ways[key]: length(key, CUTS[0])} for key in cells]))]
    for cut in (*CUTS[1:], None):
        ends = [{} if cut is None else {ways[key]: length(key, cut)} for key in cells]
        legs.append(results(launch([{"resume": old["run_dir"], **end} for old, end in zip(legs[-1], ends)])))
    return {
        key: {"whole": result, "legs": [leg[i] for leg in legs], "way": ways[key]}
        for i, (key, result) in enumerate(zip(cells, results(whole)))
    }


@pytest.mark.slow
@pytest.mark.parametrize("key", CELLS)
def test_a_run_resumed_three_times_equals_an_uninterrupted_one(outcomes: dict[str, dict[str, Any]], key: str) -> None:
    whole, legs = outcomes[key]["whole"], outcomes[key]["legs"]
    interrupted = "interrupted" if outcomes[key]["way"] == "term_at" else "stopped"
    assert [leg["status"] for leg in legs] == [interrupted] * 3 + ["completed"]
    assert all(leg["env_steps"] >= length(key, cut) for leg, cut in zip(legs, CUTS))
    assert [leg["env_restored"] for leg in legs] == [None, "exact", "exact", "exact"]
    assert whole["status"] == "completed"
    assert legs[-1]["env_steps"] == whole["env_steps"] == length(key, TOTAL)
    assert legs[-1]["digest"] == whole["digest"]


@pytest.mark.slow
def test_some_interruptions_were_inside_an_episode(outcomes: dict[str, dict[str, Any]]) -> None:
    lengths = [length for o in outcomes.values() for leg in o["legs"][:3] for length in leg["episode_lengths"]]
    assert sum(n > 0 for n in lengths) > len(lengths) / 2


@pytest.mark.slow
def test_different_seeds_have_different_digests(tmp_path: Path) -> None:
    """The digest sees what it should: otherwise every comparison above would pass."""
    jobs = [{"config": config_for("dqn", tmp_path, seed=seed).to_dict()} for seed in (0, 1, 0)]
    first, second, again = results(launch(jobs))
    assert first["digest"] == again["digest"]
    assert all(first["digest"][part] != second["digest"][part] for part in first["digest"])


@pytest.mark.slow
def test_compiled_run_resumes_exactly(tmp_path: Path) -> None:
    def job(side: str) -> dict[str, Any]:
        return {"config": config_for("dqn", tmp_path / side, execution="compile").to_dict()}

    whole, cut = results(launch([job("whole"), {**job("cut"), "term_at": 75}]))
    assert (cut["status"], cut["env_steps"]) == ("interrupted", 75)
    resumed = results(launch([{"resume": cut["run_dir"]}]))[0]
    assert resumed["status"] == "completed"
    assert resumed["digest"] == whole["digest"]
