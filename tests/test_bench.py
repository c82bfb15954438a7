"""`bench`: suites are checked before anything starts; studies are continued exactly and judged by their bar."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import run_digest

from rl_training.cli import main
from rl_training.data import storage
from rl_training.errors import UserError
from rl_training.experiment.run.checkpoint import latest_valid
from rl_training.experiment.studies import bench as bench_module
from rl_training.experiment.studies import pool
from rl_training.experiment.studies.bench import Bench, Needs, Task, _Room, needs_of, progress_of, stale
from rl_training.experiment.studies.pool import Job
from rl_training.experiment.studies.suite import Study, load_suite, suite_names
from rl_training.experiment.studies.trials import run_dirs
from rl_training.registry import presets, resolve
from rl_training.reports import suites as page

SMALL = {"execution": "eager", "device": "cpu", "log_interval": 40, "checkpoint_interval": 200}
DQN = {"hidden_sizes": [8], "learning_starts": 20, "batch_size": 8, "buffer_size": 2000, "train_freq": 1}


def write_suite(path: Path, *rows: dict[str, Any], **more: Any) -> Path:
    defaults = {"total_timesteps": 400, "seeds": [0, 1], "eval_episodes": 1, "settings": SMALL}
    path.write_text(yaml.safe_dump({"title": "Small", "defaults": defaults, "studies": list(rows), **more}))
    return path


def dqn(**changes: Any) -> dict[str, Any]:
    return {"algo": "dqn", "env_id": "CartPole-v1", "settings": {"algo_kwargs": DQN}, **changes}


def write_small(folder: Path) -> Path:
    rows = (
        dqn(bar={"mean": 5, "std": 1, "source": "nobody"}),
        dqn(variant="missed", bar={"mean": 5000, "std": 1, "source": "nobody"}),
    )
    return write_suite(folder / "small.yaml", *rows)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_small(tmp_path)


RUN_SMALL = ["bench", "small.yaml", "-j", "2", "--results", "results/small", "--json"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a bench that has trained both studies of the small suite, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    write_small(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.chdir(folder)
        assert main(RUN_SMALL) == 0
    return folder, shown.getvalue()


# --- suites -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", suite_names())
def test_packaged_suites_are_valid(name: str) -> None:
    suite = load_suite(name)
    assert suite.title
    for study in suite.studies:
        config = study.config()
        assert study.preset is None or study.preset in presets(study.algo)
        assert config.total_timesteps == study.total_timesteps
        assert config.eval_interval > 0
        if name in page.PUBLISHED:
            assert len(study.seeds) >= 3
            assert config.eval_interval == study.total_timesteps // 50


def test_every_published_suite_has_a_section_on_the_page() -> None:
    assert set(page.PUBLISHED) == set(suite_names()) - {"regress"}


def test_a_bar_is_reached_within_one_published_deviation() -> None:
    study = Study(**dqn(total_timesteps=1, bar={"mean": 100, "std": 10, "source": "x"}))
    assert [study.passes(score) for score in (89.9, 90.0, 120.0)] == [False, True, True]
    assert study.passes(120.0, completed=False) is False
    shown = Study(**dqn(total_timesteps=1, bar={"mean": 100, "source": "x", "judged": False}))
    assert shown.passes(0.0) is None


def test_normalised_scores_are_on_the_scale_of_d4rl() -> None:
    study = Study(algo="bc", env_id="Hopper-v5", total_timesteps=1, score="normalized")
    assert study.score_of(3234.3) == pytest.approx(100.0)
    assert study.score_of(-20.27) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (dqn(algo="dnq"), "unknown algorithm 'dnq'. Did you mean 'dqn'?"),
        (dqn(preset="dqn/cartpool"), "no packaged preset 'dqn/cartpool'"),
        (dqn(preset="ppo/cartpole"), "the preset ppo/cartpole is for ppo"),
        (dqn(env_id="os:MyTask-v0"), "a module that only a file names is not imported"),
        (dqn(settings={"algo_kwargs": {"gama": 0.9}}), "gama"),
        (dqn(stepz=3), "unknown key 'stepz'"),
        (dqn(score="normalized"), "normalised scores are known only for"),
        (dqn(env_id="NoSuchTask-v5"), "NoSuchTask-v5"),
        ({"algo": "dqn"}, "env_id is missing"),
    ],
)
def test_mistakes_in_a_suite_are_one_sentence_before_anything_starts(
    row: dict[str, Any], words: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = dqn(variant="good")
    assert main(["bench", str(write_suite(tmp_path / "bad.yaml", good, row))]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert words in error[-1]
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_missing_extra_and_a_missing_study_are_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    monkeypatch.setitem(sys.modules, "gymnasium.envs.box2d.lunar_lander", None)
    path = write_suite(tmp_path / "lander.yaml", dqn(env_id="LunarLander-v3"))
    assert main(["bench", str(path)]) == 2
    assert "pip install 'rl-training[box2d]'" in capsys.readouterr().err
    assert main(["bench", "classic", "--only", "dqn__CartPool*"]) == 2
    assert "no study of classic matches" in capsys.readouterr().err
    assert main(["bench", "clasic"]) == 2
    assert "Did you mean 'classic'?" in capsys.readouterr().err
    assert main(["bench"]) == 2


def test_too_little_memory_is_said_before_anything_starts(
    small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "available_memory", lambda device: 10_000_000)
    assert main(["bench", str(small)]) == 2
    assert "GB of memory, and this machine has 0.0 GB free" in capsys.readouterr().err
    assert not list(Path().rglob("metrics.jsonl"))
    monkeypatch.setattr(storage, "available_memory", lambda device: 1000)
    assert main(["bench", str(small), "-o", "other"]) == 2
    assert "dqn__CartPole-v1: storage for" in capsys.readouterr().err


# --- filling the machine ----------------------------------------------------------------------------------------------


def test_studies_run_side_by_side_while_memory_and_cores_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "available_memory", lambda device: 10_000_000_000)
    monkeypatch.setattr(bench_module, "usable_cpus", lambda: 4)
    study = Study(**dqn(total_timesteps=400, settings=SMALL))
    tasks = [
        Task(study.model_copy(update={"variant": name}), study.config(), tmp_path / name, tmp_path / name, needs)
        for name, needs in {
            "a": Needs(4_000_000_000, 0, 0, 1), "b": Needs(4_000_000_000, 0, 0, 1), "c": Needs(2_000_000_000, 0, 0, 1),
            "d": Needs(1, 0, 0, 4),
        }.items()
    ]  # fmt: skip
    a, b, c, d = (Job(task.study.name, task.directory, ()) for task in tasks)
    room = _Room(tasks, None)
    assert room.jobs == 4
    assert room.fits(b, [a])
    assert not room.fits(c, [a, b])  # 10 of 10 GB, of which 9 may be used
    assert not room.fits(d, [a])  # five cores of four
    assert _Room(tasks, 2).fits(d, [a])  # --workers counts studies, not cores


def test_planning_an_offline_study_makes_no_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_training.experiment.run import datasets

    monkeypatch.setattr(datasets.DatasetFactory, "_trained", lambda *_: pytest.fail("an agent was trained"))
    config = load_suite("offline-mujoco").chosen(["bc__Hopper-v5__medium"])[0].config({"device": "cpu"})
    rows = 1_000_000 * 4 * (11 + 3)  # observations and actions alone
    assert needs_of(config).ram > rows


def test_studies_that_start_together_train_the_agent_of_their_dataset_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_training.experiment.run.datasets import DatasetFactory
    from rl_training.experiment.run.trainer import Trainer

    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path))
    trained = []

    def train(config: Any) -> Any:
        time.sleep(0.2)
        trained.append(config.algo)
        return Trainer(config, progress=False).run()

    fields = {"algo": "dqn", "env_id": "CartPole-v1", "total_timesteps": 40, "algo_kwargs": DQN, "eval_episodes": 1}
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: DatasetFactory(train)._trained(fields), range(3)))
    assert trained == ["dqn"]
    assert len(set(found)) == 1


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_curves_and_verdicts(trained: tuple[Path, str], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, shown = trained
    monkeypatch.chdir(folder)
    table = json.loads(shown)
    assert (table["done"], table["failed"], table["missed"]) == (2, 0, ["dqn__CartPole-v1__missed"])
    row = json.loads(Path("results/small/dqn__CartPole-v1.json").read_text())
    assert len(row["curve"]["step"]) == 50
    assert {len(one) for one in row["curve"]["per_seed"].values()} == {50}
    assert (row["passed"], row["completed"], row["seeds"]) == (True, True, [0, 1])
    assert row["command"] == "rl-training bench small --only dqn__CartPole-v1"
    assert row["published"] == {"mean": 5.0, "std": 1.0, "source": "nobody", "judged": True}
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*.json*")}
    assert main([*RUN_SMALL, "--strict"]) == 1  # nothing is trained again, but a bar is missed
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main(["bench", "small.yaml", "--list"]) == 0
    assert "MISSED (bar 4,999.0)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_bench_continues_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_suite(tmp_path / "small.yaml", dqn(total_timesteps=600), dqn(variant="b", total_timesteps=600))
    suite = load_suite(str(path))
    Bench(suite, tmp_path / "calm", tmp_path / "r1").run(2)
    argv = [sys.executable, "-m", "rl_training", "bench", str(path), "-j", "2", "-o", "wild", "--results", "r2"]
    process = subprocess.Popen(argv)
    while not list((tmp_path / "wild").glob("*/*/checkpoints/step_*")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = Bench(suite, tmp_path / "wild", tmp_path / "r2").run(2)
    assert again["done"] == 2
    for study in suite.studies:
        (calm,), (wild,) = (run_dirs(tmp_path / place / study.name) for place in ("calm", "wild"))
        assert run_digest(latest_valid(calm)) == run_digest(latest_valid(wild))
        rows = [json.loads((tmp_path / place / f"{study.name}.json").read_text()) for place in ("r1", "r2")]
        assert rows[0]["curve"] == rows[1]["curve"]


class Tasks:
    """In the place of the tasks of a Ray cluster: they run here, one after the other, and the first one is lost."""

    def __init__(self, address: str, workers: int, gpus: float) -> None:
        assert (address, workers, gpus) == ("10.0.0.1:6379", 2, 0.5)
        self.jobs: list[dict[str, Any]] = []
        self.lost = False

    def send(self, job: dict[str, Any]) -> None:
        self.jobs.append(job)

    def ended(self, timeout: float | None) -> tuple[str, int | None] | None:
        if timeout is not None:
            time.sleep(timeout)
            return None
        job = self.jobs.pop()
        if not self.lost:
            self.lost = True
            return job["id"], None
        resolve(job["target"])(*job["arguments"])
        return job["id"], 0

    def stop(self, grace: float) -> None:
        assert grace == bench_module.GRACE


@pytest.mark.slow
def test_on_a_cluster_studies_are_tasks_and_a_lost_one_is_started_again(
    small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ClusterWorkers", Tasks)
    command = ["bench", str(small), "--results", "r", "--json", "--cluster", "10.0.0.1:6379", "--gpus-per-trial", "0.5"]
    assert main([*command, "--minutes", "0.01"]) == 0  # no task ends in time
    assert json.loads(capsys.readouterr().out)["done"] == 0
    assert main(command) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["done"], table["failed"], table["missed"]) == (2, 0, ["dqn__CartPole-v1__missed"])


@pytest.mark.slow
def test_minutes_stop_the_bench_with_everything_saved(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_suite(tmp_path / "long.yaml", dqn(total_timesteps=200_000))
    row: dict[str, Any] = {"env_steps": 0}
    while not row["env_steps"]:  # a busy machine may need more than one turn to get anywhere
        assert main(["bench", str(path), "--minutes", "0.1", "--results", "r", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["studies"]
    assert row["status"] == "started"
    (run,) = run_dirs(tmp_path / "runs" / "bench" / "long" / row["name"])
    progress = progress_of(run)
    assert progress is not None
    assert latest_valid(run) is not None
    assert 0 < progress.step < 200_000
    assert progress.eta(200_000) > 0


def test_progress_counts_the_first_line_of_a_log_and_leaves_out_damaged_ones(tmp_path: Path) -> None:
    assert progress_of(tmp_path) is None
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 100, "time": 1.0, "time/fps": 50.0, "eval/mean_reward": 7.0}\n')
    assert progress_of(tmp_path) == (100, 50.0, 7.0)
    log.write_text(log.read_text() + '{"time/fps": 1.0}\n[]\n{"step": 200, "time": 2.0}\n{"step": 30')
    assert progress_of(tmp_path) == (200, 50.0, 7.0)


@pytest.mark.slow
def test_another_study_in_the_directory_is_refused_and_changed_settings_make_a_result_stale(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = trained
    suite = load_suite(str(folder / "small.yaml"))
    study = suite.studies[0]
    row = json.loads((folder / "results/small/dqn__CartPole-v1.json").read_text())
    assert not stale(row, study.config())
    other = study.config({"algo_kwargs": {"gamma": 0.5}})
    assert stale(row, other)
    assert not stale(row, study.config({"device": "cuda", "execution": "auto"}))
    directory, changes = folder / "runs/bench/small", {"algo_kwargs": {"gamma": 0.5}}
    assert Bench(suite, directory, tmp_path, studies=[study]).table()["done"] == 1
    changed = Bench(suite, directory, tmp_path, studies=[study], changes=lambda _: changes)
    assert changed.table()["new"] == 1
    with pytest.raises(UserError, match=r"contains another study \(its study has algo_kwargs.gamma"):
        changed.run(1)


@pytest.mark.slow
def test_settings_on_the_command_line_do_not_write_results_of_the_suite(small: Path, capsys: Any) -> None:
    argv = ["bench", str(small), "--only", "missed", "--set", "total_timesteps=100", "--set", "gamma=0.9", "--json"]
    assert main(argv) == 0
    (row,) = json.loads(capsys.readouterr().out)["studies"]
    assert row["total_timesteps"] == 100
    assert not Path("results").exists()
    assert Path(row["result"]).is_file()


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_shows_misses_with_their_reason_and_what_was_not_run(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = trained
    suite = load_suite(str(folder / "small.yaml"))
    (tmp_path / "results" / "small").mkdir(parents=True)
    shutil.copy(folder / "results/small/dqn__CartPole-v1__missed.json", tmp_path / "results" / "small")
    section = page.section(suite, tmp_path / "results", "curves")
    assert "| `dqn` | CartPole-v1 (missed) |" in section
    assert "| 5,000 ± 1.0 | **no** | 400 | 2 |" in section
    assert "The reason has not been found yet." in section
    assert "- `dqn`: CartPole-v1 (5.0)" in section
    known = suite.model_copy(update={"studies": (suite.studies[1].model_copy(update={"reason": "Too hard."}),)})
    assert "Too hard." in page.section(known, tmp_path / "results", "curves")
    found = page.measured(suite, tmp_path / "results")["dqn__CartPole-v1__missed"]
    picture = page.picture(suite.studies[1], found)
    assert "published 5,000" in picture
    assert picture.count('class="dot"') == 2 * 25  # fewer than five seeds: the points of each
    assert 'class="band" points' not in picture
