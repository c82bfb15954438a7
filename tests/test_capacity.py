"""A step costs the same whatever the size of the replay: neither acting, nor storing, nor an update may touch more rows
than it needs. Otherwise a run with a million images copies gigabytes at every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import make_algorithm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as flat

from rl_training import registry
from rl_training.ops.rows import write_rows
from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.engine.executor import Executor, Mode
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

CPU = torch.device("cpu")
IMAGES = EnvSpec("Images-v0", ArraySpec((4, 8, 8), "uint8"), ActionSpec("discrete", (3,)))
CNN = {"frame_stack": 4, "hidden_sizes": [8]}
CASES: dict[str, tuple[str, EnvSpec | None, dict[str, Any]]] = {
    "uniform": ("dqn", None, {}),
    "n_step": ("dqn", None, {"n_step": 3}),
    "prioritized": ("prioritized_dqn", None, {}),
    "frames": ("dqn", IMAGES, CNN),
    "prioritized_frames": ("rainbow_dqn", IMAGES, CNN),
    "sequences": ("drqn", None, {}),
    "prioritized_sequences": ("r2d2", None, {}),
    "world_model": ("dreamer", None, {}),
}
GROWS = {
    "prioritized",
    "prioritized_frames",
    "prioritized_sequences",
}  # sums over blocks of the square root of the rows
SMALL, LARGE = 2_000, 200_000


def learner_of(case: str, capacity: int, mode: Mode, device: torch.device = CPU) -> ReplayLearner:
    name, spec, fields = CASES[case]
    fields = {**fields, "buffer_size": capacity, "device": device}
    if spec is None:
        algorithm = make_algorithm(name, **fields)
    else:
        algorithm = registry.entry(name).load()(spec, num_envs=2, batch_size=8, **fields)
    learner = ReplayLearner(algorithm, [0], 2, 10_000, Executor(mode, device))
    learner.inputs["scalars"][..., 3:] = 1.0  # every row is a transition
    for _ in range(60):  # sequences must be complete before they can be drawn
        learner.interact()
    return learner


class NewBytes(TorchDispatchMode):
    """Bytes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in flat((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [x for x in flat(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given]
        self.count += sum(x.nbytes for x in made)
        return out


@pytest.mark.parametrize("case", CASES)
def test_operations_make_as_many_bytes_for_a_large_replay(case: str) -> None:
    made = []
    for capacity in (SMALL, LARGE):
        learner = learner_of(case, capacity, "eager")
        with torch.no_grad(), NewBytes() as counter:
            learner.interact_fn(learner.tree, learner.inputs)
            learner.update_of(learner.phases[0])(learner.tree)
        made.append(counter.count)
    root = (LARGE / SMALL) ** 0.5 if case in GROWS else 1.0
    assert made[1] <= root * made[0], made


@pytest.mark.parametrize("name", ["mbpo", "mopo"])
def test_steps_of_rollouts_make_as_many_bytes_for_a_large_buffer(name: str) -> None:
    made = []
    for epochs in (1, 100):
        algorithm: Any = make_algorithm(name, model_retain_epochs=epochs, termination="none")
        source = algorithm.sources(2)["synthetic"]
        data, state, key = source.init(1, CPU), algorithm.init_state(0), torch.zeros((), dtype=torch.int64)
        obs = torch.zeros(source.width, source.obs_dim)
        with torch.no_grad(), NewBytes() as counter:
            for step in (algorithm.branch, algorithm.imagine):
                frontier = {k: v[0] for k, v in data["frontier"].items()}
                _, aux = step(state, {"obs": obs, "frontier": frontier}, key)
                source.append(data, tree_map(lambda x: x.unsqueeze(0), aux.rows))
            source.sample(tree_map(lambda x: x[0], data), key, 16, torch.zeros(()))
        made.append(counter.count)
    assert made[1] == made[0], made


def best(fn: Callable[[], Any], sync: Callable[[], Any] = lambda: None) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(10):
        sync()
        start = time.perf_counter()
        fn()
        sync()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("sequences", "prioritized_sequences")])
def test_compiled_step_copies_no_column(case: str, request: pytest.FixtureRequest) -> None:
    """Neither function takes a tenth of the time that a copy of the largest column takes."""
    if case != "frames" and not request.config.getoption("--compile-all"):
        pytest.skip("needs --compile-all")
    learner = learner_of(case, 3_000_000 if case != "world_model" else 1_000_000, "compile")
    column = max((x for _, x in tree_items(learner.tree["data"])), key=lambda x: x.nbytes)
    copy = best(column.clone)
    assert best(learner.interact) < 0.1 * copy
    assert best(lambda: learner.update(1)) < 0.1 * copy


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_captured_step_takes_as_long_for_a_large_replay(case: str) -> None:
    """Copying columns of so many rows would take several times as long as all the rest."""
    times = []
    for capacity in (10_000, 20_000_000):
        learner = learner_of(case, capacity, "cudagraph", torch.device("cuda"))
        times.append([best(fn, torch.cuda.synchronize) for fn in (learner.interact, partial(learner.update, 1))])
    assert times[1][0] < 2.0 * times[0][0], times
    assert times[1][1] < (4.0 if case in GROWS else 2.0) * times[0][1], times


@pytest.mark.parametrize("shape", [(), (3,), (2, 4, 4)])
def test_rows_are_written_where_they_belong(shape: tuple[int, ...]) -> None:
    """As a plain loop does it; on a GPU by another index."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    generator = torch.Generator().manual_seed(0)
    column = torch.randn(2, 9, *shape, generator=generator)
    rows = torch.tensor([[1, 8, 4], [0, 2, 7]])
    values = torch.randn(2, 3, *shape, generator=generator)
    expected = column.clone()
    for seed in range(2):
        for i, row in enumerate(rows[seed].tolist()):
            expected[seed, row] = values[seed, i]
    for device in devices:
        written = column.clone().to(device)
        write_rows(written, rows.to(device), values.to(device))
        assert torch.equal(written.cpu(), expected)
