"""Recorded functions give the same bits as the functions themselves, for every class of algorithm and for studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ALGORITHMS, SHORT_EVALUATION, config_for, run_digest, slow_unless
from torch import Tensor

from rl_training import registry
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.runtime.engine import recorder

CLASSES = sorted({registry.entry(name).target: name for name in ALGORITHMS}.values())
pytestmark = pytest.mark.skipif(not recorder.can_record(), reason="this torch cannot record")
CHANGES: dict[str, dict[str, Any]] = {  # more than five calls of everything, updates included
    "on_policy": {"total_timesteps": 96},
    "evolution": {"total_timesteps": 160, "env_kwargs": {"max_episode_steps": 10}, "algo_kwargs": {"n_delta": 1}},
}
STUDIES = ("dqn", "ppo", "sac", "recurrent_ppo", "mbpo", "iql")


CASES: list[Any] = [*((name, None) for name in CLASSES), *((name, (3, 4)) for name in STUDIES)]


@pytest.mark.parametrize(
    ("name", "seeds"), slow_unless(lambda name, seeds: name in ("dqn", "ppo", "sac") and seeds is None, CASES)
)
def test_recorded_run_equals_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seeds: tuple[int, ...] | None
) -> None:
    digests = []
    changes = {"execution": "recorded", **CHANGES.get(registry.entry(name).loop, {"total_timesteps": 64})}
    for after in (5, 1 << 30):
        monkeypatch.setattr(recorder, "RECORD_AFTER", after)
        config = config_for(name, tmp_path / str(after), num_envs=1, **{**SHORT_EVALUATION, **changes}, seeds=seeds)
        result = Trainer(config, progress=False).run()
        assert result.summary["gradient_steps"] > 5
        digests.append(run_digest(result.checkpoint_path))
    assert digests[0] == digests[1]


def test_only_views_and_untouched_constants_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that the function writes to are created in every call."""
    monkeypatch.setattr(recorder, "RECORD_AFTER", 1)
    state = {"x": torch.arange(6.0).view(2, 3), "key": torch.tensor(7), "count": torch.zeros(())}
    calls = []

    def fn(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append(1)
        scratch = torch.zeros(3)
        scratch.add_(tree["x"][0] * 2.0)
        scratch.view(-1)[0] += torch.arange(3)[2]
        tree["count"].add_(1)
        return {"draw": rng.uniform(rng.fold(tree["key"], tree["count"].to(torch.int64)), (3,)), "scratch": scratch}

    run = recorder.Recorded(fn)
    expected = {k: v.clone() for k, v in state.items()}
    for _ in range(4):
        state["x"].add_(1.0)
        expected["x"].add_(1.0)
        got, want = run(state), fn(expected)
        assert all(torch.equal(got[k], want[k]) for k in want)
        assert torch.equal(state["count"], expected["count"])
    assert len(calls) == 1 + 4  # one recorded call, and four calls for `expected`


def test_other_arguments_start_a_new_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "RECORD_AFTER", 2)
    run = recorder.Recorded(lambda tree: {"y": tree["x"] + 1.0})
    first, second = {"x": torch.zeros(2)}, {"x": torch.ones(3)}
    for tree in (first, first, first, second, second, second, first):
        assert torch.equal(run(tree)["y"], tree["x"] + 1.0)
