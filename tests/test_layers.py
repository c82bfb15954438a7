"""Each package imports only from the layers below it, and there are no circular imports. Imports inside functions and
under TYPE_CHECKING count too; there are no exceptions."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
LAYERS = (  # packages on the same line do not import each other
    ("errors", "version", "machine"),
    ("spec", "registry", "imports"),
    ("ops",),
    ("envs", "models"),
    ("data",),
    ("algorithms",),
    ("runtime.engine",),
    ("runtime.learners",),
    ("runtime.loops", "runtime.evaluator"),
    ("runtime",),
    ("cluster",),
    ("experiment.run",),
    ("experiment.studies", "experiment.tools", "experiment.registry"),
    ("experiment",),
    ("reports",),
    ("api",),
    ("cli",),
    ("__main__",),
)
RANK = {f"rl_training.{name}": rank for rank, names in enumerate(LAYERS) for name in names}
RANK["rl_training"] = len(LAYERS)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in (SRC / "rl_training").rglob("*.py")}


def imports(module: str) -> set[str]:
    """The modules of this library that a module imports, anywhere in its source."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name.partition(".")[0] == "rl_training"} - {module}


def package(module: str) -> str:
    """The innermost listed package that contains a module."""
    while module not in RANK:
        module = module.rpartition(".")[0]
    return module


def allowed(importer: str, imported: str) -> bool:
    above, below = package(importer), package(imported)
    return above == below or RANK[above] > RANK[below]


def test_packages_import_only_from_lower_layers() -> None:
    assert not [f"{a} -> {b}" for a in MODULES for b in imports(a) if not allowed(a, b)]


def test_every_package_has_a_layer() -> None:
    """A new package must be added to LAYERS. Otherwise it would count as the root, which may import anything."""
    assert {name for name in MODULES if package(name) == "rl_training"} == {"rl_training"}


def test_there_are_no_circular_imports() -> None:
    graph = {module: imports(module) for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(MODULES)  # CycleError names the cycle
