"""Private names of torch: only one module uses them, and training works without any of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SHORT_EVALUATION,
    assert_near,
    batch_for,
    config_for,
    make_algorithm,
    run_digest,
    slow_unless,
    updated,
)
from torch import Tensor

from rl_training.errors import UserError
from rl_training.experiment.run.checkpoint import load_checkpoint
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import grad, pieces, rng
from rl_training.ops import torch_internals as internals
from rl_training.ops.scan import register_step, scan
from rl_training.ops.tree import copy_into, tree_items
from rl_training.runtime.engine import compiler, recorder
from rl_training.runtime.engine.executor import Executor, Mode, choose_mode

SRC = Path(__file__).parents[1] / "src"
CPU = torch.device("cpu")
ALGORITHMS = [("dqn", "discrete"), ("ppo", "discrete"), ("sac", "box")]
QUICK = slow_unless(lambda name, _: name == "dqn", ALGORITHMS)
COMPILING = ("inductor_options", "graph_passes", "lowering", "wrapper_code", "direct_entry", "handles")
NEAR = {"rtol": 1e-4, "atol": 2e-5}
Remove = Callable[..., None]

can_compile = pytest.mark.skipif(not compiler.compiler_available(), reason="needs a C++ compiler")
can_rewrite = pytest.mark.skipif(
    not compiler._rewrites(CPU) or internals.wrapper_code.find() is None, reason="this torch cannot rewrite graphs"
)
can_record = pytest.mark.skipif(not recorder.can_record(), reason="this torch cannot record")


@pytest.fixture
def remove(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remove]:
    """Makes capabilities miss a name, as in a version of torch that has moved it."""

    def gone(*names: str) -> None:
        for name in names:
            capability = internals.CAPABILITIES[name]
            monkeypatch.setattr(capability, "names", {**capability.names, "moved": "torch._moved:name"})
            monkeypatch.setattr(capability, "_looked", False)
            monkeypatch.setattr(capability, "_found", None)
        if "transforms" in names:  # looked up when the module is imported
            for module in (grad, rng):
                monkeypatch.setattr(module, "is_wrapped", internals.always)
        recorder.can_record.cache_clear()

    monkeypatch.setattr(recorder, "RECORD_AFTER", 2)
    internals.warn_once.cache_clear()
    yield gone
    recorder.can_record.cache_clear()


# --- the module ---


def test_no_other_module_uses_a_private_name() -> None:
    private = re.compile(r"torch(\.\w+)*\._[a-zA-Z]")
    found = {path.name for path in SRC.rglob("*.py") if private.search(path.read_text())}
    assert found == {"torch_internals.py"}


def test_the_usual_version_of_torch_has_every_name() -> None:
    usual = re.search(r"^TORCH := (\S+)$", (SRC.parent / "Makefile").read_text(), re.MULTILINE)
    assert usual is not None
    if not torch.__version__.startswith(usual[1]):
        pytest.skip(f"this is torch {torch.__version__}")
    assert internals.left_out() == []


@pytest.mark.parametrize(
    ("capability", "name"), [(c, name) for c, group in internals.CAPABILITIES.items() for name in group.names]
)
def test_a_missing_name_is_logged_once(capability: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    original = internals.CAPABILITIES[capability]
    changed = internals.Capability(original.without, **{**original.names, name: f"{original.names[name]}_moved"})
    assert changed.find() is None
    assert changed.find() is None
    assert [record.getMessage().count(original.without) for record in caplog.records] == [1]
    with pytest.raises(ImportError, match=re.escape(original.without)):
        changed.required()


def test_options_that_inductor_does_not_know_are_left_out(remove: Remove, caplog: pytest.LogCaptureFixture) -> None:
    assert internals.known_options({"cpp_wrapper": True, "moved": 1}) == {"cpp_wrapper": True}
    assert internals.known_options({"moved": 1}) == {}
    assert [r.getMessage().count("without the option moved") for r in caplog.records] == [1]


@can_record
def test_auto_stays_eager_without_recording(remove: Remove) -> None:
    assert choose_mode("auto", CPU, 100, 1).mode == "recorded"
    remove("recording")
    assert choose_mode("auto", CPU, 100, 1).mode == "eager"
    assert "functions are not recorded and run as plain operations" in internals.left_out()


# --- eager and recorded ---


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    return {name: updated(name, kind, (0,), "eager") for name, kind in ALGORITHMS}


@pytest.mark.parametrize("capability", internals.CAPABILITIES)
@pytest.mark.parametrize("mode", ["eager", "recorded"])
@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_updates_have_the_same_bits(
    name: str, kind: str, mode: Mode, capability: str, remove: Remove, expected: dict[str, list[Any]]
) -> None:
    remove(capability)
    assert_near(updated(name, kind, (0,), mode), expected[name], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("mode", ["eager", "recorded"])
@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_a_run_without_any_private_name(name: str, kind: str, mode: Mode, tmp_path: Path, remove: Remove) -> None:
    results = []
    for names in ((), set(internals.CAPABILITIES) - {"transforms"}, internals.CAPABILITIES):
        remove(*names)
        config = config_for(name, tmp_path, total_timesteps=96, num_envs=1, execution=mode, **SHORT_EVALUATION)
        result = Trainer(config, progress=False).run()
        assert (result.summary["execution"], result.summary["gradient_steps"] > 0) == (mode, True)
        results.append(result.checkpoint_path)
    assert run_digest(results[0]) == run_digest(results[1])
    first, last = (load_checkpoint(path).tensors["state"] for path in (results[0], results[2]))
    for key, value in first.items():  # functional transforms add up gradients in another order
        torch.testing.assert_close(last[key], value, rtol=1e-3, atol=1e-4)


@can_record
def test_eager_mode_never_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "RECORD_AFTER", 100)
    algorithm = make_algorithm("dqn")
    counts = {}
    for mode in ("eager", "recorded"):
        tree = {"state": algorithm.init_state(0), "batch": batch_for(algorithm), "key": rng.key_from_seed(3, 9)}
        calls = []

        def update(tree: dict[str, Any], calls: list[int] = calls) -> dict[str, Tensor]:
            calls.append(1)  # Python code inside the update, where a debugger could stop
            state, aux = algorithm.train_step(tree["state"], tree["batch"], tree["key"])
            copy_into(tree["state"], state)
            return aux.metrics

        step = Executor(mode, CPU).wrap(update, dict)
        for _ in range(1_000):
            step(tree)
        counts[mode] = len(calls), [x.clone() for _, x in tree_items(tree["state"])]
    assert (counts["eager"][0], counts["recorded"][0]) == (1_000, 100)
    assert all(map(torch.equal, counts["eager"][1], counts["recorded"][1]))


@can_record
def test_recording_that_fails_is_found_out_beforehand(
    remove: Remove, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All names are there, but one does something else: no call is interrupted halfway."""

    def changed(_: object) -> object:
        raise TypeError("make_fx() needs a mode")

    remove()
    monkeypatch.setattr(internals.recording.find(), "make_fx", changed)
    tree, run = {"x": torch.zeros(2)}, recorder.Recorded(lambda tree: {"y": tree["x"].add_(1.0).clone()})
    assert [run(tree)["y"].tolist() for _ in range(4)] == [[float(i)] * 2 for i in range(1, 5)]
    assert run.run is None
    assert caplog.text.count("make_fx() needs a mode") == 1


def test_pieces_are_not_recorded_without_the_tracing_flag(remove: Remove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_compile", lambda fn: fn)
    monkeypatch.setattr(pieces, "_compiled", {})
    register_step("test_torch_internals: a sum", lambda weights, state, row: [state[0] + row[0]])

    def sums(tree: dict[str, Tensor]) -> list[Tensor]:
        return scan("test_torch_internals: a sum", [], [torch.zeros(2)], [tree["x"]])

    remove("tracing_flag")
    tree, run = {"x": torch.ones(3, 2)}, Executor("compile", CPU).wrap(sums, dict, whole=False)
    assert not isinstance(run, recorder.Recorded)
    for _ in range(4):
        assert run(tree)[0].tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


# --- compiled ---


def small_step(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """One layer and an update of its weights: a product, a relu, intermediate results and a shared scalar."""
    hidden = torch.relu(tree["x"] @ tree["w"] + tree["b"])
    scale = 1.0 / (hidden.square().sum().sqrt() + 1e-6)
    tree["w"].sub_(0.1 * scale * (tree["x"].mT @ hidden))
    return {"norm": scale, "mean": hidden.mean()}


def compiled_steps(mode: Mode) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    tree = {"x": torch.randn(48, 32, generator=g), "w": torch.randn(32, 40, generator=g), "b": torch.zeros(40)}
    step, metrics = Executor(mode, CPU).wrap(small_step, dict), []
    for _ in range(4):  # compiled, watched, and two calls of the entry point
        metrics += [x.clone() for x in step(tree).values()]
    return [tree["w"], *metrics]


@pytest.mark.slow
@can_compile
@pytest.mark.parametrize("capability", COMPILING)
def test_compiling_without_a_capability(capability: str, remove: Remove) -> None:
    remove(capability)
    torch.testing.assert_close(compiled_steps("compile"), compiled_steps("eager"))


@pytest.mark.slow
@can_compile
@pytest.mark.parametrize(("name", "kind"), ALGORITHMS)
def test_compiled_updates_without_any_private_name(
    name: str, kind: str, remove: Remove, expected: dict[str, list[Any]]
) -> None:
    remove(*(set(internals.CAPABILITIES) - {"inductor_options"}))  # its C++ wrapper compiles several times faster
    assert_near(updated(name, kind, (0,), "compile"), expected[name], **NEAR)


def fails(*_: object, **__: object) -> object:
    raise KeyError("of a newer torch")


@pytest.mark.slow
@can_compile
@can_rewrite
@pytest.mark.parametrize(
    "place",
    ["passes.CpuRewrites.__call__", "products._sizes_and_strides", "products._Product.codegen", "intermediates._kept"],
)
def test_a_failing_rewrite_is_left_out(
    place: str, remove: Remove, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from torch._inductor.utils import fresh_cache

    monkeypatch.setattr(f"rl_training.runtime.engine.inductor.{place}", fails)
    with fresh_cache(dir=str(tmp_path)):
        torch.testing.assert_close(compiled_steps("compile"), compiled_steps("eager"))
    (record,) = [r for r in caplog.records if "rewrites" in r.getMessage()]
    assert re.search(r"'small_step' is compiled again without rewrites \(.*of a newer torch", record.getMessage())
    assert "\n" not in record.getMessage()


def test_the_user_is_told_only_if_plain_inductor_fails_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor.exc import InductorError

    tried = []

    def compile_(fn: Any, *, options: dict[str, Any], **_: Any) -> Any:
        def run(*_: object) -> object:
            tried.append("post_grad_custom_post_pass" in options)
            raise InductorError(KeyError("buf92"), None)

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compiler, "_rewrites", lambda device: {"post_grad_custom_post_pass": None})
    with pytest.raises(UserError, match="cannot compile"):
        compiler.compiled(small_step, CPU)({})
    assert tried == [True, False]
    assert "compiled again without rewrites" in caplog.text


@pytest.mark.skipif(internals.graph_passes.find() is None, reason="this torch cannot rewrite graphs")
def test_rewrites_for_a_gpu_are_guarded(remove: Remove) -> None:
    cuda = torch.device("cuda")
    remove("lowering", "wrapper_code")  # for the CPU only
    assert set(compiler._rewrites(cuda)) > {"post_grad_custom_post_pass", "max_autotune_gemm"}
    assert compiler._choices(cuda) is not None
    remove("product_kernels")
    assert set(compiler._rewrites(cuda)) == {"post_grad_custom_post_pass"}
    assert compiler._choices(cuda) is None
    remove("graph_passes")
    assert compiler._rewrites(cuda) == {}


def test_operations_can_be_left_unwatched(remove: Remove) -> None:
    remove("dispatch")
    with internals.operation_watcher()() as watch:
        assert isinstance(watch, ExitStack)


def test_graphs_are_compiled_without_warnings_about_shims(caplog: pytest.LogCaptureFixture) -> None:
    """Inductor logs one for each operation of linear algebra, such as those of acktr. Other warnings are still seen."""
    compiler.compiled(torch.sin, CPU)
    logger = logging.getLogger("torch._inductor.ir")
    logger.addHandler(caplog.handler)
    try:
        logger.warning(
            "%s is missing a c-shim implementation, using proxy executor as fallback", "aten.inverse.default"
        )
        logger.warning("another warning")
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"another warning"}
