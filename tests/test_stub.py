"""`__init__.pyi`: what type checkers and editors know about the public names."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rl_training
from rl_training import registry
from rl_training.experiment.run.config import TrainConfig

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "rl_training"
TREE = ast.parse((SOURCE / "__init__.pyi").read_text())
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}
ENTRIES = [entry for entry in registry.entries().values() if entry.target.startswith("rl_training.")]  # no plug-ins
SNIPPET = """
import rl_training
from rl_training import DQN, PPO, TrainConfig, train_ppo
reveal_type(DQN)
model = PPO("CartPole-v1", n_steps=256, learning_rate=3e-4, seed=1, hidden_sizes=[64, 64])
reveal_type(model)
reveal_type(model.learn(100_000, progress=True))
reveal_type(model.evaluate(10))
reveal_type(PPO(TrainConfig(algo="ppo", env_id="CartPole-v1", total_timesteps=1)).save("model"))
reveal_type(PPO.load("model"))
reveal_type(train_ppo(model.config))
PPO("CartPole-v1", n_step=256)
DQN("CartPole-v1", learning_starts="many")
DQN("CartPole-v1", target_rule="sarsa")
rl_training.DQNN
model.learn(callback=[])
"""
ANSWERS = {
    4: "Revealed type is \"def (env: ",
    6: 'Revealed type is "rl_training.PPO"',
    7: 'Revealed type is "rl_training.experiment.run.result.TrainResult"',
    8: 'Revealed type is "dict[str, Any]"',
    9: 'Revealed type is "pathlib.Path"',
    10: 'Revealed type is "rl_training.experiment.run.agent.Agent"',
    11: 'Revealed type is "rl_training.experiment.run.result.TrainResult"',
    12: 'Unexpected keyword argument "n_step" for "PPO"; did you mean "n_steps"?',
    13: 'Argument "learning_starts" to "DQN" has incompatible type "str"; expected "int"',
    14: 'Argument "target_rule" to "DQN" has incompatible type',
    15: 'Module has no attribute "DQNN"',
    16: 'Unexpected keyword argument "callback" for "learn" of "ManagedAlgorithm"',
}  # fmt: skip


def test_stub_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_stub", ROOT / "docs" / "generate_stub.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (SOURCE / "__init__.pyi").read_text() == module.generated(), "run `make docs`"


def settings_in_stub(name: str) -> set[str]:
    """Names that the constructor of a class takes, the TypedDict of its shared settings included."""
    (constructor,) = (node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef))
    found = {argument.arg for argument in constructor.args.kwonlyargs}
    assert constructor.args.kwarg is not None
    shared = ast.unparse(constructor.args.kwarg.annotation).removeprefix("Unpack[").rstrip("]")  # type: ignore[arg-type]
    while shared in CLASSES:
        found |= {node.target.id for node in CLASSES[shared].body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
        shared = ast.unparse(CLASSES[shared].bases[0])
    return found


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_class_has_every_setting(entry: registry.Entry) -> None:
    wanted = set(TrainConfig.model_fields) - {"algo"} | set(entry.load().Hyper.model_fields)
    parameters = inspect.signature(rl_training.ManagedAlgorithm.__init__).parameters.values()
    arguments = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert settings_in_stub(entry.class_name) == wanted | arguments
    assert any(ast.unparse(node).startswith(f"train_{entry.name}: ") for node in TREE.body)


def test_names_of_the_stub_exist() -> None:
    imported = {alias.asname for node in TREE.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined = {node.name for node in TREE.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    public = {name for name in imported | defined if name and not name.startswith("_")}
    assert public == set(dir(rl_training)) - {"__version__"}
    assert set(rl_training.__all__) <= public | {"__version__"}
    assert all(getattr(rl_training, name) is not None for name in public)


@pytest.mark.slow
def test_type_checker_sees_classes_settings_and_mistakes(tmp_path: Path) -> None:
    """Third-party packages are skipped, so that this takes seconds and no cache."""
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    run = SOURCE / "experiment" / "run"
    files = [
        SOURCE / "__init__.pyi",
        SOURCE / "api" / "managed.py",
        *(run / f"{n}.py" for n in ("agent", "config", "result")),
    ]
    options = ["--follow-imports=skip", "--python-version=3.10", "--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    command = [sys.executable, "-m", "mypy", *options, "snippet.py", *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("snippet.py:") and "defined in" not in line]
    found = {int(line.split(":")[1]): line for line in lines}
    assert found.keys() == ANSWERS.keys(), done.stdout + done.stderr
    for number, words in ANSWERS.items():
        assert words in found[number]
    for words in ("double: bool", "tau: float", "buffer_size", "-> rl_training.DQN"):
        assert words in found[4]
