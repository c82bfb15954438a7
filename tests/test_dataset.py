"""Datasets: every format bit for bit, episodes and returns at truncations, recipes and their hash, bad input."""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.data import DatasetSource, TransitionDataset, load_transition_dataset
from rl_training.data import dataset_files as files
from rl_training.data.dataset_files import read_dataset, write_dataset
from rl_training.envs import make_env, make_spec
from rl_training.errors import UserError
from rl_training.ops import rng


def made(
    rows: int = 12, ends: dict[int, str] | None = None, discrete: bool = False, **changes: Any
) -> TransitionDataset:
    """Rows that follow each other; `ends` says which rows are terminated or truncated."""
    g = np.random.default_rng(rows)
    ends = ends if ends is not None else {4: "terminated", rows - 1: "truncated"}
    obs = g.standard_normal((rows + 1, 3)).astype(np.float32)
    flags = {kind: np.array([ends.get(i) == kind for i in range(rows)]) for kind in ("terminated", "truncated")}
    actions: Any = g.integers(0, 4, rows) if discrete else g.uniform(-2.0, 2.0, (rows, 1)).astype(np.float32)
    columns = {"obs": obs[:-1], "next_obs": obs[1:], "actions": actions, "rewards": g.standard_normal(rows), **flags}
    return TransitionDataset(**{**columns, **changes})


def assert_equal(a: TransitionDataset, b: TransitionDataset) -> None:
    left, right = a.arrays(), b.arrays()
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert array.tobytes() == np.ascontiguousarray(right[name]).tobytes(), name
    assert a.content_hash() == b.content_hash()


@pytest.mark.parametrize("name", ["data.npz", "data.hdf5", "data-v0"])
@pytest.mark.parametrize("discrete", [False, True])
def test_round_trip_is_bit_for_bit(tmp_path: Path, name: str, discrete: bool) -> None:
    dataset = made(discrete=discrete)
    write_dataset(dataset, tmp_path / name)
    assert_equal(read_dataset(tmp_path / name), dataset)
    if name == "data.npz":
        full = made().with_returns(0.9).with_next_actions()
        write_dataset(full, tmp_path / "full.npz")
        assert_equal(read_dataset(tmp_path / "full.npz"), full)


def test_large_arrays_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = made(200)
    for name in ("a.npz", "a.hdf5"):
        write_dataset(dataset, tmp_path / name)
        monkeypatch.setattr(files, "MAPPED_FROM", 1)
        mapped = read_dataset(tmp_path / name)
        assert isinstance(mapped.obs, np.memmap)
        assert_equal(mapped, dataset)


def test_dict_observations_round_trip_through_npz(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (12, 1, 8, 8), dtype=np.uint8)
    obs = {"image": image, "vector": np.ones((12, 2), np.float32)}
    dataset = made(obs=obs, next_obs=obs)
    write_dataset(dataset, tmp_path / "mixed.npz")
    assert_equal(read_dataset(tmp_path / "mixed.npz"), dataset)


def test_d4rl_file_without_next_observations(tmp_path: Path) -> None:
    """Next observations are the following row's; a row cut by a timeout has none and is left out."""
    h5py = pytest.importorskip("h5py")
    obs = np.arange(6, dtype=np.float32)[:, None]
    with h5py.File(tmp_path / "d.hdf5", "w") as file:
        file["observations"], file["actions"], file["rewards"] = obs, obs, obs[:, 0]
        file["terminals"] = np.array([0, 0, 1, 0, 0, 0], np.uint8)
        file["timeouts"] = np.array([0, 0, 0, 0, 0, 1], np.uint8)
    dataset = read_dataset(tmp_path / "d.hdf5")
    assert dataset.obs[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert dataset.next_obs[[0, 1, 3, 4], 0].tolist() == [1, 2, 4, 5]
    assert dataset.terminated.tolist() == [False, False, True, False, False]
    assert dataset.truncated.tolist() == [False, False, False, False, True]


def test_returns_and_next_actions_stop_at_the_ends_of_episodes() -> None:
    dataset = made(7, {2: "terminated", 4: "truncated"}, rewards=np.arange(1.0, 8.0))
    returns = dataset.with_returns(0.5).returns
    expected = [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3, 4 + 0.5 * 5, 5, 6 + 0.5 * 7, 7]
    np.testing.assert_allclose(returns, expected)
    with_next = dataset.with_next_actions()
    assert with_next.has_next.tolist() == [True, True, False, True, False, True, False]
    known = np.flatnonzero(with_next.has_next)
    np.testing.assert_array_equal(with_next.next_actions[known], dataset.actions[known + 1])
    np.testing.assert_allclose(dataset.episode_returns(), [6.0, 9.0, 13.0])


def test_rewards_are_scaled_shifted_clipped(tmp_path: Path) -> None:
    write_dataset(made(rewards=np.linspace(-3, 3, 12)), tmp_path / "a.npz")
    changes: dict[str, Any] = {"reward_scale": 2.0, "reward_shift": 1.0, "reward_clip": (-4, 4)}
    changed = load_transition_dataset("npz", path=str(tmp_path / "a.npz"), **changes)
    np.testing.assert_allclose(changed.rewards, np.clip(2 * np.linspace(-3, 3, 12) + 1, -4, 4), rtol=1e-6)
    ranged = load_transition_dataset("npz", path=str(tmp_path / "a.npz"), reward_scale="return_range")
    returns = ranged.episode_returns()
    assert returns.max() - returns.min() == pytest.approx(1000.0, rel=1e-4)


def test_mix_by_ratio_joins_at_episode_ends(tmp_path: Path) -> None:
    first, second = made(10, {}), made(30, {14: "terminated"})
    write_dataset(first, tmp_path / "a.npz")
    write_dataset(second, tmp_path / "b.npz")
    parts = [{"kind": "npz", "path": str(tmp_path / name)} for name in ("a.npz", "b.npz")]
    mixed = load_transition_dataset(mix=parts, ratio=(1, 2))
    assert len(mixed) == 30
    np.testing.assert_array_equal(mixed.obs, np.concatenate([first.obs, second.obs[:20]]))
    assert np.flatnonzero(mixed.truncated).tolist() == [9, 29]
    assert len(load_transition_dataset(mix=parts)) == 40


RANDOM = {"kind": "random", "env_id": "Pendulum-v1", "size": 450}


def test_the_same_recipe_has_the_same_hash() -> None:
    first, again = load_transition_dataset(**RANDOM), load_transition_dataset(**RANDOM)
    assert len(first) == 450
    assert first.content_hash() == again.content_hash()
    assert first.content_hash() != load_transition_dataset(**RANDOM, seed=1).content_hash()
    for part in first.episodes():
        np.testing.assert_array_equal(first.next_obs[part][:-1], first.obs[part][1:])
    assert first.actions.min() < -1.8
    assert first.actions.max() > 1.8


def test_policy_and_replay_of_a_trained_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_TRAINING_CACHE", str(tmp_path))
    train = {"preset": "sac/pendulum", "total_timesteps": 130, "eval_episodes": 1, "algo_kwargs": {"hidden_sizes": [8]}}
    policy = load_transition_dataset("policy", train=train, size=60)
    runs = [path for path in (tmp_path / "agents").iterdir() if path.suffix != ".lock"]
    assert len(runs) == 1  # complete, and nothing left over but the lock
    started = (runs[0] / "metadata.json").stat().st_mtime_ns
    assert policy.content_hash() == load_transition_dataset("policy", train=train, size=60).content_hash()
    noisy = load_transition_dataset("policy", path=str(runs[0]), size=60, noise=0.5)
    assert noisy.content_hash() != policy.content_hash()
    replay = load_transition_dataset("replay", train=train)
    assert len(replay) == 130
    np.testing.assert_array_equal(replay.next_obs[:-1], replay.obs[1:])  # one episode of 200 steps
    assert replay.truncated[-1]
    assert (runs[0] / "metadata.json").stat().st_mtime_ns == started  # trained once


def test_encoded_actions_and_batches() -> None:
    env = make_env("Pendulum-v1")
    spec = make_spec("Pendulum-v1", env.observation_space, env.action_space)
    raw = made()
    data = raw.encoded(spec, env.observation_space, env.action_space)
    np.testing.assert_allclose(data.actions, raw.actions / 2.0)
    source = DatasetSource(data, 0.9, ("returns", "next_actions"))
    tensors = source.init(3, torch.device("cpu"))
    assert tensors["obs"].shape == (3, 12, 3)
    assert tensors["obs"].untyped_storage().nbytes() == 12 * 3 * 4  # the seeds share the rows
    batch = torch.vmap(lambda t, k: source.sample(t, k, 64, torch.zeros(())))(
        tensors, torch.stack([rng.key_from_seed(s) for s in range(3)])
    )
    rows = batch["indices"]
    assert set(rows.flatten().tolist()) == set(range(12))
    assert not torch.equal(rows[0], rows[1])
    np.testing.assert_allclose(batch["discounts"], np.where(raw.terminated[rows], 0.0, 0.9), rtol=1e-6)
    np.testing.assert_array_equal(batch["returns"], data.with_returns(0.9).returns[rows])


def test_discrete_actions_keep_their_type() -> None:
    env = make_env("Acrobot-v1")
    spec = make_spec("Acrobot-v1", env.observation_space, env.action_space)
    data = made(discrete=True, obs=np.zeros((12, 6), np.float32), next_obs=np.zeros((12, 6), np.float32))
    with pytest.raises(UserError, match="range from 0 to 3"):
        data.encoded(spec, env.observation_space, env.action_space)
    fine = data.map_rows(lambda x: x)
    fine = TransitionDataset(**{**fine.columns(), "actions": fine.actions % 3})
    assert fine.encoded(spec, env.observation_space, env.action_space).actions.dtype == np.int64


def _npz(path: Path, **arrays: Any) -> str:
    np.savez(path / "bad.npz", **arrays)
    return str(path / "bad.npz")


GOOD = made().columns()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"kind": "npz", "path": "missing.npz"}, "does not exist"),
        ({"kind": "hdf5", "path": "missing.hdf5"}, "does not exist"),
        ({"kind": "minari", "path": "no/such-v0"}, "no Minari dataset"),
        ({"kind": "npz"}, "needs a path"),
        ({"kind": "policy"}, "path or train"),
        ({"kind": "rondom"}, "'random'"),
        ({"kind": "random", "sizes": 3}, "Did you mean 'size'"),
        ({"kind": "random"}, "set env_id"),
        ({"kind": "random", "env_id": "evil:Env-v0"}, "module 'evil' cannot be imported"),
        ({"kind": "npz", "path": "x", "ratio": [1.0]}, "ratio can only be used with mix"),
    ],
)
def test_bad_recipes(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_transition_dataset(**recipe)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, "has no 'rewards'"),
        ({"rewards": np.zeros(5)}, "same length"),
        ({"rewards": np.full(12, np.nan)}, "NaN"),
        ({"terminated": np.full(12, 2)}, "true or false"),
        ({"obs": np.array([object()] * 12)}, "pickled"),
        ({"next_obs": np.zeros((12, 4), np.float32)}, "same shape"),
    ],
)
def test_bad_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = _npz(tmp_path, **{k: v for k, v in {**GOOD, **changes}.items() if v is not None})
    with pytest.raises(UserError, match=message) as error:
        read_dataset(path)
    assert str(error.value).count("bad.npz") == 1


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        write_dataset(made(), tmp_path / "new-v0", "minari")
    assert list(tmp_path.iterdir()) == []


def test_hostile_npz(tmp_path: Path) -> None:
    """A header that claims a terabyte, and a file that is none."""
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UserError, match="not an npz"):
        read_dataset(tmp_path / "text.npz")
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (250000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("obs.npy", b"\x93NUMPY\x01\x00v\x00" + header)
    with pytest.raises(UserError, match="claims"):
        read_dataset(tmp_path / "huge.npz")


def _hostile(file: Any, how: str) -> None:
    """Replace the observations of an HDF5 file."""
    import h5py

    old = file["observations"][()]
    del file["observations"]
    if how == "external link":
        file["observations"] = h5py.ExternalLink("/etc/passwd", "x")
    elif how == "soft link":
        file["observations"] = h5py.SoftLink("/observations")
    elif how == "external":
        file.create_dataset("observations", old.shape, old.dtype, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
    elif how == "huge":
        file.create_dataset("observations", (2**40, *old.shape[1:]), old.dtype, chunks=True)
    elif how == "type":
        file["observations"] = old.dtype
    elif how == "single":
        file["observations"] = 1.0


@pytest.mark.parametrize("how", ["external link", "soft link", "external", "huge", "type", "single"])
def test_hostile_hdf5_files_are_refused(tmp_path: Path, how: str) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "d.hdf5"
    write_dataset(made(), path)
    with h5py.File(path, "a") as file:
        _hostile(file, how)
    with pytest.raises(UserError, match="observations"):
        read_dataset(path)


def test_damaged_dataset_files_are_refused(tmp_path: Path) -> None:
    """Errors of h5py and zlib of all kinds are one sentence, wherever the damage is."""
    pytest.importorskip("h5py")
    for name, step in (("d.hdf5", 61), ("d.npz", 31)):
        path = tmp_path / name
        write_dataset(made(), path)
        if name == "d.npz":
            np.savez_compressed(path, **made().arrays())
        data = path.read_bytes()
        for k in range(0, len(data), step):
            path.write_bytes(data[:k] + bytes([data[k] ^ 0x55]) + data[k + 1 :])
            with contextlib.suppress(UserError):
                read_dataset(path)


def test_a_minari_file_with_other_groups_is_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    write_dataset(made(), tmp_path / "d")
    with h5py.File(tmp_path / "d" / "data" / "main_data.hdf5", "a") as file:
        file.create_group("episode_x")
    assert len(read_dataset(tmp_path / "d")) == len(made())
