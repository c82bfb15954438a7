"""Sweeps: nothing is lost and nothing done twice, whoever is killed; failures stay where they belong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import config_for, run_digest
from sweep_worker import configs

from rl_training.cli import main
from rl_training.cli.sweep import grid, split_values
from rl_training.errors import UserError
from rl_training.experiment.run.atomic import exclusive_directory
from rl_training.experiment.run.checkpoint import latest_valid
from rl_training.experiment.studies.pool import Event
from rl_training.experiment.studies.sweep import Sweep
from rl_training.experiment.studies.trials import run_dirs, trial_state

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


def digests(sweep: Sweep) -> dict[str, dict[str, str]]:
    """Of the final checkpoint and the metric log of each trial; each must have exactly one run."""
    out = {}
    for trial in sweep.trials:
        (run,) = run_dirs(trial.directory)
        out[trial.name] = run_digest(latest_valid(run))
    return out


@pytest.mark.slow
def test_24_trials_with_random_kills_equal_an_undisturbed_sweep(tmp_path: Path) -> None:
    calm = Sweep(tmp_path / "calm", configs(tmp_path))
    assert calm.run(workers=2)["done"] == 24

    place = tmp_path / "shot"
    process = subprocess.Popen([sys.executable, str(TESTS / "sweep_worker.py"), str(place)])
    while process.poll() is None and sum(_over(place)) < 6:
        time.sleep(0.02)
    process.kill()  # the sweep itself, while its workers train
    process.wait()
    wild = Sweep(place, configs(tmp_path))
    table = wild.run(workers=2, target="sweep_worker:shot")

    assert (table["done"], table["failed"]) == (24, 0), table
    attempts = sum(len(list((trial.directory / "attempts").iterdir())) for trial in wild.trials)
    assert attempts > 24, "nobody was shot"
    assert digests(wild) == digests(calm)
    assert not list(place.rglob("*.tmp-*"))
    rows = json.loads((place / "results.json").read_text())["trials"]
    assert [row["mean_return"] for row in rows] == [row["mean_return"] for row in calm.results()["trials"]]


def _over(place: Path) -> list[bool]:
    return [trial_state(path).over for path in place.glob("trials/*")]


@pytest.mark.slow
def test_failures_are_recorded_and_do_not_stop_other_trials(tmp_path: Path) -> None:
    """A worker that always dies, a setting that cannot work, and a sound trial beside them."""
    batches = {"algo_kwargs": {"batch_size": 15}}
    trials = [config_for("dqn", tmp_path), config_for("ppo", tmp_path, **batches), config_for("ppo", tmp_path, seed=3)]
    sweep, events = Sweep(tmp_path / "s", trials), list[Event]()
    table = sweep.run(workers=2, retries=2, target="sweep_worker:doomed", on_event=events.append)
    dead, wrong, sound = table["trials"]
    assert [row["status"] for row in (dead, wrong, sound)] == ["failed", "failed", "done"]
    assert (sweep.trials[0].directory / "attempts").read_text() == "xxx"
    assert "3 times" in dead["error"]
    assert "batch_size = 15 must divide" in wrong["error"]
    assert sum(event.kind == "restart" for event in events) == 2

    # Continued: what failed stays failed, what is done is not done again, unless it is asked for.
    before = digests_of(sweep, 2)
    assert sweep.run(workers=1)["failed"] == 2
    table = sweep.run(workers=2, retry_failed=True)
    assert [row["status"] for row in table["trials"]] == ["done", "failed", "done"]
    assert digests_of(sweep, 2) == before


def digests_of(sweep: Sweep, index: int) -> Any:
    (run,) = run_dirs(sweep.trials[index].directory)
    return run.name, run_digest(latest_valid(run))


@pytest.mark.slow
def test_interrupted_sweep_saves_and_can_be_continued(tmp_path: Path) -> None:
    long = config_for("dqn", tmp_path, total_timesteps=100_000, checkpoint_interval=100_000)
    sweep = Sweep(tmp_path / "s", [long])

    def interrupt(event: Event) -> None:
        while not run_dirs(event.job.directory):  # it trains, or is about to
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(on_event=interrupt)
    state = trial_state(sweep.trials[0].directory)
    assert state.status == "started"
    with pytest.raises(UserError, match=r"another sweep.*total_timesteps = 100000, this one 99"):
        Sweep(tmp_path / "s", [long.model_copy(update={"total_timesteps": 99})]).run()


# --- what needs no worker -------------------------------------------------------------------------------------


def test_directory_is_locked_and_must_contain_the_same_sweep(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "s", [config_for("dqn", tmp_path)])
    with exclusive_directory(sweep.directory, "the sweep"):
        with pytest.raises(UserError, match="another process"):
            sweep.run()
        sweep._open()
    with pytest.raises(UserError, match=r"gamma = None, this one 0.5"):
        Sweep(tmp_path / "s", [config_for("dqn", tmp_path, algo_kwargs={"gamma": 0.5})]).run()
    with pytest.raises(UserError, match="it has 1 trial instead of 2"):
        Sweep(tmp_path / "s", [config_for("dqn", tmp_path), config_for("dqn", tmp_path, seed=1)]).run()
    (tmp_path / "s" / "sweep.json").write_text("[]")
    with pytest.raises(UserError, match=r"sweep\.json cannot be read"):
        sweep.run()
    with pytest.raises(UserError, match="not empty"):
        Sweep(tmp_path, [config_for("dqn", tmp_path)]).run()
    with pytest.raises(UserError, match=r"trial_0000 and trial_0001 .* same"):
        Sweep(tmp_path, [config_for("dqn", tmp_path)] * 2)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1e-3,3e-4", ["1e-3", "3e-4"]),
        ("[64,64],[32]", ["[64,64]", "[32]"]),
        ("'a,b',\"c,d\",e", ["'a,b'", '"c,d"', "e"]),
        ("{kind: linear, start: 1},0.1", ["{kind: linear, start: 1}", "0.1"]),
        ("", [""]),
    ],
)
def test_values_are_split_at_the_outer_commas(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_grid_is_every_combination_in_order() -> None:
    made, said = grid(
        ["dqn/cartpole", "ppo/cartpole"], None, ["CartPole-v1", "Acrobot-v1"], "3-4", False,
        ["learning_rate=1e-3,1e-2", "hidden_sizes=[8,8]"], {"total_timesteps": 50},
    )  # fmt: skip
    assert len(made) == 16
    assert [(c.algo, c.env_id, c.seed, c.algo_kwargs["learning_rate"]) for c in made[:5]] == [
        ("dqn", "CartPole-v1", 3, 0.001), ("dqn", "CartPole-v1", 4, 0.001), ("dqn", "CartPole-v1", 3, 0.01),
        ("dqn", "CartPole-v1", 4, 0.01), ("dqn", "Acrobot-v1", 3, 0.001),
    ]  # fmt: skip
    assert said[:3] == [{"learning_rate": "1e-3"}, {"learning_rate": "1e-3"}, {"learning_rate": "1e-2"}]
    assert all(c.algo_kwargs["hidden_sizes"] == [8, 8] and c.total_timesteps == 50 for c in made)
    studies, _ = grid(["dqn/cartpole"], None, None, "0-3", True, None, {})
    assert [c.all_seeds for c in studies] == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--config"]),
        (["--config", "dqn/cartpole", "--algo", "ppo"], ["--config", "--algo"]),
        (["--config", "dqn/cartpol"], ["dqn/cartpole"]),
        (["--config", "dqn/cartpole", "--set", "gama=1,2"], ["gama", "'gamma'"]),
        (["--config", "dqn/cartpole", "--set", "gamma=0.9,2"], ["gamma = 2"]),
        (["--config", "dqn/cartpole", "--set", "gamma=0.9,,0.8"], ["empty value"]),
        (["--config", "dqn/cartpole", "--set", "gamma=0.9,0.9"], ["trial_0000 and trial_0001"]),
        (["--config", "dqn/cartpole", "--set", "seed=1,2"], ["--seeds"]),
        (["--config", "dqn/cartpole", "--seeds", "0,0"], ["trial_0000 and trial_0001"]),
        (["--config", "dqn/cartpole", "--seeds", "0-4000", "--set", "gamma=0.1,0.2,0.3"], ["12,003"]),
        (["--config", "dqn/cartpole", "--workers", "0"], ["--workers"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    argv: list[str], words: list[str], capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err
    assert list(tmp_path.iterdir()) == []


def test_command_line_prints_one_json_table_and_continues(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """One JSON object, plain lines beside it; the default directory comes from the grid; again means go on."""
    monkeypatch.chdir(tmp_path)
    argv = [
        "sweep", "--algo", "ppo", "--env", "CartPole-v1", "--env", "Pendulum-v1", "-n", "64", "--execution", "eager",
        "-s", "n_steps=8", "-s", "batch_size=64", "-s", "n_epochs=1", "-s", "eval_episodes=1", "-s", "hidden_sizes=[8]",
        "--json",
    ]  # fmt: skip
    assert main(argv) == 0
    out, err = capsys.readouterr()
    table = json.loads(out)
    assert [(row["env_id"], row["status"], row["env_steps"]) for row in table["trials"]] == [
        ("CartPole-v1", "done", 64), ("Pendulum-v1", "done", 64),
    ]  # fmt: skip
    assert "[2/2] trial_0001  ppo on Pendulum-v1, seed 0: done, mean return" in err
    assert Path(table["directory"]).parent.name == "sweeps"
    assert main(argv) == 0  # nothing is left to do
    assert json.loads(capsys.readouterr().out) == table
