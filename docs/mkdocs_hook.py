"""Generate the pages of the site that are not files in docs/: home, one per algorithm, API reference, examples.

mkdocs calls the `on_...` functions (mkdocs.yml names this file). `pages()` does not need mkdocs, so the tests can check
the site and its links without it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import posixpath
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import generate

from rl_training import registry
from rl_training.registry import results

ROOT = generate.ROOT
PACKAGES = ("experiment", "algorithms", "models", "data", "envs", "runtime", "ops", "api")
GUIDES = ("overview", "quickstart", "tutorial", "cookbook", "from_sb3", "from_cleanrl", "from_d3rlpy", "from_rllib",
          "configuration", "custom", "environments", "studies", "gpu", "scale", "reliability", "data", "offline",
          "imitation", "model_based", "world_models", "experiments", "reports", "export", "tracking", "plugins",
          "engine")  # fmt: skip
ELSEWHERE = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md",
    "LICENSE": "license.md", "examples": "examples.md",
}  # fmt: skip


# --- links -----------------------------------------------------------------------------------------------------------


def rewrite(markdown: str, source: str, page: str) -> str:
    """Rewrite the links of a repository file for its page on the site."""

    def replace(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        if "://" in link or not link:
            return match[0]
        target, moved = place(posixpath.normpath(posixpath.join(posixpath.dirname(source), link)))
        return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{moved or anchor})"

    return re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", replace, markdown)


def place(path: str) -> tuple[str, str]:
    """(page, anchor) of the site page that shows a repository file."""
    name = posixpath.basename(path)
    if path in ELSEWHERE:
        return ELSEWHERE[path], ""
    if path.startswith("docs/"):
        return path.removeprefix("docs/"), ""
    if path.startswith("examples/"):
        return "examples.md", f"#{name.removesuffix('.py')}"
    if path.startswith("tests/plugin_example/"):
        return "plugin_example.md", ""
    if path.startswith("src/rl_training/algorithms/") and name.removesuffix(".py") in registry.entries():
        return f"algorithms/{name.removesuffix('.py')}.md", ""
    return path, ""  # no page: the strict build and the tests report it


# --- pages -----------------------------------------------------------------------------------------------------------


@cache
def pages() -> dict[str, str]:
    """Generated files of the site: path -> text."""
    out = {
        page: rewrite((ROOT / source).read_text(encoding="utf-8"), source, page)
        for source, page in ELSEWHERE.items()
        if source.endswith(".md")
    }
    out["license.md"] = "# License\n\n" + code((ROOT / "LICENSE").read_text(encoding="utf-8"), "text")
    out["examples.md"] = "# Examples\n\n" + "\n\n".join(
        f"## {path.stem}\n\n{code(path.read_text(encoding='utf-8'))}"
        for path in sorted((ROOT / "examples").glob("*.py"))
    )
    example = ROOT / "tests" / "plugin_example"
    files = [path for path in sorted(example.rglob("*")) if path.suffix in (".py", ".toml")]
    out["plugin_example.md"] = "# A plug-in package\n\n" + "\n\n".join(
        f"`{path.relative_to(example)}`\n\n{code(path.read_text(encoding='utf-8'), path.suffix[1:])}" for path in files
    )
    out["algorithms/index.md"] = "# Algorithms\n\n" + re.sub(
        r"\| `(\w+)` \|", r"| [\1](\1.md) |", generate.algorithms()
    )
    for entry in registry.entries().values():
        out[f"algorithms/{entry.name}.md"] = algorithm(entry)
        for row in measured(entry.name):
            if row.get("curve"):
                out[f"algorithms/{entry.name}__{row['env_id'].replace('/', '-')}.svg"] = curve(row)
    out["api/index.md"] = "# API\n\n" + api("rl_training")
    for package in PACKAGES:
        names = [f"rl_training.{package}", *submodules(f"rl_training.{package}")]
        out[f"api/{package}.md"] = f"# rl_training.{package}\n\n" + "\n\n".join(filter(None, map(api, names)))
    return out


def code(text: str, language: str = "python") -> str:
    return f"````{language}\n{text.rstrip()}\n````"


@cache
def measured(name: str) -> list[dict[str, Any]]:
    return results(ROOT / "results").get(name, [])


def algorithm(entry: registry.Entry) -> str:
    """The page of an algorithm: docstring, presets, results and settings."""
    cls = entry.load()
    module = importlib.import_module(entry.target.partition(":")[0])
    parts = [f"# {entry.name}", f"{entry.summary}.", inspect.cleandoc(module.__doc__ or "")]
    if entry.defaults:
        changes = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in entry.defaults.items())
        parts.append(f"A variant of `{cls.__mro__[1].name}` with {changes}.")
    kinds = ", ".join(kind.replace("_", "-") for kind in entry.actions)
    parts.append(f"Family: {entry.family}. Actions: {kinds}. Python: `from rl_training import {entry.class_name}`.")
    if found := registry.presets(entry.name):
        commands = "\n".join(f"rl-training train --config {preset}" for preset in found)
        parts += ["## Presets", code(commands, "bash")]
    parts.append("## Results")
    rows = measured(entry.name)
    if rows:
        head = ["environment", "steps", "seeds", "mean return", "IQM [95 % interval]", "bar", "reached", "source"]
        parts.append(generate.table(head, [generate._result(row)[1:] for row in rows]))
        parts += [
            f"![{row['env_id']}]({entry.name}__{row['env_id'].replace('/', '-')}.svg)"
            for row in rows
            if row.get("curve")
        ]
    else:
        parts.append("There is no committed result. The [ledger](../verification.md) lists its bar.")
    parts += ["## Settings", generate.table(["field", "default", "meaning"], generate._fields(cls.Hyper))]
    return "\n\n".join(parts)


def curve(row: dict[str, Any]) -> str:
    """A small plot of the mean return over the seeds, with its 95 % band."""
    data = row["curve"]
    steps, means = data["step"], data["mean_return"]
    low, high = data.get("ci95_low", means), data.get("ci95_high", means)
    bottom, top = min(*low, row["threshold"]), max(*high, row["threshold"])
    span = (top - bottom) or 1.0

    def at(step: float, value: float) -> str:
        return f"{60 + 520 * step / max(steps[-1], 1):.1f},{230 - 200 * (value - bottom) / span:.1f}"

    line = " ".join(map(at, steps, means))
    band = " ".join([*map(at, steps, high), *map(at, reversed(steps), reversed(low))])
    bar = at(0, row["threshold"]).split(",")[1]
    text = 'font-family="sans-serif" font-size="12" fill="#888"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 270" role="img">'
        f"<title>{row['algo']} on {row['env_id']}</title>"
        f'<polygon points="{band}" fill="#3f51b5" opacity="0.2"/>'
        f'<line x1="60" x2="580" y1="{bar}" y2="{bar}" stroke="#c62828" stroke-dasharray="4 4"/>'
        f'<polyline points="{line}" fill="none" stroke="#3f51b5" stroke-width="2"/>'
        f'<text x="55" y="34" text-anchor="end" {text}>{top:.0f}</text>'
        f'<text x="55" y="234" text-anchor="end" {text}>{bottom:.0f}</text>'
        f'<text x="580" y="255" text-anchor="end" {text}>{steps[-1]:,} steps; bar {row["threshold"]:g}</text></svg>\n'
    )


# --- API reference ---------------------------------------------------------------------------------------------------


def submodules(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return sorted(info.name for info in pkgutil.walk_packages(path, f"{package}."))


def api(name: str) -> str:
    """The reference of a module: its docstring and the public classes and functions it defines."""
    module = importlib.import_module(name)
    if name == "rl_training":  # names are imported lazily
        found = [(key, getattr(module, key)) for key in module.__all__]
    else:
        found = [(k, v) for k, v in vars(module).items() if not k.startswith("_") and defined(v, name)]
    parts = [f"## {name}"] * (name.count(".") != 1) + [doc(module)]
    for key, value in found:
        parts += [f"### {key}", code(f"{key}{signature(value)}"), doc(value)]
        if inspect.isclass(value):
            parts += list(methods(value))
    return "\n\n".join(filter(None, parts)) if found or doc(module) else ""


def defined(value: Any, module: str) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module


def methods(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not name.startswith("_") and inspect.isfunction(function) and doc(function):
            yield f"**`{name}{signature(function)}`**\n\n{doc(function)}"


def signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", text) if len(text) <= 600 else "(...)"


def doc(value: Any) -> str:
    """The docstring as Markdown. Brackets in it are shapes and types, not links or tags, so they are escaped."""
    own = value.__doc__ if not inspect.isclass(value) else value.__dict__.get("__doc__")
    text = inspect.cleandoc(own or "")
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):
        return ""  # generated by dataclasses and named tuples: repeats the signature
    parts = re.split(r"(`[^`]*`|^    .*$)", text, flags=re.MULTILINE)
    return "".join(part if i % 2 else re.sub(r"([\[\]<>*_])", r"\\\1", part) for i, part in enumerate(parts))


# --- mkdocs ----------------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    algorithms = [f"algorithms/{name}.md" for name in registry.entries()]
    config["nav"] = [
        {"Home": "index.md"},
        {"Guides": [f"{name}.md" for name in GUIDES]},
        {"Algorithms": ["algorithms/index.md", *algorithms]},
        {"Results": ["results.md", "verification.md", "fidelity.md", "benchmarks.md", "defaults.md", "model_error.md"]},
        {"Sourcebook": "sourcebook.md"},
        {"API": ["api/index.md", *(f"api/{package}.md" for package in PACKAGES)]},
        {"Project": ["contributing.md", "changes.md", "examples.md", "plugin_example.md", "license.md"]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = page.file.src_uri
    return markdown if path in pages() else rewrite(markdown, f"docs/{path}", path)
