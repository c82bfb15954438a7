"""`rl-training dataset`: make, inspect, convert, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_training.cli import main
from rl_training.data.dataset_files import read_dataset
from rl_training.data.levels import level_recipe, normalized_score
from rl_training.data.recipes import DatasetRecipe
from rl_training.errors import UserError


def run(capsys: Any, *words: Any) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_make_inspect_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "a.npz"
    status, out, _ = run(
        capsys, "dataset", "make", "--env", "Pendulum-v1", "--level", "random", "-n", 450, "-o", made, "--json"
    )
    assert status == 0
    facts = json.loads(out)
    assert (facts["transitions"], facts["terminated"]) == (450, 0)
    assert facts["action_coverage"] == 1.0
    assert sum(facts["histogram"]["counts"]) == facts["episodes"]
    for name in ("b.hdf5", "c-v0", "d.npz"):
        source = {"b.hdf5": "a.npz", "c-v0": "b.hdf5", "d.npz": "c-v0"}[name]
        assert run(capsys, "dataset", "convert", tmp_path / source, "-o", tmp_path / name)[0] == 0
    assert read_dataset(tmp_path / "d.npz").content_hash() == facts["hash"] == read_dataset(made).content_hash()
    status, out, _ = run(capsys, "dataset", "inspect", made)
    assert status == 0
    assert "450 in" in out
    assert "#" in out
    assert facts["hash"] in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("inspect", "nowhere.npz"), "does not exist"),
        (("make", "-o", "x.npz", "--level", "medium"), "needs --env"),
        (("make", "-o", "x.npz", "--level", "mediun", "--env", "Pendulum-v1"), "Did you mean 'medium'"),
        (("make", "-o", "x.npz", "--level", "medium", "--env", "Acrobot-v1"), "no agent is known"),
        (("make", "-o", "x.npz"), "set env_id"),
        (("make", "-o", ".", "--env", "Pendulum-v1"), "already exists"),
    ],
)
def test_bad_input_is_rejected(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, "dataset", *words)
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("level", ["random", "medium", "medium-replay", "expert", "medium-expert"])
def test_every_level_is_a_valid_recipe(level: str) -> None:
    DatasetRecipe(**level_recipe(level, "Pendulum-v1", 1000))
    with pytest.raises(UserError, match="Levels"):
        level_recipe("x" + level, "Pendulum-v1")


def test_normalized_score_uses_the_published_returns() -> None:
    assert normalized_score("HalfCheetah-v5", -280.18) == 0.0
    assert normalized_score("Hopper-v5", 3234.3) == 100.0
    assert normalized_score("Walker2d-v5", (4592.3 + 1.629) / 2) == pytest.approx(50.0)
    assert normalized_score("Pendulum-v1", -150.0) is None
