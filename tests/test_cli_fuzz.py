"""Hundreds of random configs and command lines: each runs, or prints one line that names the key. Never a traceback."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import slow_unless

from rl_training import registry
from rl_training.cli import main
from rl_training.experiment.run import trainer
from rl_training.experiment.run.config import TrainConfig

VALUES: list[Any] = [
    0, -1, 1, 2, 10**6, 10**12, 10**19, 10**40, -(10**19), 2**31, 2**63, 0.5, -0.5, 3.7, 1e308, 1e-308, float("inf"),
    float("nan"), True, False, None, "", "x", "auto", "cpu", "cuda:99", "cuda:-1", "async:", "vector", "7", "1e-3",
    "lin_0.1", "\u202e\x00", "ünï", "../../x", "a" * 5000, [], [1], [0], [-1], [[1]], [10**9], [0, 0], ["a"], {},
    {"a": 1}, {"kind": "linear", "start": 1}, {"kind": "nope"}, {"start": float("nan")}, {"training": 3}, {1: 2},
    "os:CartPole-v1", "nosuch.module:X-v0", "Pendulum-v1", "sac", "dqm", "0-3",
]  # fmt: skip
STRANGE = ["self", "cls", "Gamma", "", "__init__", "model_config", "learningrate", "values"]
HOSTILE = {
    "empty": "",
    "comment": "# nothing\n",
    "list": "- a\n- b\n",
    "text": "just words",
    "number keys": "1: 2\n",
    "object": '!!python/object/apply:os.system ["touch owned"]\n',
    "object in value": 'algo: !!python/object/apply:os.system ["touch owned"]\n',
    "module": "algo: !!python/module:os\n",
    "circle": "algo: dqn\nenv_id: CartPole-v1\ntotal_timesteps: 1\nenv_kwargs: &a {x: *a}\n",
    "bomb": "algo: dqn\nenv_id: CartPole-v1\ntotal_timesteps: 1\nenv_kwargs:\n  a0: &a0 [1, 1]\n"
    + "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
    "deep": "algo: " + "[" * 20_000,
    "hex": "algo: dqn\nenv_id: CartPole-v1\ntotal_timesteps: 0x" + "f" * 20_000,
    "digits": "algo: dqn\nenv_id: CartPole-v1\ntotal_timesteps: " + "9" * 20_000,
    "tabs": "algo:\tdqn\n\tenv_id: x\n",
    "two documents": "algo: dqn\n---\nalgo: ppo\n",
    "unclosed": "algo: {dqn\n",
    "control": "algo: dqn\x07\n",
}


def check(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """Run a command and return its error line, or None if it succeeded."""
    capsys.readouterr()
    status = main(argv)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith(("warning: ", "hint: "))]
    assert status in (0, 2), (argv, err)
    assert "Traceback" not in err, (argv, err)
    if status == 0:
        return None
    assert len(lines) == 1, (argv, err)
    assert lines[0].startswith("error: "), (argv, err)
    assert len(lines[0]) < 1000, argv
    assert out == "", argv
    return lines[0]


def base_of(algo: str) -> dict[str, Any]:
    env_id = "Pendulum-v1" if "box" in registry.entry(algo).actions[:1] else "CartPole-v1"
    return {"algo": algo, "env_id": env_id, "total_timesteps": 100, "output_dir": "runs"}


def mutated(algo: str, key: str, value: Any) -> dict[str, Any]:
    config = base_of(algo)
    if key in TrainConfig.model_fields or key in STRANGE:
        return {**config, key: value}
    return {**config, "algo_kwargs": {key: value}}


def test_errors_name_the_field_with_the_wrong_value(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(1)
    refused = 0
    for algo in ("dqn", "ppo", "sac"):
        keys = [*TrainConfig.model_fields, *registry.entry(algo).load().Hyper.model_fields, *STRANGE]
        for key in keys:
            for value in chance.sample(VALUES, 3):
                Path("c.yaml").write_text(yaml.safe_dump(mutated(algo, key, value)))
                line = check(["config", "--config", "c.yaml"], capsys)
                refused += line is not None
                keys_in = [key, *value] if isinstance(value, dict) else [key]  # an inner key is more precise
                keys_in += ["Environment"] * (key == "env_id")  # an id that nobody registered
                pattern = "|".join(re.escape(str(name)) or "''" for name in keys_in)  # "algorithm" names algo
                named = re.search(f"(?<![A-Za-z_])({pattern})", line or "")
                assert line is None or named, (key, value, line)
    assert refused > 150


@pytest.fixture
def no_training(monkeypatch):
    """Trainers are constructed, where bad values raise, but do not train."""

    def run(self: trainer.Trainer) -> trainer.TrainResult:
        self.envs.close()
        self.evaluator.close()
        summary = {"env_id": "x", "env_steps": 0, "wall_time_s": 1.0, "steps_per_second": 0.0}
        return trainer.TrainResult(self.run_dir, self.run_dir, {}, None, {}, "completed", summary)

    monkeypatch.setattr(trainer.Trainer, "run", run)


@pytest.mark.slow
def test_random_configs_train_or_are_refused(capsys, tmp_path, monkeypatch, no_training):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(2)
    started = 0
    for _ in range(400):
        algo = chance.choice(list(registry.entries()))
        hyper = list(registry.entry(algo).load().Hyper.model_fields)
        config = base_of(algo)
        for _ in range(chance.choice([1, 1, 2, 3])):
            value = chance.choice(VALUES)
            if chance.random() < 0.5:
                config[chance.choice([*TrainConfig.model_fields, *STRANGE])] = value
            elif isinstance(config.setdefault("algo_kwargs", {}), dict):
                config["algo_kwargs"] = {**config["algo_kwargs"], chance.choice([*hyper, *STRANGE]): value}
        Path("c.yaml").write_text(yaml.safe_dump(config))
        started += check(["train", "--config", "c.yaml", "--no-progress"], capsys) is None
    assert 10 < started < 160


WORDS = [
    "train", "eval", "resume", "predict", "config", "list", "verify", "--config", "dqn/cartpole", "ppo/cartpole",
    "--set", "gamma=0.9", "gamma=", "=1", "gamma", "a.b.c=1", "env_kwargs.x.y=[", "algo_kwargs=3", "tags.a=b",
    "seeds=1-", "seed=-1", "--seed", "--seeds", "0-3", "3-0", "1,,2", "-1", "--algo", "sac", "--env", "Nope-v0", "-n",
    "1e3", "1e400", "0", "1_0", "--format", "json", "xml", "--obs", "[", "[1]", "-", "--checkpoint", "--run", ".",
    "/", "", " ", "--", "-", "---", "-h=", "--json", "--json=1", "--device", "mps", "--execution", "eager",
    "--family", "\u202e", "\udcff", "%s{0}", "--output-dir", "\x00", "--video", "v", "--num-episodes",
    "--total-timesteps=5", "--set=num_envs=0", "-s", "hidden_sizes=[[]]", "--debug", "--no-progress",
    "env_id=os:X-v0", "learning_rate={a: *b}", "gamma=!!python/name:os.system", "=", "-c", "-cdqn/cartpole",
]  # fmt: skip


def test_random_command_lines_never_show_a_traceback(capsys, tmp_path, monkeypatch, no_training):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - `--obs -` reads it
    monkeypatch.setattr("rl_training.experiment.tools.verify.verify", lambda algo, **_: {"algo": algo, "results": []})
    monkeypatch.setattr("rl_training.cli.boundary.DEBUG", "--no-such-debug")  # --debug would print a traceback
    chance = random.Random(3)
    refused = 0
    for _ in range(300):
        argv = [chance.choice(WORDS[:7] if chance.random() < 0.9 else WORDS)]
        argv += chance.choices(WORDS[7:], k=chance.randrange(8))
        refused += check(argv, capsys) is not None
    assert refused > 150


@pytest.mark.parametrize("name", slow_unless(lambda name: name != "deep", HOSTILE))
@pytest.mark.parametrize("command", ["config", "train"])
def test_hostile_files_are_rejected(capsys, tmp_path, monkeypatch, name, command):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(HOSTILE[name], encoding="utf-8")
    assert check([command, "--config", "c.yaml"], capsys) is not None
    assert os.listdir() == ["c.yaml"]


def test_paths_that_are_not_files_are_rejected(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe\x00\x80" * 100)
    Path("folder").mkdir()
    for name in (
        "binary",
        "folder",
        "missing",
        "",
        ".",
        "..",
        "/",
        "../configs/ppo/cartpole",
        "\x00",
        "a" * 5000,
        "ppo/",
    ):
        line = check(["config", "--config", name], capsys)
        assert line is not None, name


@pytest.mark.slow
def test_errors_in_real_processes(tmp_path):
    """Things that pytest's capture could hide: encodings, the interpreter's exit status, output at exit."""
    (tmp_path / "c.yaml").write_text(HOSTILE["object"])
    lines: list[list[str]] = [
        ["config", "--config", "c.yaml"],
        ["train", "--algo", "ünï\udcff", "--env", "\u202e", "-n", "1"],
        ["predict", "--checkpoint", "missing", "--obs", "{"],
    ]
    for encoding in ("utf-8", "ascii"):
        for argv in lines:
            words = [os.fsencode(word) for word in ("-m", "rl_training", *argv)]
            environment = {**os.environ, "PYTHONIOENCODING": encoding}
            done = subprocess.run(
                [os.fsencode(sys.executable), *words], capture_output=True, cwd=tmp_path, env=environment, timeout=120
            )
            assert done.returncode == 2, done
            assert done.stdout == b""
            assert done.stderr.startswith(b"error: ")
            assert done.stderr.count(b"\n") == 1
    assert os.listdir(tmp_path) == ["c.yaml"]


def test_set_round_trips_values(capsys):
    """Values given to `--set` appear unchanged in the output of `config`."""
    chance = random.Random(4)
    for _ in range(60):
        value = [chance.choice([1, -2.5, 1e-7, True, None, "a b", "é"]) for _ in range(3)]
        key = f"env_kwargs.{chance.choice('abc')}"
        argv = ["config", "--config", "sac/pendulum", "--set", f"{key}={json.dumps(value)}", "--format", "json"]
        capsys.readouterr()
        assert main(argv) == 0
        assert json.loads(capsys.readouterr().out)["env_kwargs"] == {key[-1]: value}
