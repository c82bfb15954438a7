"""On a GPU: updates captured as one CUDA graph give what eager ones give on the CPU, for every algorithm of the
registry, and a study what its seeds give alone. Skipped where there is no CUDA device; minutes where there is one, as
every update is compiled: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch
from helpers import ALGORITHMS, assert_near, updated

from rl_training import registry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NEAR = {"rtol": 1e-3, "atol": 1e-4}  # as in test_contract.py, with room for another device's sums and exponentials
KINDS = [(name, kind) for name in ALGORITHMS for kind in registry.entry(name).actions]
STUDIES = [("dqn", "discrete"), ("ppo", "discrete"), ("sac", "box"), ("c51_dqn", "discrete"), ("dreamer", "discrete")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_captured_update_equals_eager_on_the_cpu(name: str, kind: str) -> None:
    assert_near(updated(name, kind, (0,), "cudagraph", "cuda"), updated(name, kind, (0,), "eager"), **NEAR)


@pytest.mark.parametrize(("name", "kind"), STUDIES)
def test_captured_study_equals_its_seeds(name: str, kind: str) -> None:
    alone = [updated(name, kind, (seed,), "eager")[0] for seed in (3, 5)]
    assert_near(updated(name, kind, (3, 5), "cudagraph", "cuda"), alone, **NEAR)
