"""The table that puts a method beside its base: scores at the same steps, and nothing that cannot be compared."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parent.parent / "docs" / "side_by_side.py"
ENV = "Pendulum-v1"


@pytest.fixture
def page() -> Any:
    spec = importlib.util.spec_from_file_location("side_by_side", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(algo: str, scores: dict[int, float], **fields: Any) -> dict[str, Any]:
    last = list(scores.values())[-1]
    curve = {
        "step": [*scores],
        "mean_return": [*scores.values()],
        "ci95_low": [x - 1.0 for x in scores.values()],
        "ci95_high": [x + 2.0 for x in scores.values()],
    }
    final = {"mean_return": last, "ci95": [last - 3.0, last + 4.0]}
    return {"algo": algo, "env_id": ENV, "env_steps": [*scores][-1], "final_eval": final, "curve": curve, **fields}


def table(page: Any, folder: Path, *results: dict[str, Any]) -> list[list[str]]:
    costs = folder / "costs.json"
    costs.write_text(json.dumps({"costs": [{"algo": "bro", "base": "sac", "ratio": 9.61}]}))
    return page.rows(page.by_key({str(i): [row] for i, row in enumerate(results)}), costs)


def test_base_is_read_at_the_steps_of_the_method(page: Any, tmp_path: Path) -> None:
    base = result("sac", {4_000: -900.0, 9_000: -300.0, 20_000: -150.0})
    (row,) = table(page, tmp_path, base, result("bro", {10_000: -200.0}))
    assert row == [
        "`bro`", "`sac`", ENV, "10,000", "-200.0 [-203.0, -196.0]", "-300.0 [-301.0, -298.0], at 9,000", "yes", "9.6 x",
    ]  # fmt: skip
    worse, same = (table(page, tmp_path, base, result("simba", {20_000: x}))[0] for x in (-151.0, -150.0))
    assert worse[4:] == ["-151.0 [-154.0, -147.0]", "-150.0 [-151.0, -148.0]", "**no**", "-"]
    assert same[6] == "equal"


def test_what_cannot_be_compared_is_left_out(page: Any, tmp_path: Path) -> None:
    method = result("bro", {10_000: -200.0})
    assert table(page, tmp_path, method) == []
    assert table(page, tmp_path, method, result("sac", {7_000: -300.0, 20_000: -150.0})) == []  # not evaluated there
    assert table(page, tmp_path, method, result("sac", {7_000: -300.0})) == []  # trained for less
    cut = {**method, "completed": False}
    assert table(page, tmp_path, cut, result("sac", {10_000: -300.0})) == []
    assert len(table(page, tmp_path, method, result("sac", {8_000: -300.0}))) == 1


def test_every_pair_names_results_of_the_ledger(page: Any) -> None:
    from rl_training.experiment.tools.verify import ledger

    entries = {(entry.algo, entry.env_id, entry.variant) for entry in ledger()}
    for pair in page.PAIRS:
        assert {(pair.algo, pair.env_id, variant) for variant in ("", pair.variant)} & entries, pair
    missing = [pair for pair in page.PAIRS if (pair.base, pair.env_id, pair.variant) not in entries]
    assert not missing
