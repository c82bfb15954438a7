"""A module is imported only if the person named it: typed, passed in Python, or allowed. Never because a file does."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import yaml
from helpers import slow_unless

import rl_training
from rl_training import imports
from rl_training.cli import main
from rl_training.cluster import tasks
from rl_training.errors import UserError
from rl_training.experiment.run.checkpoint import latest_valid, load_checkpoint, save_checkpoint
from rl_training.experiment.run.config import TrainConfig, combine, make_config
from rl_training.experiment.run.trainer import Trainer

SRC = Path(__file__).parents[1] / "src" / "rl_training"
MODULE = """
import pathlib
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

pathlib.Path(__file__).with_name("imported").touch()
gymnasium.register("Named-v0", entry_point=CartPoleEnv, max_episode_steps=20)
"""
SMALL = {"total_timesteps": 64, "eval_episodes": 1, "checkpoint_interval": 32}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `named_env` that can be imported, and the file that it writes when it is."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "named_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with imports.forget_afterwards():
        yield folder / "imported"
    sys.modules.pop("named_env", None)
    gym.registry.pop("Named-v0", None)


def write(path: Path, **fields: Any) -> str:
    path.write_text(yaml.safe_dump(fields))
    return str(path)


def run(*words: str) -> int:
    return main([*words, "--no-progress"] if words[0] in ("train", "resume") else list(words))


COMMANDS = ("train", "plan", "verify-resume", "sweep")


@pytest.mark.parametrize("command", slow_unless(lambda command: command != "sweep", COMMANDS))
def test_a_configuration_file_imports_nothing(
    command: str, marker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x.yaml", algo="dqn", env_id="named_env:Named-v0", **SMALL)
    status = run(command, "--config", path, *(["--no-probe"] if command == "plan" else []))
    assert status == (1 if command == "sweep" else 2)
    assert not marker.exists()
    assert "--allow-import named_env" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["dataset", "expert"])
@pytest.mark.parametrize("nested", [{"preset": "inner.yaml"}, {"env_id": "named_env:Named-v0", "algo": "dqn"}])
def test_a_nested_training_imports_nothing(where: str, nested: dict[str, Any], marker: Path, tmp_path: Path) -> None:
    write(tmp_path / "inner.yaml", algo="dqn", env_id="named_env:Named-v0", **SMALL)
    nested = {**SMALL, **nested} if "algo" in nested else nested
    kind = {"kind": "policy"} if where == "dataset" else {}
    algo = "bc" if where == "dataset" else "dagger"
    path = write(
        tmp_path / "x.yaml", algo=algo, env_id="CartPole-v1", algo_kwargs={where: {**kind, "train": nested}}, **SMALL
    )
    assert run("train", "--config", path) == 2
    assert not marker.exists()


@pytest.mark.slow
def test_a_checkpoint_imports_nothing_and_the_refusal_says_what_to_type(
    marker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "--algo", "dqn", "--env", "named_env:Named-v0", "-n", "64", "--set", "eval_episodes=1") == 0
    assert marker.exists()
    printed = [
        line.split("rl-training ", 1)[1] for line in capfd.readouterr().err.splitlines() if "rl-training" in line
    ]
    run_dir = str(next((tmp_path / "runs").iterdir()))
    marker.unlink()
    for command in (["eval", "--checkpoint", run_dir], ["resume", "--run", run_dir, "-n", "128"]):
        refused = fresh_process(command)
        assert refused.returncode == 2
        assert "type --allow-import named_env" in refused.stderr
        assert not marker.exists()
    assert len(printed) == 2  # evaluate, train longer
    for line in printed:  # the commands that the run printed work as they are
        done = fresh_process(shlex.split(line.replace("--total-timesteps N", "--total-timesteps 128")))
        assert done.returncode == 0, done.stderr
    allowed = fresh_process(["eval", "--checkpoint", run_dir, "-n", "1", "--allow-import", "named_env"])
    assert allowed.returncode == 0, allowed.stderr


def fresh_process(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rl_training", *words], capture_output=True, text=True)


def test_typed_and_allowed_modules_are_imported(marker: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", algo="dqn", env_id="named_env:Named-v0", **SMALL)
    assert run("train", "--config", path, "--allow-import", "named_env") == 0
    assert marker.exists()
    marker.unlink()
    sys.modules.pop("named_env")
    gym.registry.pop("Named-v0")
    assert run("train", "--config", path) == 2  # allowed to one command, not to the next
    assert run("train", "--config", path, "--set", "env_id=named_env:Named-v0") == 0
    assert marker.exists()


def test_names_passed_in_python_are_imported(marker: Path) -> None:
    rl_training.DQN("named_env:Named-v0", eval_episodes=1).learn(64)
    assert marker.exists()


def test_a_file_read_in_python_imports_nothing(marker: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", algo="dqn", env_id="named_env:Named-v0", **SMALL)
    for make in (lambda: rl_training.DQN(make_config(path)).learn(), lambda: Trainer(combine(path), progress=False)):
        with pytest.raises(UserError, match=r"allow_import\('named_env'\)"):
            make()
    assert not marker.exists()
    rl_training.allow_import("named_env")
    rl_training.DQN(make_config(path)).learn()
    assert marker.exists()


@pytest.mark.slow
def test_a_sweep_hands_its_allowance_to_the_workers(marker: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", algo="dqn", env_id="named_env:Named-v0", **SMALL)
    assert run("sweep", "--config", path, "--allow-import", "named_env", "--no-progress") == 0
    assert marker.exists()


def test_a_cluster_task_may_import_what_its_sender_may(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    ray = SimpleNamespace(remote=lambda **options: lambda function: SimpleNamespace(remote=sent.append))
    monkeypatch.setattr(tasks, "Connection", lambda *reserved, **options: SimpleNamespace(ray=ray))
    workers = tasks.ClusterWorkers("local", 1)
    job = {"id": "a", "target": "rl_training.imports:import_named", "arguments": ["named_env", "a trial"],
           "log": str(tmp_path / "log")}  # fmt: skip
    workers.send(job)
    imports.allow_import("named_env")
    workers.send(job)
    imports._allowed.clear()  # a task runs in a process of its own
    assert [tasks.run_job(one) for one in sent] == [1, 0]
    assert marker.exists()


def test_allowing_a_package_allows_what_is_inside_it_and_nothing_else() -> None:
    with imports.forget_afterwards():
        imports.allow_import("a.b")
        assert imports.is_allowed("a.b")
        assert imports.is_allowed("a.b.c")
        assert not imports.is_allowed("a")
        assert not imports.is_allowed("a.bc")
    assert not imports.is_allowed("a.b")


@pytest.mark.parametrize("name", ["", "a:b", "a b", "../x", "a..b", 3])
def test_only_module_names_can_be_allowed(name: Any) -> None:
    with pytest.raises(UserError, match="not the name of a module"):
        imports.allow_import(name)


@pytest.mark.slow
def test_the_working_directory_is_not_on_the_import_path(tmp_path: Path) -> None:
    (tmp_path / "named_env.py").write_text(MODULE)
    plugin = tmp_path / "evil-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Name: evil\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[rl_training.algorithms]\nevil = named_env:entry\n")
    script = Path(sys.executable).with_name("rl-training")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for start in ([sys.executable, "-m", "rl_training"], [str(script)]):
        words = [*start, "lint-env", "named_env:Named-v0"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        assert "module 'named_env' cannot be imported" in done.stderr
        assert "plug-in" not in done.stderr
    assert not (tmp_path / "imported").exists()


def test_only_the_config_module_builds_configs_that_allow_imports() -> None:
    """`TrainConfig(...)` allows the modules in its values, so library code uses `TrainConfig.from_file`."""
    calls = [
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TrainConfig"
        if not all(isinstance(word.value, ast.Constant | ast.Name) and word.arg for word in node.keywords)
    ]
    assert calls == []
    with imports.forget_afterwards():
        TrainConfig.from_file({"algo": "dqn", "env_id": "a:B-v0", "total_timesteps": 1})
        assert not imports.is_allowed("a")
        TrainConfig(algo="dqn", env_id="a:B-v0", total_timesteps=1, algo_kwargs={"x": [{"env_id": "b.c:D"}]})
        assert imports.is_allowed("a")
        assert imports.is_allowed("b.c")


def test_a_study_file_of_a_sweep_imports_nothing(marker: Path, tmp_path: Path) -> None:
    """The plan of a sweep directory is compared with the command, never used."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    trials = [{"name": "x", "config": {"algo": "dqn", "env_id": "named_env:Named-v0", **SMALL}}]
    (folder / "sweep.json").write_text(json.dumps({"format": "rl_training.sweep", "schema": 1, "trials": trials}))
    assert run("sweep", "--algo", "dqn", "--env", "CartPole-v1", "-n", "64", "-o", str(folder)) == 2
    assert not marker.exists()


def wrapping(base: Any, **_: Any) -> gym.Env[Any, Any]:
    """An environment that makes the one that its argument names, as many wrappers do."""
    while not isinstance(base, str):
        base = next(iter(base.values() if isinstance(base, dict) else base))
    return gym.make(base)


@pytest.fixture
def wrapping_env() -> Iterator[None]:
    gym.register("Wrapping-v0", entry_point=wrapping, max_episode_steps=20)
    yield
    gym.registry.pop("Wrapping-v0")


NAME = "named_env:Named-v0"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"env_kwargs": {"base": NAME}}, "env_kwargs.base"),
        ({"env_kwargs": {"base": [{"id": NAME}]}}, "env_kwargs.base.id"),
        ({"env_kwargs": {"training": {"base": NAME}}}, "env_kwargs.training.base"),
        ({"env_kwargs": {"base": "CartPole-v1", "evaluation": {"base": NAME}}}, "env_kwargs.evaluation.base"),
        ({"env_id": "CartPole-v1", "env_wrappers": [{"wrapper": "gymnasium.wrappers:TimeLimit",
          "kwargs": {"x": NAME}}]}, "env_wrappers.kwargs.x"),
        ({"algo": "bc", "env_id": "CartPole-v1", "algo_kwargs": {"dataset": {
          "env_id": "Wrapping-v0", "size": 50, "env_kwargs": {"base": NAME}}}}, "dataset.env_kwargs.base"),
        ({"algo": "dagger", "env_id": "CartPole-v1", "algo_kwargs": {"expert": {"train": {
          "algo": "dqn", "env_id": "Wrapping-v0", "env_kwargs": {"base": NAME}, **SMALL}}}}, "env_kwargs.base"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_arguments_in_a_file_import_nothing(
    fields: dict[str, Any], key: str, vectorization: str, marker: Path, wrapping_env: None, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fields = {"algo": "dqn", "env_id": "Wrapping-v0", "vectorization": vectorization, "num_envs": 1, **SMALL, **fields}
    path = write(tmp_path / "x.yaml", **fields)
    assert run("train", "--config", path, "--allow-import", "gymnasium.wrappers") == 2
    assert not marker.exists()
    said = capfd.readouterr().err.strip().splitlines()
    assert f"{key} names the module 'named_env'" in said[-1]
    assert "--allow-import named_env" in said[-1]


def test_arguments_that_the_person_named_are_passed_on(
    marker: Path, wrapping_env: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x.yaml", algo="dqn", env_id="Wrapping-v0", env_kwargs={"base": NAME}, **SMALL)
    assert run("train", "--config", path, "--allow-import", "named_env") == 0
    assert "--allow-import named_env" in capfd.readouterr().err.splitlines()[-1]  # in the printed command
    assert run("train", "-c", path, "--set", f"env_kwargs.base={NAME}") == 0
    run_dir = str(max((tmp_path / "runs").iterdir()))
    for command in (["eval", "--checkpoint", run_dir], ["resume", "--run", run_dir, "-n", "96"]):
        assert run(*command) == 2
        assert "env_kwargs.base names the module 'named_env'" in capfd.readouterr().err
        assert run(*command, "--allow-import", "named_env") == 0
    with imports.forget_afterwards():
        rl_training.DQN("Wrapping-v0", env_kwargs={"base": NAME}, eval_episodes=1).learn(64)
    env = gym.make("Wrapping-v0", base=NAME)
    with imports.forget_afterwards():
        rl_training.DQN(env, eval_episodes=1).learn(64)


def test_texts_that_name_no_module_are_arguments_like_others() -> None:
    for text in ("no_such_module_here:x", "http://example.org/map", "C:/maps", "12:30", "json", "json:", ":x"):
        imports.check_arguments({"x": [text]}, "env_kwargs")
    for text in ("json:loads", "xml.dom:x", "os: x", "os:\nx"):
        with imports.forget_afterwards(), pytest.raises(UserError, match=r"env_kwargs\.x\.y names the module"):
            imports.check_arguments({"x": {"y": [text]}}, "env_kwargs")


ADDRESS = "their.cluster:6379"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were asked whether a cluster is there; none is."""
    addresses: list[str] = []

    def nobody_answers(address: str) -> None:
        addresses.append(address)
        raise UserError("nobody answers")

    monkeypatch.setattr("rl_training.cluster.connection._require_answer", nobody_answers)
    monkeypatch.setattr("rl_training.cluster.connection.require_ray", lambda: SimpleNamespace(is_initialized=bool))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # nor is Ray needed here
    return addresses


def test_a_file_joins_no_cluster(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = {"algo": "ppo", "env_id": "CartPole-v1", "cluster": {"address": ADDRESS}, **SMALL}
    path = write(tmp_path / "x.yaml", **fields)
    for words in ([], ["--set", "seed=1"], ["--cluster", "other.host:1", "--set", f"cluster.address={ADDRESS}:1"]):
        assert run("train", "--config", path, *words) == 2
        said = capfd.readouterr().err
        assert ("nobody answers" if words[:1] == ["--cluster"] else f"type --cluster {ADDRESS}") in said
    assert asked == [f"{ADDRESS}:1"]
    for words in (["--cluster", ADDRESS], ["--set", f"cluster.address={ADDRESS}"]):
        assert run("train", "--config", path, *words) == 2
        assert "nobody answers" in capfd.readouterr().err
    with imports.forget_afterwards(), pytest.raises(UserError, match="only a file names"):
        rl_training.PPO(make_config(path)).learn()
    with imports.forget_afterwards(), pytest.raises(UserError, match="nobody answers"):
        Trainer(make_config(path, cluster={"address": ADDRESS}), progress=False)
    with imports.forget_afterwards(), pytest.raises(UserError, match="nobody answers"):
        Trainer(TrainConfig(**fields), progress=False)
    assert asked == [f"{ADDRESS}:1", *[ADDRESS] * 4]


def test_a_checkpoint_joins_no_cluster(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", "-a", "dqn", "-e", "CartPole-v1", "-n", "32", "--defaults", "-s", "eval_episodes=1") == 0
    found = next((tmp_path / "runs").iterdir())
    step = latest_valid(found)
    checkpoint = load_checkpoint(step)
    config = {**checkpoint.meta["config"], "cluster": {"address": ADDRESS, "actors": 1}}
    save_checkpoint(
        step.parent, "step_000000000033", tensors=checkpoint.tensors, meta={**checkpoint.meta, "config": config}
    )
    for words in ([], ["--cluster", ADDRESS]):
        capfd.readouterr()
        assert run("resume", "--run", str(found), "-n", "64", *words) == 2
        assert ("nobody answers" if words else f"type --cluster {ADDRESS}") in capfd.readouterr().err
    assert asked == [ADDRESS]
