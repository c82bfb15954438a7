"""Our reader and writer of Minari datasets against the package itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_training.data import load_transition_dataset
from rl_training.data.dataset_files import read_dataset, write_dataset

pytest.importorskip("h5py", reason="needs the offline extra: pip install rl-training[offline]")
minari = pytest.importorskip("minari", reason="needs the offline extra: pip install rl-training[offline]")

ENDS = ("terminations", "truncations", "truncations")


def episode(number: int, discrete: bool) -> dict[str, Any]:
    steps, g = 4 + number, np.random.default_rng(number)
    flags = {name: np.zeros(steps, np.bool_) for name in ("terminations", "truncations")}
    flags[ENDS[number]][-1] = True
    actions = g.integers(0, 2, steps) if discrete else g.uniform(-2, 2, (steps, 1)).astype(np.float32)
    size = 4 if discrete else 3
    obs = g.uniform(-1, 1, (steps + 1, size)).astype(np.float32)
    return {"observations": obs, "actions": actions, "rewards": g.standard_normal(steps), **flags}


@pytest.mark.parametrize("discrete", [False, True])
def test_files_written_by_minari_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, discrete: bool) -> None:
    import gymnasium

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    parts = [episode(number, discrete) for number in range(3)]
    buffers = [minari.data_collector.EpisodeBuffer(id=n, infos={}, **part) for n, part in enumerate(parts)]
    env = gymnasium.make("CartPole-v1" if discrete else "Pendulum-v1")
    minari.create_dataset_from_buffers(
        "test/made-v0", buffers, env=env, eval_env=env, algorithm_name="none", author="nobody",
        author_email="nobody@example.org", code_permalink="https://example.org", description="made up",
        data_format="hdf5",
    )  # fmt: skip
    dataset = load_transition_dataset("minari", path="test/made-v0")
    for name, column in (("actions", "actions"), ("rewards", "rewards"), ("terminations", "terminated")):
        np.testing.assert_array_equal(getattr(dataset, column), np.concatenate([part[name] for part in parts]))
    np.testing.assert_array_equal(dataset.next_obs, np.concatenate([part["observations"][1:] for part in parts]))
    assert np.flatnonzero(dataset.truncated).tolist() == [8, 14]
    assert dataset.actions.dtype == parts[0]["actions"].dtype

    # And back: the package reads what we write, bit for bit.
    write_dataset(dataset, tmp_path / "ours" / "copy-v0", "minari", env_id=env.spec.id)
    again = minari.load_dataset("ours/copy-v0")
    assert (again.total_episodes, again.total_steps) == (3, len(dataset))
    for part, theirs in zip(parts, again.iterate_episodes()):
        for name, value in part.items():
            np.testing.assert_array_equal(getattr(theirs, name), value)
    assert again.action_space.contains(dataset.actions[0])
    assert again.observation_space.contains(dataset.obs[0])
    assert read_dataset("ours/copy-v0", "minari").content_hash() == dataset.content_hash()
