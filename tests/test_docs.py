"""The documentation is true: generated tables are up to date, links lead somewhere, commands parse, code blocks run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from rl_training.cli.app import app
from rl_training.experiment import registry
from rl_training.experiment.config import TrainConfig
from rl_training.runtime import executor

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_YET = {ROOT / "docs" / "benchmarks.md"}  # written by benchmarks/report.py after `make bench`


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", ["README.md", "docs/configuration.md", "docs/verification.md"])
def test_generated_tables_are_up_to_date(generate: ModuleType, path: str) -> None:
    assert (ROOT / path).read_text() == generate.generated(path), "run `make docs`"


def test_results_table_shows_what_the_files_say(generate: ModuleType, tmp_path: Path) -> None:
    evaluation = {"mean_return": 498.76, "iqm": 499.9, "ci95": [490.04, 500.0]}
    row = {
        "algo": "dqn", "env_id": "CartPole-v1", "env_steps": 50_000, "seeds": [0, 1, 2], "final_eval": evaluation,
        "threshold": 475, "passed": True, "source": "here",
    }  # fmt: skip
    (tmp_path / "dqn__CartPole-v1.json").write_text(json.dumps(row))
    extra = {**row, "algo": "sac", "env_id": "Hopper-v5", "passed": False}
    (tmp_path / "sac__Hopper-v5.json").write_text(json.dumps(extra))
    lines = generate.measured(tmp_path).splitlines()
    assert lines[2] == "| `dqn` | CartPole-v1 | 50,000 | 3 | 498.8 | 499.9 [490.0, 500.0] | 475 | yes | here |"
    assert "not run yet" in lines[3]
    assert lines[-1] == "| `sac` | Hopper-v5 | 50,000 | 3 | 498.8 | 499.9 [490.0, 500.0] | 475 | **no** | here |"


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    models = [TrainConfig, *(entry.load().Hyper for entry in registry.entries().values())]
    for model in models:
        for name, field in model.model_fields.items():
            assert f"| `{name}` |" in text
            assert field.description, f"{model.__name__}.{name} has no docstring"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith(("http://", "https://")):
            target = (page.parent / link).resolve()
            assert target.exists() or target in NOT_YET, f"{page.name} links to {link}"


def commands() -> list[str]:
    """Every `rl-training ...` line of a shell block."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            found += [line.split("  #")[0].strip() for line in block.splitlines() if line.startswith("rl-training ")]
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_documented_command_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    group: Any = typer.main.get_command(app)
    command = group.commands[name]
    if hasattr(command, "commands"):  # a group: dataset make
        name, *arguments = arguments
        command = command.commands[name]
    context = command.make_context(name, arguments)
    assert not context.args
    config = context.params.get("config")
    if config is not None and "/" in config:
        assert config in registry.presets()


def test_all_commands_are_shown() -> None:
    group: Any = typer.main.get_command(app)
    assert {line.split()[1] for line in commands()} == set(group.commands)


def python_blocks() -> list[Any]:
    blocks = []
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            blocks.append(pytest.param(block, id=f"{page.stem}-{i}"))
    return blocks


@pytest.mark.parametrize("block", python_blocks())
def test_python_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but for the budget."""
    short = re.sub(r"total_timesteps=[\d_]+", "total_timesteps=1100", block)
    short = re.sub(r"eval_interval=[\d_]+", "eval_interval=500", short)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(short, "block", "exec"), scope)
    assert "result" in scope


def test_constants_of_the_automatic_choice() -> None:
    text = (ROOT / "docs" / "engine.md").read_text()
    for name in ("MIN_UPDATES_CUDA", "MIN_UPDATES_CPU", "MIN_UPDATES_STUDY"):
        assert name in text
        assert f"{getattr(executor, name):,}".replace(",", " ") in text
