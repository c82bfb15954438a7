"""What a run logs beside its losses, under Stable-Baselines3's names, and what the live display makes of it."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from helpers import config_for

from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.progress import Progress, sparkline
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops.losses import explained_variance, weighted_mean

ALL = {"train/learning_rate", "train/grad_norm", "time/environment", "time/acting", "time/learning"}
MORE = {
    "ppo": {"train/explained_variance", "train/approx_kl", "train/clip_fraction"},
    "a2c": {"train/explained_variance"},
    "dqn": {"train/buffer_fill"},
    "sac": {"train/buffer_fill"},
}


@pytest.mark.parametrize("algo", MORE)
def test_names_in_the_log(algo, tmp_path):
    schedule = {"learning_rate": {"kind": "linear", "start": 1e-3, "end": 0.0}}
    result = Trainer(config_for(algo, tmp_path, algo_kwargs=schedule), progress=False).run()
    row = next(row for row in reversed(list(read_metrics(result.run_dir))) if "train/learning_rate" in row)
    assert row.keys() >= ALL | MORE[algo]
    assert row["train/grad_norm"] > 0.0
    assert sum(row[f"time/{part}"] for part in ("environment", "acting", "learning")) == pytest.approx(1.0, abs=0.05)
    rows = [row for row in read_metrics(result.run_dir) if "train/learning_rate" in row]
    assert all(0.0 <= row["time/cpu_cores"] <= 4096.0 for row in rows)
    assert max(row["time/cpu_cores"] for row in rows) > 0.0
    if sys.platform == "linux":
        assert all(0.05 < row["time/memory_gib"] < 1024.0 for row in rows)
    for part in ("environment", "acting", "learning"):
        assert max(row[f"time/{part}"] for row in rows) > 0.0
    for row in rows:
        assert row["train/learning_rate"] == pytest.approx(1e-3 * (1 - row["step"] / 160), abs=1e-9)
        if "train/buffer_fill" in row:
            assert row["train/buffer_fill"] == pytest.approx(row["step"] / 300)


def test_gradient_norm_is_that_of_the_whole_gradient():
    from helpers import batch_for, make_algorithm

    from rl_training.ops import rng

    dqn: Any = make_algorithm("dqn")
    state, batch = dqn.init_state(0), batch_for(dqn)
    _, aux = dqn.train_step(state, batch, rng.key_from_seed(0, 0))
    flat = state.params["q"].clone().requires_grad_()
    target, expected = dqn.bootstrap(state, batch, None)
    loss = dqn.td_loss({"q": flat}, target, expected, batch, None).loss
    weighted_mean(loss, batch["weights"]).backward()
    torch.testing.assert_close(aux.metrics["grad_norm"], flat.grad.norm(), rtol=1e-4, atol=1e-6)


def test_explained_variance():
    """Stable-Baselines3: 1 - Var(returns - values) / Var(returns); rows with weight 0 do not count."""
    returns, values = torch.tensor([1.0, 2.0, 4.0, 9.0, 77.0]), torch.tensor([1.5, 2.0, 3.0, 9.5, -1.0])
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    rest = (returns - values)[:4]
    expected = 1 - rest.var(unbiased=False) / returns[:4].var(unbiased=False)
    torch.testing.assert_close(explained_variance(values, returns, weights), expected)
    assert explained_variance(returns, returns, weights) == 1.0
    assert torch.isfinite(explained_variance(values, torch.ones(5), weights))


# --- the live display -------------------------------------------------------------------------------------------------


def test_sparkline():
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([5.0, 5.0]) == "▄▄"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {
    "train/loss": 0.01234, "rollout/ep_len_mean": 201.4, "time/environment": 0.2, "time/acting": 0.1,
    "time/learning": 0.7,
}  # fmt: skip


def test_display_shows_loss_episodes_evaluations_and_the_slow_part(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    stream = Terminal()
    with Progress(1000, title="dqn", stream=stream) as progress:
        for score in (10.0, 200.0, 500.0):
            progress.evaluated(score)
        progress.details(METRICS)
        progress.update(500, 321.0)
    shown = stream.getvalue()
    for text in ("loss 0.0123", "episodes 201 steps", "learning takes 70%", "evaluations ▁▄█ 500", "score 321"):
        assert text in shown, text


def test_plain_lines_have_the_same_facts():
    stream = io.StringIO()
    with Progress(1000, title="dqn", stream=stream) as progress:
        progress.details(METRICS)
        progress.update(500, 321.0)
    assert "loss 0.0123  episodes 201 steps  learning takes 70%" in stream.getvalue()
