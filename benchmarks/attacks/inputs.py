"""Fuzzed command lines and configurations: each works, or ends with one line. Nothing that a file names is imported."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import yaml

from attacks.base import SMALL, Attack, Outcome, judge, small
from rl_training import registry
from rl_training.cli.app import _COMMANDS
from rl_training.cli.boundary import _command
from rl_training.experiment.run import trainer
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.tools import verify

VALUES: list[Any] = [
    0, -1, 1, 2, 3, 10**6, 10**12, 10**19, 10**40, -(10**19), 2**31, 2**63, 0.5, -0.5, 3.7, 1e308, 1e-308, float("inf"),
    float("nan"), True, False, None, "", "x", "auto", "cpu", "cuda:99", "cuda:-1", "async:", "vector", "7", "1e-3",
    "lin_0.1", "\u202e\x00", "\x1b[31mred", "a\nb", "ünï", "../../x", "a" * 5000, [], [1], [0], [-1], [[1]], [10**9],
    [0, 0], ["a"], {}, {"a": 1}, {"kind": "linear", "start": 1}, {"kind": "nope"}, {"start": float("nan")},
    {"training": 3}, {1: 2}, "evil_module:CartPole-v1", "evil_module:X-v0", "Pendulum-v1", "sac", "dqm", "0-3", "/",
    {"id": 1}, {"disable_env_checker": True}, {"max_episode_steps": 0}, {"render_mode": "x"}, {"wrappers": [1]},
    {"train": {"preset": "c.yaml"}}, {"kind": "policy", "train": {"env_id": "evil_module:X", "algo": "dqn"}},
    {"kind": "npz", "path": "/etc/passwd"}, {"path": "/"}, {"kind": "minari", "path": "../.."}, {"level": "medium"},
]  # fmt: skip
STRANGE = ["self", "cls", "Gamma", "", "__init__", "model_config", "learningrate", "values", "env_wrappers", "import"]
WORDS = [
    "dqn/cartpole", "ppo/cartpole", "gamma=0.9", "gamma=", "=1", "gamma", "a.b.c=1", "env_kwargs.x.y=[", "tags.a=b",
    "algo_kwargs=3", "seeds=1-", "seed=-1", "0-3", "3-0", "1,,2", "-1", "sac", "Nope-v0", "1e3", "1e400", "0", "1_0",
    "9" * 400, "json", "xml", "[", "[1]", "-", ".", "/", "", " ", "--", "---", "-h=", "\u202e", "\udcff", "%s{0}",
    "\x00", "\x1b[2J", "a\nb", "mps", "eager", "CartPole-v1",
    "evil_module:X-v0", "env_id=evil_module:X-v0", "evil_module",
    "learning_rate={a: *b}", "gamma=!!python/name:os.system", "=", "-cdqn/cartpole", "num_envs=0", "c.yaml", "run",
    "hidden_sizes=[[]]", "env_kwargs.id=1", "env_kwargs.max_episode_steps=0", "env_kwargs.disable_env_checker=1",
    "/dev/null", "/dev/full", "x.npz", "x.html", "../x",
]  # fmt: skip
QUIET = {"dashboard", "doctor", "list", "sweep", "tune"}  # these start servers or processes, or take no input


class _Owned:
    """Finds out whether anything tries to import the module that the fuzzed files name."""

    names: list[str] = []

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> None:
        if name.startswith("evil_module"):
            cls.names.append(name)


def prepare(scratch: Path) -> None:
    """Training is replaced by its preparation, where bad values raise."""
    sys.meta_path.insert(0, _Owned)  # type: ignore[arg-type]
    trainer.Trainer(small("dqn", scratch / "source"), progress=False).run()
    Known.run = next((scratch / "source").iterdir())
    Known.full_run = trainer.Trainer.run

    def run(self: Any) -> Any:
        self.close()
        summary = {"env_id": self.config.env_id, "env_steps": 0, "wall_time_s": 1.0, "steps_per_second": 0.0}
        return trainer.TrainResult(self.run_dir, self.run_dir, {}, None, {}, "completed", summary)

    trainer.Trainer.run = run  # type: ignore[method-assign]
    verify.verify = lambda algo, **_: {"algo": algo, "results": []}  # type: ignore[assignment]


class Known:
    run: Path
    full_run: Any


def config(chance: random.Random, folder: Path) -> tuple[str, list[str]]:
    algo = chance.choice(list(registry.entries()))
    hyper = list(registry.entry(algo).load().Hyper.model_fields)
    box = "box" in registry.entry(algo).actions[:1]
    data: dict[str, Any] = {"algo": algo, "env_id": "Pendulum-v1" if box else "CartPole-v1", "total_timesteps": 100}
    for _ in range(chance.choice([1, 1, 2, 3])):
        value = chance.choice(VALUES)
        if chance.random() < 0.5:
            data[chance.choice([*TrainConfig.model_fields, *STRANGE])] = value
        elif isinstance(data.setdefault("algo_kwargs", {}), dict):
            data["algo_kwargs"] = {**data["algo_kwargs"], chance.choice([*hyper, *STRANGE]): value}
    Path("c.yaml").write_text(yaml.safe_dump(data))
    words = ["--no-probe"] if (name := chance.choice(["config", "train", "plan"])) == "plan" else []
    return f"{name} --config", [name, "--config", "c.yaml", *words]


def line(chance: random.Random, folder: Path) -> tuple[str, list[str]]:
    """A command with options that it has and values that do not fit, and some words that nobody expects."""
    from rl_training.cli.app import app

    known: Any = _command(app)
    name = chance.choice([command for command in _COMMANDS if command not in QUIET] + ["dataset"])
    command = known.commands[name]
    argv = [name]
    if name == "dataset":
        argv.append(chance.choice(["make", "inspect", "convert"]))
        command = command.commands[argv[1]]
    for _ in range(chance.randrange(7)):
        option = chance.choice(command.params)
        value = chance.choice(WORDS) if chance.random() < 0.7 else str(chance.choice(VALUES))[:200]
        if value == "run":
            value = str(Known.run)
        if "--video" in option.opts or "--render" in option.opts or "--help" in option.opts:
            continue
        argv += [option.opts[0], value] if option.opts[0].startswith("-") else [value]
    if name == "plan":
        argv.append("--no-probe")  # compiling takes a minute
    if chance.random() < 0.3:
        argv.insert(chance.randrange(1, len(argv) + 1), chance.choice(WORDS))
    Path("c.yaml").write_text("algo: dqn\nenv_id: evil_module:X-v0\ntotal_timesteps: 10\n")
    return name, argv


def fuzz(chance: random.Random, case: int, folder: Path) -> Outcome:
    sys.stdin = io.StringIO()
    _Owned.names.clear()
    kind, argv = (config if case % 2 else line)(chance, folder)
    typed = any("evil_module" in word for word in argv)
    bad = judge(argv, (0, 1, 2) if kind in ("lint-env", "compare") else (0, 2))
    if kind in ("lint-env", "compare") and bad and bad.startswith("not one error line"):
        bad = None  # their status 1 is a result
    if _Owned.names and not typed:
        bad = f"{argv} imported {_Owned.names}"
    return kind, 1, bad


def train(chance: random.Random, case: int, folder: Path) -> Outcome:
    """Settings that are accepted also train: the run completes, or says what is wrong with them."""
    trainer.Trainer.run = Known.full_run  # type: ignore[method-assign]
    algo = chance.choice(list(SMALL))
    fields = small(algo, folder, total_timesteps=chance.choice([1, 7, 40, 64])).to_dict()
    hyper = registry.entry(algo).load().Hyper.model_fields
    numbers = [1, 2, 3, 5, 16, 33, 0, 0.0, 0.1, 0.5, 0.99, 1.0, 1e-8, 1e-3, 10.0, True, False, [4], [8, 8], None]
    for _ in range(chance.randrange(1, 5)):
        if chance.random() < 0.7:
            fields["algo_kwargs"][chance.choice(list(hyper))] = chance.choice(numbers)
        else:
            key = chance.choice([
                "num_envs", "seeds", "log_interval", "checkpoint_interval", "eval_interval", "eval_episodes",
                "keep_checkpoints", "stop_at_return", "execution", "tags",
            ])  # fmt: skip
            choices: dict[str, list[Any]] = {
                "seeds": [[0, 1], [5]], "execution": ["eager", "recorded"], "tags": [{"a": "\x1b[31m"}],
                "stop_at_return": [-1e9, 1e9], "num_envs": [1, 2, 5],
            }  # fmt: skip
            fields[key] = chance.choice(choices.get(key, [1, 3, 17, 1000]))
    Path("c.yaml").write_text(yaml.safe_dump(fields))
    bad = judge(["train", "--config", "c.yaml", "--no-progress"])
    if bad is None or "gave NaN or infinity" in bad:
        return algo, 1, None
    return algo, 1, f"{bad} {fields}"


FUZZ = Attack(
    "fuzz", "fuzzed command lines and configurations: done, or one line and status 2", 18_000, 18_000, fuzz, prepare,
    batch=500,
)  # fmt: skip
TRAIN = Attack("train", "fuzzed configurations that train for a moment", 2_000, 2_000, train, prepare, batch=100)
