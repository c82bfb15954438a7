"""On a GPU: an update captured as one CUDA graph gives what an eager one gives on the CPU, for every algorithm of the
registry, and a study of seeds what its seeds give alone. Skipped where there is no CUDA device; takes minutes where
there is one (every update is compiled)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ALGORITHMS, assert_near, batch_for, clone, make_algorithm

from rl_training.algorithms.base import Algorithm
from rl_training.experiment import registry
from rl_training.ops import rng
from rl_training.ops.tree import tree_leaves, tree_map, tree_stack
from rl_training.runtime.executor import Executor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# As between eager and compiled code on a CPU (test_contract.py), with room for another order of more sums.
NEAR = {"rtol": 1e-3, "atol": 1e-4}
STEPS = 3
KINDS = [(name, kind) for name in ALGORITHMS for kind in registry.entry(name).actions]
STUDIES = [("dqn", "discrete"), ("ppo", "discrete"), ("sac", "box"), ("c51_dqn", "discrete"), ("dreamer", "discrete")]
KEY = rng.key_from_seed(3, 9)


def given(algorithm: Algorithm[Any], seed: int, i: int) -> dict[str, Any]:
    return {"batch": batch_for(algorithm, seed=100 * seed + i), "key": rng.fold(KEY, 10 * seed + i)}


def on_cpu(name: str, kind: str, seed: int) -> Any:
    algorithm = make_algorithm(name, kind)
    state = algorithm.init_state(seed)
    for i in range(STEPS):
        row = given(algorithm, seed, i)
        state, _ = algorithm.train_step(state, row["batch"], row["key"])
    return state


def on_gpu(name: str, kind: str, seeds: tuple[int, ...]) -> list[Any]:
    """The states of all seeds after as many replays of one graph."""
    device = torch.device("cuda")
    inputs, algorithm = make_algorithm(name, kind), make_algorithm(name, kind, device=device)
    rows = [tree_stack([given(inputs, seed, i) for seed in seeds]) for i in range(STEPS)]
    tree = {"state": tree_stack([algorithm.init_state(seed) for seed in seeds]), **clone(rows[0])}
    tree = tree_map(lambda x: x.to(device), tree)

    def one(state: Any, batch: Any, key: Any) -> Any:
        return algorithm.train_step(state, batch, key)[0]

    def write(into: Any, values: Any) -> None:
        for old, new in zip(tree_leaves(into), tree_leaves(values), strict=True):
            old.copy_(new)

    def update(tree: dict[str, Any]) -> None:
        write(tree["state"], torch.vmap(one)(tree["state"], tree["batch"], tree["key"]))

    step = Executor("cudagraph", device).wrap(update, lambda: tree["state"], whole=algorithm.compiled_whole)
    for row in rows:
        write({k: tree[k] for k in row}, row)
        step(tree)
    state = tree_map(lambda x: x.cpu(), tree["state"])
    return [tree_map(lambda x, i=i: x[i], state) for i in range(len(seeds))]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_captured_update_equals_eager_on_the_cpu(name: str, kind: str) -> None:
    assert_near(on_gpu(name, kind, (0,))[0], on_cpu(name, kind, 0), **NEAR)


@pytest.mark.parametrize(("name", "kind"), STUDIES)
def test_captured_study_equals_its_seeds(name: str, kind: str) -> None:
    for state, seed in zip(on_gpu(name, kind, (3, 5)), (3, 5)):
        assert_near(state, on_cpu(name, kind, seed), **NEAR)
