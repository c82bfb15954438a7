"""`dataset.svg`: what an offline run learns from, as a picture that the dashboard shows."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from helpers import config_for

from rl_training.data.dataset import TransitionDataset
from rl_training.experiment.run.dataset_picture import dataset_picture
from rl_training.experiment.run.trainer import Trainer
from rl_training.reports.live import LiveRuns

SVG = "{http://www.w3.org/2000/svg}"


def bars(picture: str) -> list[tuple[float, float]]:
    """(x, height) of every bar."""
    root = ElementTree.fromstring(picture)
    return [(float(bar.get("x", "")), float(bar.get("height", ""))) for bar in root.iter(f"{SVG}rect")]


def data(lengths: list[int], reward: float) -> TransitionDataset:
    total, ends = sum(lengths), np.cumsum(lengths) - 1
    terminated = np.isin(np.arange(total), ends)
    zeros = np.zeros((total, 2), np.float32)
    return TransitionDataset(
        obs=zeros, actions=np.zeros((total, 1), np.float32), rewards=np.full(total, reward, np.float32), next_obs=zeros,
        terminated=terminated, truncated=np.zeros(total, bool),
    )  # fmt: skip


def test_bars_are_as_high_as_their_episodes_are_many() -> None:
    picture = dataset_picture(data([4] * 6 + [10] * 3, 2.0))
    (left, six), (right, three) = [bar for bar in bars(picture) if bar[0] < 310]  # returns: 8 and 20
    assert left < right
    assert six == pytest.approx(2 * three)
    assert [height for x, height in bars(picture) if x >= 310] == [six, three]  # lengths
    assert "54 transitions in 9 episodes" in picture
    assert "return of an episode, mean 12.0" in picture
    assert "length of an episode, mean 6.0" in picture


def test_equal_episodes_are_one_bar() -> None:
    assert len(bars(dataset_picture(data([5, 5], 0.0)))) == 2


def test_runs_with_a_dataset_have_the_picture_and_others_do_not(tmp_path: Path) -> None:
    offline = Trainer(config_for("iql", tmp_path, total_timesteps=20), progress=False).run()
    online = Trainer(config_for("ppo", tmp_path), progress=False).run()
    assert len(bars((offline.run_dir / "dataset.svg").read_text())) >= 2
    assert not (online.run_dir / "dataset.svg").exists()
    runs = LiveRuns(tmp_path)
    runs.refresh()
    shown = {
        row["algo"]: [f["kind"] for f in runs[row["id"]].files() if f["path"] == "dataset.svg"]
        for row in runs.overview()
    }
    assert shown == {"iql": ["image"], "ppo": []}
