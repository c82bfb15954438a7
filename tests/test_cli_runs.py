"""Commands that use runs (eval, predict, resume, interrupts) and those that do not (list, verify, doctor)."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_cli import PPO, RL_TRAINING, Result, bad

from rl_training import registry
from rl_training.cli import doctor, main
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.tools import verify


@pytest.fixture
def cli(capsys):
    def run(*argv: object) -> Result:
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run with one seed, and a study with two."""
    root = tmp_path_factory.mktemp("runs")
    assert main(["train", *PPO, "-n", "256", "-o", str(root / "one")]) == 0
    assert main(["train", *PPO, "-n", "256", "-o", str(root / "two"), "--seeds", "3-4"]) == 0
    return {name: next((root / name).iterdir()) for name in ("one", "two")}


# --- eval, predict, resume ----------------------------------------------------------------------------------


def test_eval_is_repeatable_and_covers_all_seeds(cli, runs):
    first = json.loads(cli("eval", "--checkpoint", runs["two"], "-n", 3, "--json").out)
    again = json.loads(cli("eval", "--checkpoint", runs["two"], "-n", 3, "--json").out)
    other = json.loads(cli("eval", "--checkpoint", runs["two"], "-n", 3, "--seed", 9, "--json").out)
    assert first == again
    assert first["per_seed"] != other["per_seed"]
    assert [row["seed"] for row in first["per_seed"]] == [3, 4]
    assert first["episodes"] == 6
    sampled = json.loads(cli("eval", "--checkpoint", runs["two"], "-n", 3, "--stochastic", "--json").out)
    assert (first["deterministic"], sampled["deterministic"]) == (True, False)
    assert sampled["per_seed"] != first["per_seed"]
    table = cli("eval", "--checkpoint", runs["two"], "-n", 3)
    assert f"{first['mean_return']:,.1f}" in table.out
    assert "seed 4" in table.out


def test_eval_of_the_best_checkpoint(cli, runs):
    best = json.loads(cli("eval", "--checkpoint", runs["one"] / "best", "-n", 2, "--json").out)
    assert Path(best["checkpoint"]).name.startswith("best_")


def test_env_with_other_spaces_is_rejected(cli, runs):
    bad(cli("eval", "--checkpoint", runs["one"], "--env", "Pendulum-v1"), "--env Pendulum-v1", "CartPole-v1")
    bad(cli("eval", "--checkpoint", runs["one"], "--env", "Nope-v1"), "Nope-v1")
    bad(cli("resume", "--run", runs["one"], "-n", 999, "--env", "Acrobot-v1"), "--env Acrobot-v1")


def test_eval_warns_about_a_damaged_checkpoint(cli, tmp_path):
    assert cli("train", *PPO, "-n", 256, "-o", tmp_path, "-s", "checkpoint_interval=128").status == 0
    run = next(tmp_path.iterdir())
    newest = run / "checkpoints" / "step_000000000256" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    result = cli("eval", "--checkpoint", run, "-n", 1)
    assert result.status == 0
    assert "step_000000000128" in result.out
    assert result.err.startswith("warning: ")
    assert "damaged" in result.err


def test_eval_writes_videos(cli, runs, tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    result = cli("eval", "--checkpoint", runs["two"], "-n", 2, "--video", tmp_path / "v", "--json")
    assert result.status == 0, result.err
    names = sorted(path.name for path in (tmp_path / "v").glob("*.mp4"))
    assert names == [f"seed{seed}-episode-{k}.mp4" for seed in (3, 4) for k in (0, 1)]
    assert json.loads(result.out)["episodes"] == 4


def test_record_needs_an_encoder_and_a_checkpoint(cli, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bad(cli("record", "--checkpoint", runs["one"], "--video", tmp_path / "v"), "pip install 'rl-training[video]'")
    bad(cli("record", "--checkpoint", "nowhere"), "nowhere")


def test_eval_video_needs_an_encoder(cli, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bad(cli("eval", "--checkpoint", runs["one"], "--video", tmp_path / "v"), "pip install 'rl-training[video]'")


def test_predict_prints_the_agents_action(cli, runs, monkeypatch):
    obs = [[0.1, 0.0, -0.2, 0.0], [-1.0, 2.0, 0.1, -3.0]]
    expected = Agent.load(runs["one"], device="cpu").predict(obs).tolist()
    assert json.loads(cli("predict", "--checkpoint", runs["one"], "--obs", json.dumps(obs)).out) == expected
    result = cli("predict", "--checkpoint", runs["one"], "--obs", json.dumps(obs[0]), "--json")
    assert json.loads(result.out)["action"] == expected[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(obs)))
    assert json.loads(cli("predict", "--checkpoint", runs["one"], "--obs", "-").out) == expected


def test_stochastic_predictions_differ_between_calls(cli, runs):
    obs = json.dumps([[0.0, 0.0, 0.0, 0.0]] * 64)
    draws = {cli("predict", "--checkpoint", runs["one"], "--obs", obs, "--stochastic").out for _ in range(3)}
    assert len(draws) == 3


@pytest.mark.parametrize(
    ("obs", "word"),
    [
        ("[1, 2]", "(4,)"), ("[NaN, 0, 0, 0]", "NaN"), ("[1e999, 0, 0, 0]", "infinity"), ("{", "JSON"), ("", "empty"),
        ('{"a": 1}', "array"), ('["a", 1, 2, 3]', "array"), ("[[[1]]]", "shape"), ("[" * 100_000, "--obs"),
        ("[1,\n2,\nx]", "line 3"), ("1" * 5000, "--obs"),
    ],
)  # fmt: skip
def test_predict_rejects_bad_observations(cli, runs, obs, word):
    bad(cli("predict", "--checkpoint", runs["one"], "--obs", obs), word)


def test_resume_continues_where_the_run_ended(cli, tmp_path):
    assert cli("train", *PPO, "-n", 256, "-o", tmp_path).status == 0
    run = next(tmp_path.iterdir())
    bad(cli("resume", "--run", run), "256", "--total-timesteps")
    bad(cli("resume", "--checkpoint", run / "best", "-n", 512), "contains only a policy")
    result = cli("resume", "--run", run, "-n", "512", "--no-progress", "--json")
    assert result.status == 0
    assert json.loads(result.out)["env_steps"] == 512
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_runs_say_how_to_resume(cli, tmp_path, number, status):
    command = [*RL_TRAINING, "train", *PPO, "-n", "100M", "-o", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not any(log.stat().st_size for log in tmp_path.glob("*/metrics.jsonl")) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    summary = json.loads(out)
    assert summary["status"] == "interrupted"
    run = next(tmp_path.iterdir())
    assert err.splitlines()[-1].endswith(f"rl-training resume --checkpoint {run}")
    more = summary["env_steps"] + 128
    assert cli("resume", "--run", run, "-n", more, "--no-progress").status == 0


@pytest.mark.slow
def test_on_a_terminal_the_display_is_live_and_stdout_stays_clean(tmp_path):
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    command = [*RL_TRAINING, "train", *[word for word in PPO if word != "--no-progress"], "-n", "256", "--json"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [*command, "-o", str(tmp_path)], stdout=subprocess.PIPE, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        screen = b""
        while True:
            try:
                block = os.read(leader, 65536)
            except OSError:  # Linux: the other side is closed
                break
            if not block:
                break
            screen += block
        out = process.communicate()[0]
    os.close(leader)
    assert process.returncode == 0
    assert json.loads(out)["env_steps"] == 256
    for text in (b"\x1b[", b"256/256", b"final return"):
        assert text in screen


# --- list, verify, doctor -----------------------------------------------------------------------------------


def test_list_shows_verified_results_and_presets(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    row = {"algo": "dqn", "env_id": "CartPole-v1", "score": 499.6, "threshold": 475, "passed": True}
    (tmp_path / "results" / "dqn__CartPole-v1.json").write_text(json.dumps(row))
    (tmp_path / "results" / "bad__file.json").write_text("{")
    shown = cli("list").out.splitlines()
    assert next(line for line in shown if line.startswith("  dqn ")).split()[3:6] == ["1", "of", "1"]
    assert all(any(line == entry.family for line in shown) for entry in registry.entries().values())
    detailed = " ".join(cli("list", "--family", "value-based").out.split())
    assert "CartPole-v1 500 >= 475" in detailed
    rows = {row["name"]: row for row in json.loads(cli("list", "--json").out)["algorithms"]}
    assert list(rows) == list(registry.entries())
    assert rows["dqn"]["verified"][0]["score"] == 499.6
    assert rows["ppo"]["verified"] == []
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # without own results, it uses those shipped with the library
    elsewhere = {row["name"]: row for row in json.loads(cli("list", "--json").out)["algorithms"]}
    assert [result["env_id"] for result in elsewhere["ppg"]["verified"]] == ["CartPole-v1"]
    assert "dqn/cartpole" in rows["dqn"]["presets"]
    family = json.loads(cli("list", "--json", "--family", "on-policy").out)["algorithms"]
    assert "ppo" in [row["name"] for row in family]
    assert all(registry.entry(row["name"]).family == "on-policy" for row in family)


def test_verify_prints_the_result_of_the_ledger(cli, tmp_path, monkeypatch):
    calls = []
    row = {
        "algo": "dqn", "env_id": "CartPole-v1", "score": 12.0, "threshold": 475.0, "passed": False, "source": "a paper",
        "total_timesteps": 5, "seeds": [0, 2], "wall_time_s": 1.0, "device": "cpu", "execution": "eager",
    }  # fmt: skip

    def run(algo, **options):
        calls.append((algo, options))
        return {"algo": algo, "passed": False, "results": [row]}

    monkeypatch.setattr(verify, "verify", run)
    shown = cli("verify", "dqn", "--seeds", "0,2", "--output", tmp_path / "r", "--no-progress")
    assert shown.status == 0
    assert "12.0 MISSES the bar of 475" in shown.out
    expected = {"env": None, "seeds": (0, 2), "output": tmp_path / "r", "progress": False, "cluster": None}
    assert calls == [("dqn", expected)]
    row["at_most"] = True
    assert "12.0 EXCEEDS the bar of 475" in cli("verify", "dqn", "--output", tmp_path).out
    assert json.loads(cli("verify", "dqn", "--output", tmp_path, "--json").out)["passed"] is False


def test_doctor_reports_versions_and_missing_extras(cli, tmp_path):
    report = json.loads(cli("doctor", "--json", "--output-dir", tmp_path / "new").out)
    assert report["output_dir"]["writable"] is True
    assert not (tmp_path / "new").exists()
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["compile"]["works"] is None  # not tried unless asked: it takes a minute
    missing = [name for name, extra in report["extras"].items() if not extra["installed"]]
    shown = cli("doctor", "--no-compile").out
    for name in missing:
        assert f"pip install 'rl-training[{name}]'" in shown


def test_doctor_knows_every_extra():
    assert set(doctor.EXTRAS) == set(importlib.metadata.metadata("rl-training").get_all("Provides-Extra") or ())


def test_doctor_reports_a_broken_compiler_and_a_bad_directory(cli, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(doctor, "_PROBE", "raise RuntimeError('no such compiler')")
    result = cli("doctor", "--compile", "--json", "--output-dir", tmp_path / "file")
    report = json.loads(result.out)
    assert report["compile"]["works"] is False
    assert "no such compiler" in report["compile"]["reason"]
    assert len(report["problems"]) == 2
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    (tmp_path / "g++").write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    assert json.loads(cli("doctor", "--json").out)["compile"]["reason"] == "it is broken"  # tried at once
