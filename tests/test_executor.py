"""How a mode is chosen, and what happens if torch cannot compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_algorithm

from rl_training.errors import UserError
from rl_training.ops.torch_internals import graph_passes, handles, lowering
from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.engine import compiler
from rl_training.runtime.engine.compiler import _hold, compiler_available
from rl_training.runtime.engine.executor import Executor, choose_mode, trial_runs
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.runtime.learners.rollout import RolloutLearner
from rl_training.runtime.learners.staging import Staging


def test_a_failing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InductorError

    def compiler(*_: object, **__: object) -> object:
        def fails(*_: object) -> object:
            raise InductorError(KeyError("buf92"), None)

        return fails

    monkeypatch.setattr(torch, "compile", compiler)
    step = Executor("compile", torch.device("cpu")).wrap(lambda tree: tree, dict)
    with pytest.raises(UserError, match=r"cannot compile .*buf92.*set execution to eager"):
        step({"x": torch.zeros(1)})


def test_errors_of_the_function_itself_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: object) -> object:
        raise ZeroDivisionError("not the compiler")

    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    with pytest.raises(ZeroDivisionError, match="not the compiler"):
        Executor("compile", torch.device("cpu")).wrap(wrong, dict)({"x": torch.zeros(1)})


@pytest.mark.skipif(not compiler_available(), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("version", "mode"), [("2.11.0+cu130", "recorded"), ("2.13.0+cpu", "compile"), ("2.14.0a0", "compile")]
)
def test_auto_compiles_for_the_cpu_from_torch_2_13_on(version: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert choose_mode("auto", torch.device("cpu"), 100_000, 5).mode == mode
    assert choose_mode("compile", torch.device("cpu"), 100_000, 5).mode == "compile"


@pytest.mark.skipif(not compiler_available(), reason="needs a C++ compiler")
def test_auto_unrolls_a_loop_for_long_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    modes = [choose_mode("auto", torch.device("cpu"), n, 5, unrolled=True).mode for n in (30_000, 50_000)]
    assert modes == ["recorded", "compile"]
    assert choose_mode("auto", torch.device("cpu"), 30_000, 5).mode == "compile"


def test_auto_captures_early_if_only_steps_are_compiled() -> None:
    cuda = torch.device("cuda")
    assert choose_mode("auto", cuda, 1_000, 1).mode == "recorded"
    assert choose_mode("auto", cuda, 1_000, 1, whole=False).mode == "cudagraph"
    assert choose_mode("auto", cuda, 100, 1, whole=False).mode == "recorded"


@pytest.mark.skipif(lowering.find() is None or graph_passes.find() is None, reason="this torch cannot rewrite graphs")
def test_rewrites_are_left_out_if_torch_has_moved_a_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def moved(self: object) -> None:
        raise ImportError("cannot import name 'CppWrapperCpu'")

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr("rl_training.runtime.engine.inductor.passes.CpuRewrites.__init__", moved)
    assert compiler._rewrites(torch.device("cpu")) == {}
    assert "compiled without rewrites (cannot import name 'CppWrapperCpu')" in caplog.text


@pytest.mark.skipif(handles.find() is None, reason="this torch has no handles")
def test_tensors_are_held_as_long_as_their_graph_lives() -> None:
    class Owner:
        pass

    tensor, owner = torch.zeros(3), Owner()
    _hold([tensor], owner)
    assert tensor._use_count() == 2  # type: ignore[attr-defined]
    del owner
    assert tensor._use_count() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_trial_runs_before_a_capture_leave_the_stored_transitions_alone(name: str) -> None:
    """A full rollout lacks its last row, and a ring is full: the trial runs write to the row that the real call writes
    to, and not to those after it, which are the first of the rollout and the oldest of the ring."""
    algorithm = make_algorithm(name)
    executor = Executor("eager", torch.device("cpu"))
    if name == "ppo":
        learner: Any = RolloutLearner(algorithm, (0,), 2, 1_000, executor)
        last = learner.store.rows - 1
    else:
        learner = ReplayLearner(algorithm, (0,), 2, 1_000, executor)
        last = learner.store.rows + 5
    data = learner.tree["data"]
    for column in ("rewards", "obs"):
        data[column].uniform_(generator=torch.Generator().manual_seed(0))
    data["count"].fill_(last)
    learner.inputs["scalars"][..., 4] = 1.0
    before = tree_map(torch.clone, learner.tree)
    with torch.no_grad():
        trial_runs(learner.write_fn, (learner.tree, learner.inputs), learner.small_state())
    written = learner.store.slots(data["count"])[0]
    rows = torch.ones(data["rewards"].shape[1], dtype=torch.bool)
    rows[written] = False
    for column in ("rewards", "obs"):
        assert torch.equal(data[column][:, rows], before["data"][column][:, rows])
        assert not torch.equal(data[column], before["data"][column])  # the row itself is overwritten later
    assert torch.equal(data["count"], before["data"]["count"])
    assert torch.equal(learner.tree["env_steps"], before["env_steps"])


def test_staging_uploads_every_tensor_of_a_tree() -> None:
    """One block of bytes on each side; the tensors keep their types and shapes."""
    pixels, count = torch.zeros(2, 3, 5, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    like = {"obs": {"image": pixels, "speed": torch.zeros(2, 3)}, "count": count}
    staging = Staging(like)
    for (name, host), (_, given) in zip(tree_items(staging.host), tree_items(like), strict=True):
        assert (host.dtype, host.shape) == (given.dtype, given.shape), name
        host.copy_(torch.arange(host.numel()).view(host.shape) + 7)
    assert not any(x.any() for _, x in tree_items(staging.device))
    staging.upload()
    staging.wait()
    for (name, device), (_, host) in zip(tree_items(staging.device), tree_items(staging.host), strict=True):
        assert torch.equal(device, host), name
        assert device.data_ptr() != host.data_ptr(), name
