"""Checkpoints: what is saved comes back bit for bit, and the right one is found, kept and removed."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_training.experiment.run import checkpoint as ck
from rl_training.experiment.run import tensor_file
from rl_training.experiment.run.atomic import temporary_sibling

TENSORS = {"state": {"w": torch.arange(6.0).reshape(2, 3)}, "replay": {"a": torch.arange(5)}}


def save(directory: Path, step: int, kind: str = "step", meta: dict | None = None) -> Path:
    tensors = TENSORS if kind == "step" else {"state": TENSORS["state"]}
    return ck.save_checkpoint(directory, f"{kind}_{step:012d}", tensors=tensors, meta=meta or {"step": step})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*raw)


def many_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in tensor_file.DTYPES:
        noise = torch.randint(0, 2 if dtype == torch.bool else 256, (24 * dtype.itemsize,), generator=generator)
        tensors[str(dtype)] = noise.to(torch.uint8).view(dtype).reshape(2, 3, 4)
        tensors[f"{dtype} scalar"] = tensors[str(dtype)][0, 0, 0]
        tensors[f"{dtype} empty"] = torch.empty((0, 3), dtype=dtype)
    base = torch.randn(8, 6)
    tensors |= {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(5, 6),
        "shared": base,
        "shared again": base,
        "part of shared": base[2:4],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "special": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        'odd "näme"/with.dots': torch.ones(1),
    }
    return tensors


def test_round_trip_of_every_dtype_layout_and_shape(tmp_path: Path) -> None:
    tensors = {"state": many_tensors(), "nothing": {}}
    path = ck.save_checkpoint(tmp_path, "step_000000000007", tensors=tensors, meta={})
    loaded = ck.load_checkpoint(path)
    assert set(loaded.tensors) == {"state", "nothing"}
    assert loaded.tensors["nothing"] == {}
    assert set(loaded.tensors["state"]) == set(tensors["state"])
    for name, tensor in tensors["state"].items():
        assert same_bits(tensor.detach(), loaded.tensors["state"][name]), name
    assert set(load_file(path / "state.safetensors")) == set(tensors["state"])  # the reference reader agrees


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_CHUNK", 64)
    tensors = {
        "contiguous": torch.randn(7, 11),
        "transposed": torch.randn(5, 3, 9).permute(2, 0, 1),
        "one wide row": torch.randn(200, 2).T[:1],
        "expanded": torch.randn(1, 4).expand(100, 4),
    }
    path = ck.save_checkpoint(tmp_path, "step_000000000001", tensors={"s": tensors}, meta={})
    loaded = ck.load_checkpoint(path).tensors["s"]
    assert all(torch.equal(tensors[name], loaded[name]) for name in tensors)


def test_saving_does_not_copy_a_large_tensor(tmp_path: Path) -> None:
    replay = torch.ones(256 << 20, dtype=torch.uint8).view(2, -1).T  # not contiguous: the hard case
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ck.save_checkpoint(tmp_path, "step_000000000001", tensors={"replay": {"obs": replay}}, meta={})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_meta_round_trip(tmp_path: Path) -> None:
    meta = {
        "inf": math.inf,
        "bounds": (-math.inf, 1.5),
        "big": 2**127,
        "text": "ü\n\ud800",
        "none": None,
        "numpy": [np.int64(3), np.float32(0.5), np.bool_(True), np.arange(2)],
        "keys": {10: "a", 9: "b"},
        "small": 5e-324,
    }
    loaded = ck.load_checkpoint(save(tmp_path, 1, meta=meta)).meta
    assert loaded == {
        **meta,
        "bounds": [-math.inf, 1.5],
        "numpy": [3, 0.5, True, [0, 1]],
        "keys": {"10": "a", "9": "b"},
    }
    assert math.isnan(ck.load_checkpoint(save(tmp_path, 2, meta={"x": math.nan})).meta["x"])


def test_manifest_content(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 100, "best")
    path = save(tmp_path, 200)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["parent"] == "step_000000000100"
    assert manifest["schema"] == 1
    assert manifest["files"]["state.safetensors"]["tensors"] == 1
    assert manifest["files"]["state.safetensors"]["bytes"] == (path / "state.safetensors").stat().st_size
    assert {"python", "torch", "numpy", "gymnasium", "rl_training"} <= set(manifest["versions"])
    assert str(tmp_path) not in (path / "manifest.json").read_text()


def test_load_only_some_parts(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    data = bytearray((path / "replay.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "replay.safetensors").write_bytes(data)
    assert set(ck.load_checkpoint(path, stems=["state"]).tensors) == {"state"}  # the policy is intact
    with pytest.raises(ck.CheckpointError, match=r"SHA-256 of replay\.safetensors is wrong"):
        ck.load_checkpoint(path)
    with pytest.raises(ck.CheckpointError, match="has no 'envs' part; it has: "):
        ck.load_checkpoint(path, stems=["envs"])


def test_a_valid_one_is_never_overwritten_and_a_damaged_one_is_moved_aside(tmp_path: Path) -> None:
    path = save(tmp_path, 5, meta={"first": True})
    assert save(tmp_path, 5, meta={"first": False}) == path
    assert ck.load_checkpoint(path).meta == {"first": True}
    (path / "state.safetensors").write_bytes(b"")
    assert save(tmp_path, 5, meta={"first": False}) == path
    assert ck.load_checkpoint(path).meta == {"first": False}
    assert [p.name.split("-")[0] for p in tmp_path.iterdir() if p != path] == ["step_000000000005.damaged"]
    assert ck.list_checkpoints(tmp_path) == [path]


@pytest.mark.parametrize("name", ["step_5", "step_000000000005/..", "last", "step_00000000000x", "best"])
def test_only_checkpoint_names_are_accepted(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a checkpoint name"):
        ck.save_checkpoint(tmp_path, name, tensors={}, meta={})
    assert list(tmp_path.iterdir()) == []


def test_input_that_cannot_be_stored_leaves_no_files(tmp_path: Path) -> None:
    bad: list[tuple[dict, dict]] = [
        ({"s": {"x": torch.ones(1, dtype=torch.complex64)}}, {}),
        ({"s": {"x": torch.ones(2).to_sparse()}}, {}),
        ({"../s": {}}, {}),
        ({}, {"x": object()}),
        ({}, {"x": "y" * (33 << 20)}),
    ]
    for tensors, meta in bad:
        with pytest.raises((ValueError, TypeError)):
            ck.save_checkpoint(tmp_path, "step_000000000001", tensors=tensors, meta=meta)
    assert list(tmp_path.iterdir()) == []


def test_list_latest_and_resolve(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (900, 1000, 20):
        save(run / "checkpoints", step)
    best = [save(run / "checkpoints", step, "best") for step in (20, 900)]
    (run / "checkpoints" / "step_000000009999").symlink_to(best[0])
    (run / "checkpoints" / "notes").mkdir()
    steps = ck.list_checkpoints(run, "step")
    assert [ck.checkpoint_step(p) for p in steps] == [20, 900, 1000]
    assert ck.list_checkpoints(run / "checkpoints", "step") == steps
    assert ck.resolve(run) == ck.resolve(run / "checkpoints") == ck.resolve(str(steps[-1])) == steps[-1]
    assert ck.resolve(run / "best") == best[-1]

    (steps[-1] / "manifest.json").unlink()
    warned: list[str] = []
    assert ck.latest_valid(run, warn=warned.append) == steps[1]
    assert len(warned) == 2  # also about the link, which is the newest
    assert "symbolic link" in warned[0]
    assert "step_000000001000" in warned[1]
    with pytest.warns(UserWarning, match="step_000000001000"):
        assert ck.resolve(run) == steps[1]
    (tmp_path / "link").symlink_to(run)
    assert ck.resolve(tmp_path / "link" / "best") == best[-1]

    copy = tmp_path / "my_agent"
    steps[0].rename(copy)
    assert ck.verify(ck.resolve(copy)) is None
    copy.rename(steps[-1].with_name("step_000000000021"))
    assert "was saved as 'step_000000000020'" in (ck.verify(steps[-1].with_name("step_000000000021")) or "")


def test_resolve_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, words in {
        "nowhere": "does not exist",
        "nowhere/best": "does not exist",
        "n" * 300: "does not exist",
        "nul\0byte": "does not exist",
        "file": "is a file",
        "foreign": "neither a checkpoint nor a run directory",
        "run": "no valid complete checkpoint",
        "run/best": "no valid best checkpoint",
    }.items():
        with pytest.raises(ck.CheckpointError, match=words):
            ck.resolve(tmp_path / name)
    with pytest.raises(ck.CheckpointError, match=r"it has no manifest\.json"):
        ck.load_checkpoint(tmp_path / "foreign")


def test_prune_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
        save(tmp_path, step, "best")
    steps = ck.list_checkpoints(tmp_path, "step")
    (steps[4] / "state.safetensors").unlink()  # visibly incomplete: does not count as one of the two
    removed = ck.prune(tmp_path, 2)
    assert [ck.checkpoint_step(p) for p in ck.list_checkpoints(tmp_path, "step")] == [4, 5, 6]
    assert [ck.checkpoint_step(p) for p in ck.list_checkpoints(tmp_path, "best")] == [6]
    assert len(removed) == 8
    assert len(list(tmp_path.iterdir())) == 4
    assert ck.prune(tmp_path, 5) == []


def test_prune_removes_nothing_when_the_newest_is_damaged(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    newest = ck.list_checkpoints(tmp_path)[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    assert ck.prune(tmp_path, 1) == []
    assert len(ck.list_checkpoints(tmp_path)) == 4


def test_leftovers_are_removed_only_if_their_writer_is_dead(tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = save(run / "checkpoints", 1)
    dead, alive = (temporary_sibling(path.with_name(f"step_00000000000{k}")) for k in (2, 3))
    for directory in (dead, alive):
        directory.mkdir()
        (directory / "state.safetensors").write_bytes(b"half")
    (run / f"summary.json.tmp-{'0' * 32}").write_text("{")
    (run / "notes.tmp-mine").write_text("a user's file")
    lock = ck.try_lock(alive)
    ck.clean_leftovers(run)
    assert not dead.exists()
    assert alive.exists()
    assert {p.name for p in run.iterdir()} == {"checkpoints", "notes.tmp-mine"}
    assert lock is not None
    os.close(lock)
    ck.clean_leftovers(run / "checkpoints")
    assert list((run / "checkpoints").iterdir()) == [path]
    ck.clean_leftovers(tmp_path / "nowhere")


def test_a_new_process_can_read_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 3, meta={"k": [1, 2]})
    code = (
        "import sys; from rl_training.experiment.run.checkpoint import load_checkpoint as load\n"
        "c = load(sys.argv[1]); print(c.meta['k'], c.tensors['replay']['a'].sum().item(), 'pickle' in str(c))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[1, 2] 10 False"


def test_errors_name_the_version_that_wrote_a_checkpoint(tmp_path: Path) -> None:
    from rl_training.errors import UserError
    from rl_training.experiment.run.checkpoint import checkpoint_errors
    from rl_training.ops.tree import fill
    from rl_training.version import __version__

    def fail() -> None:
        raise UserError("params.q is (8,), not (9,)")

    with (
        pytest.raises(UserError, match=rf"not \(9,\)\. .* was written by rl_training 0\.0\.1; this is {__version__}"),
        checkpoint_errors(tmp_path, {"rl_training": "0.0.1"}),
    ):
        fail()
    with pytest.raises(UserError, match=r"not \(9,\)$"), checkpoint_errors(tmp_path, {"rl_training": __version__}):
        fail()
    with (
        pytest.raises(UserError, match=rf"q is missing, expected .* was written by rl_training {__version__},"),
        checkpoint_errors(tmp_path, {"rl_training": __version__}),
    ):
        fill({"q": torch.zeros(2)}, {}, "params")
