"""The documentation is correct: generated tables are up to date, links resolve, commands parse, code blocks run."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import posixpath
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
import typer
from helpers import evaluated_twice

from rl_training import registry
from rl_training.cli import main
from rl_training.cli.app import app
from rl_training.experiment.run.config import TrainConfig, read_config
from rl_training.experiment.tools.verify import steps_to
from rl_training.runtime.engine import executor

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_YET = {ROOT / "docs" / "benchmarks.md"}  # written by benchmarks/report.py after `make bench`


def loaded(name: str, folder: str = "docs") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return loaded("generate")


def test_the_page_on_defaults_is_that_of_its_results() -> None:
    defaults = loaded("defaults", "benchmarks")
    assert (ROOT / "docs" / "defaults.md").read_text() == defaults.report()
    named = {TrainConfig(**read_config(preset)).env_id for preset in registry.presets()}
    assert not named & {*defaults.DISCRETE, *defaults.CONTINUOUS}


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    """Every file of the site, as passed to mkdocs."""
    hook = loaded("mkdocs_hook")
    pages = {path.name: hook.rewrite(path.read_text(), f"docs/{path.name}", path.name) for path in PAGES[2:]}
    assert not pages.keys() & hook.pages().keys()
    docs = ROOT / "docs"
    pictures = {path.relative_to(docs).as_posix(): path.read_text() for path in docs.rglob("*.svg")}
    pictures |= {path.name: "" for path in docs.glob("*.png")}
    return {**pages, **pictures, **hook.pages()}


def test_site_has_a_page_for_every_algorithm(site: dict[str, str]) -> None:
    for entry in registry.entries().values():
        page = site[f"algorithms/{entry.name}.md"]
        assert entry.summary in page
        hyper = entry.load().Hyper
        assert all((f"| `{name}` |" in page) == (name not in hyper.unused) for name in hyper.model_fields)
        assert all(f"--config {preset}" in page for preset in registry.presets(entry.name))
    measured = json.loads((ROOT / "results" / "dqn__CartPole-v1.json").read_text())
    assert f"| CartPole-v1 | 50,000 | 5 | {measured['score']:.1f} |" in site["algorithms/dqn.md"]
    assert "<polyline" in site["algorithms/dqn__CartPole-v1.svg"]
    assert "### TrainConfig" in site["api/index.md"]
    assert "**`train_step(" in site["api/algorithms.md"]
    menu = json.dumps(loaded("mkdocs_hook").on_config({})["nav"])
    shown = set(re.findall(r'"([\w/]+\.md)"', menu))
    assert shown == {path for path in site if path.endswith(".md")}


def test_links_of_the_site_resolve(site: dict[str, str]) -> None:
    count = 0
    for page, text in site.items():
        outside = re.sub(r"(`{3,})[^`].*?\1", "", text, flags=re.DOTALL) if page.endswith(".md") else ""
        outside = re.sub(r"`[^`\n]*`|\\.", "", outside)
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", outside):
            if "://" in link:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) if link else page
            assert target in site, f"{page} links to {link}"
            headings = re.findall(r"^#+ (.*)$", site[target], re.MULTILINE)
            slugs = {re.sub(r"[^\w-]+", "-", heading.lower()).strip("-") for heading in headings}
            assert not anchor or anchor in slugs, f"{page} links to {link}#{anchor}"
            count += 1
    assert count > 50


@pytest.mark.parametrize(
    "path",
    [
        "docs/overview.md",
        "docs/configuration.md",
        "docs/verification.md",
        "docs/learning_curves.svg",
        "docs/sourcebook.md",
        "docs/fidelity.md",
        "docs/model_based.md",
        "docs/results.md",
    ],
)
def test_generated_tables_are_up_to_date(generate: ModuleType, path: str) -> None:
    assert (ROOT / path).read_text() == generate.generated(path), "run `make docs`"


def test_every_row_of_a_table_is_one_line_with_all_cells(site: dict[str, str]) -> None:
    """Markdown ends a table at the first line that is not a row, for example at a line break inside a cell."""
    pages = {page.name: page.read_text() for page in [*PAGES, ROOT / "CHANGELOG.md"]} | site
    rows = 0
    for page, text in pages.items():
        if not page.endswith(".md"):
            continue
        cells = None  # cells of the table's first row
        for line in re.sub(r"^ *(`{3,}).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
            row = line.strip()
            if row.startswith(("| ", "|--")):
                bars = len(re.findall(r"(?<!\\)\|", row))
                assert row.endswith("|"), f"{page}: {row}"
                assert bars == (cells or bars), f"{page}: {row}"
                cells = bars
                rows += 1
            else:
                assert not row or cells is None, f"{page}: text below a table: {row}"
                cells = None
    assert rows > 3000


def test_learning_curves_of_suites_are_up_to_date(generate: ModuleType) -> None:
    committed = {f"docs/curves/{path.name}" for path in (ROOT / "docs" / "curves").glob("*.svg")}
    assert committed == {path for path in generate.PICTURES if path.startswith("docs/curves/")}
    assert all((ROOT / path).read_text() == generate.generated(path) for path in committed), "run `make docs`"


@pytest.fixture(scope="module")
def fidelity() -> ModuleType:
    return loaded("fidelity")


def test_docstring_of_every_algorithm_names_its_source_and_its_deviations(fidelity: ModuleType) -> None:
    rows = fidelity.rows()
    assert {name for row in rows for name in row.names} >= registry.entries().keys()
    assert not [row.names for row in rows if not row.sources], "the first paragraph must cite a paper: Chen et al. 2021"
    assert not [row.names for row in rows if not row.deviations], "the last paragraph must start with `Deviations: `"
    assert not [row.names for row in rows if not row.checks], "no test names the algorithm"


def test_docstrings_cite_the_papers_of_the_registry(fidelity: ModuleType) -> None:
    cited = {name: row.sources for row in fidelity.rows() for name in row.names}
    for entry in registry.entries().values():
        for paper in fidelity.CITATION.findall(entry.summary):
            author, year = paper.split()[0].strip(","), paper[-4:]
            assert any(author in one and year in one for one in cited[entry.name]), f"{entry.name}: {paper}"


def test_reading_a_docstring(fidelity: ModuleType) -> None:
    doc = """Something (Doe et al. 2020a), after Doe & Roe 2019 and van Hasselt
    et al. 2016; not Eq. 3.

    Text (Other et al. 2021).

    Deviations: one thing;
    another, as in Third 2022.
    """
    sources, deviations = fidelity.described(doc)
    assert sources == ("Doe et al. 2020a", "Doe & Roe 2019", "van Hasselt et al. 2016")
    assert deviations == "one thing; another, as in Third 2022."
    assert fidelity.described("Something.\n\nNo deviations: none.") == ((), "")


def test_checks_are_the_tests_that_use_an_algorithm(fidelity: ModuleType) -> None:
    found = fidelity.checks("rl_training.algorithms.offline.xql", ("xql",))
    assert found.keys() >= {"test_algorithms_fidelity.py", "test_algorithms_offline.py"}
    assert "test_algorithms_ppo.py" not in found
    assert not fidelity.checks("rl_training.algorithms.nothing", ("nothing",))


def test_results_table_matches_the_result_files(generate: ModuleType, tmp_path: Path) -> None:
    evaluation = {"mean_return": 498.76, "iqm": 499.9, "ci95": [490.04, 500.0]}
    row = {
        "algo": "dqn", "env_id": "CartPole-v1", "env_steps": 50_000, "seeds": [0, 1, 2], "final_eval": evaluation,
        "threshold": 475, "passed": True, "source": "here", "score": 498.76,
    }  # fmt: skip
    (tmp_path / "dqn__CartPole-v1.json").write_text(json.dumps(row))
    extra = {**row, "algo": "sac", "env_id": "Hopper-v5", "passed": False}
    (tmp_path / "sac__Hopper-v5.json").write_text(json.dumps(extra))
    cut = {**extra, "env_id": "DMControl/walker-walk-v0", "completed": False, "total_timesteps": 100_000}
    (tmp_path / "sac__walker.json").write_text(json.dumps({**cut, "score": 9.87}))
    short = {line.split(" | ")[0]: line.split(" | ")[-1] for line in generate.overview(tmp_path).splitlines()}
    assert short["| `dqn`"] == "CartPole 499 (475) |"
    assert short["| `sac`"] == (
        "Hopper 499 (475, **missed**)<br>walker-walk 9.87 (475, **missed**, cut at 50,000 of 100,000 steps) |"
    )
    (tmp_path / "sac__walker.json").unlink()
    lines = generate.measured(tmp_path).splitlines()
    assert lines[2] == "| `dqn` | CartPole-v1 | 50,000 | 3 | 498.8 | 499.9 [490.0, 500.0] | 475 | yes | here |"
    assert "not run yet" in lines[3]
    assert lines[-1] == "| `sac` | Hopper-v5 | 50,000 | 3 | 498.8 | 499.9 [490.0, 500.0] | 475 | **no** | here |"


def test_steps_to_a_bar_count_until_it_is_reached_for_good() -> None:
    curve = {"step": [1, 2, 3, 4, 5], "mean_return": [-900.0, -240.0, -260.0, -250.0, -150.0]}
    assert steps_to(curve, -250.0) == 4
    assert steps_to(curve, -250.0, stay=False) == 2
    assert steps_to(curve, -100.0) is None


def marks(text: str) -> dict[str, list[str]]:
    """The algorithms of each mark: names in the registry if implemented, otherwise names in the sourcebook."""
    found: dict[str, list[str]] = {"implemented": [], "in progress": [], "deferred": [], "watchlist": []}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in ("algorithm", "---"):
            assert len(cells) == 5, line
            assert all(cells), line
            kind = next(kind for kind in found if cells[4].removeprefix("**").startswith(kind))
            assert kind in ("implemented", "in progress") or cells[4].removeprefix(f"{kind}: "), line
            found[kind] += re.findall(r"`(\w+)`", cells[4]) if kind == "implemented" else [cells[0]]
    return found


def test_sourcebook_agrees_with_the_registry() -> None:
    text = (ROOT / "docs" / "sourcebook.md").read_text()
    found = marks(text)
    assert set(found["implemented"]) == set(registry.entries())
    assert re.findall(r"^## (\d+)", text, re.MULTILINE) == [str(year) for year in range(2014, 2027)]
    assert all(found[kind] for kind in ("deferred", "watchlist"))
    numbers = re.findall(r"abs/(\d\d)(\d\d)\.(\d+)", text)
    assert all(1 <= int(month) <= 12 and len(rest) == (5 if year >= "15" else 4) for year, month, rest in numbers)


def test_marks_of_the_sourcebook_follow_the_registry(generate: ModuleType) -> None:
    """The sourcebook needs no edit by hand: a registered name is implemented, a removed one is in progress."""
    now = {entry.name: entry.summary for entry in registry.entries().values()}
    more = marks(generate.sourcebook({**now, "trpo": "TRPO", "new_one": "Something (Doe & Roe 2019)"}))
    assert {"trpo", "new_one"} <= set(more["implemented"])
    less = marks(generate.sourcebook({name: text for name, text in now.items() if name != "td3"}))
    assert "td3" not in less["implemented"]
    assert "TD3" in less["in progress"]
    assert "Doe & Roe" in generate.sourcebook({"new_one": "Something (Doe & Roe 2019)"})


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    models = [TrainConfig, *(entry.load().Hyper for entry in registry.entries().values())]
    for model in models:
        for name, field in model.model_fields.items():
            assert f"| `{name}` |" in text
            assert field.description, f"{model.__name__}.{name} has no docstring"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith(("http://", "https://")):
            target = (page.parent / link).resolve()
            assert target.exists() or target in NOT_YET, f"{page.name} links to {link}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"], ids=lambda p: p.name
)
def test_named_paths_and_modules_exist(page: Path) -> None:
    """Paths in backticks are relative to the repository or to src/rl_training."""
    package = ROOT / "src" / "rl_training"
    folders = {"src", "tests", "docs", "benchmarks", "examples", "results"}
    folders |= {path.name for path in package.iterdir() if path.is_dir()}
    for name in re.findall(r"`([\w./-]+)`", page.read_text()):
        if "/" in name and name.split("/")[0] in folders:
            assert (ROOT / name).exists() or (package / name).exists(), f"{page.name} names {name}"
        elif name.startswith("rl_training."):
            pkgutil.resolve_name(name)


def commands() -> list[str]:
    """All `rl-training ...` lines in shell blocks."""
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


@pytest.mark.slow
def test_commands_of_the_tutorial_work_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In order, with fewer steps; without the dashboard, which waits, and the search, which takes long."""
    pytest.importorskip("onnxscript")
    text = (ROOT / "docs" / "tutorial.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "docking.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    lines = [line for line in re.findall(r"^rl-training .*", text, re.MULTILINE) if line.split()[1] != "dashboard"]
    assert [line.split()[1] for line in lines] == ["lint-env", "train", "report", "eval", "tune", "export"]
    for line in lines:
        if " tune " not in line:
            run = next(iter(tmp_path.glob("runs/*")), tmp_path)
            words = shlex.split(re.sub("-n 15000", "-n 150 --no-progress", line.replace("runs/RUN", str(run))))
            sys.modules.pop("docking", None)  # each command is a process of its own
            gymnasium.registry.pop("Docking-v0", None)
            assert main(words[1:]) == 0, (line, capsys.readouterr().err)
    exec(compile(re.findall(r"```text\n(.*?)```", text, re.DOTALL)[-1], "block", "exec"), {})
    assert (tmp_path / "report.html").is_file()
    sys.modules.pop("docking", None)
    gymnasium.registry.pop("Docking-v0", None)


def test_all_commands_are_documented() -> None:
    group: Any = typer.main.get_command(app)
    assert {line.split()[1] for line in commands()} == set(group.commands)


LONG = ("README", "cookbook", "from_d3rlpy", "tutorial")  # pages whose blocks train for seconds


def python_blocks() -> list[Any]:
    blocks = []
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        if page.stem == "tutorial":  # one session, in which a block uses what the ones before it made
            found = ["\n".join(found)]
        marks = pytest.mark.slow if page.stem in LONG else ()
        blocks += [pytest.param(block, id=f"{page.stem}-{i}", marks=marks) for i, block in enumerate(found)]
    return blocks


@pytest.mark.parametrize("block", python_blocks())
def test_python_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the block as written, with fewer training steps and evaluations."""
    steps = 600 if "learning_starts=500" in block else 1100  # a hundred updates, also with the default of 1000
    short = re.sub(r"total_timesteps=[\d_]+", f"total_timesteps={steps}", block)
    short = re.sub(r"eval_interval=[\d_]+", "eval_interval=500", short)
    short = re.sub(r"learn\([\d_]+", f"learn({steps}", short)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrainConfig, "resolved", evaluated_twice)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(short, "block", "exec"), scope)
    assert "result" in scope


def test_documented_execution_thresholds_match_the_code() -> None:
    text = (ROOT / "docs" / "engine.md").read_text()
    for name in ("MIN_UPDATES_CUDA", "MIN_UPDATES_CPU", "MIN_UPDATES_STUDY", "MIN_UPDATES_UNROLLED"):
        assert name in text
        assert f"{getattr(executor, name):,}".replace(",", " ") in text
