"""`replay-crash` finds what broke first, in runs that are broken on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import config_for, slow_unless

from rl_training.cli import main
from rl_training.errors import NonFiniteError, UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.tools.replay_crash import FirstNonFinite, replay_crash


def crash(name: str, place: Path, env: Any = None, **changes: Any) -> Path:
    trainer = Trainer(config_for(name, place, **changes), env=env, progress=False)
    with pytest.raises(NonFiniteError):
        trainer.run()
    return next(trainer.run_dir.glob("nan_dump_*"))


def files(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


class RareReward(gym.Env[Any, Any]):
    """Now and then a reward that no float32 loss can hold; which steps these are follows from the seed."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        reward = 3e38 if self.np_random.random() < 0.01 else 1.0
        return self.np_random.normal(size=2).astype(np.float32), reward, bool(self.np_random.random() < 0.1), False, {}


def test_a_reward_that_overflows_the_loss(tmp_path: Path) -> None:
    """From a checkpoint, with late detection: the replay finds the very update, and leaves the run alone."""
    kwargs = {"batch_size": 64, "max_grad_norm": 0.0}
    changes = {"num_envs": 1, "log_interval": 20, "checkpoint_interval": 40, "total_timesteps": 2000}
    dump = crash("dqn", tmp_path, RareReward, **changes, algo_kwargs=kwargs)
    assert list((dump.parent / "checkpoints").iterdir()), "it crashed before its first checkpoint"
    before = files(dump.parent)
    found = replay_crash(dump, env=RareReward)
    assert found["reproduced"], found
    assert found["update"] == json.loads((dump / "note.json").read_text())["update"]
    assert found["first"]["kind"] in ("loss", "gradient")
    assert found["first"]["place"].startswith(("algorithms/", "ops/"))
    assert found["largest_in_batch"]["rewards"] > 1e38
    assert files(dump.parent) == before


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "dqn", ["dqn", "ppo", "trpo", "ars"]))
def test_a_step_that_is_too_large(name: str, tmp_path: Path, capsys: Any) -> None:
    """From the start, as no checkpoint was written: a finite loss, then infinite parameters."""
    dump = crash(name, tmp_path, algo_kwargs={"learning_rate": 1e39, "max_grad_norm": 0.0}, total_timesteps=600)
    found = replay_crash(dump)
    assert found["reproduced"]
    assert found["first"]["kind"] == "parameter"
    assert found["batch"] == []
    assert any(name.startswith("params") for name in found["non_finite_after"])
    assert main(["replay-crash", str(dump)]) == 0
    assert "in the parameter, by" in capsys.readouterr().out


def test_offline_runs_say_that_they_cannot_be_replayed(tmp_path: Path) -> None:
    dump = crash("td3_bc", tmp_path, algo_kwargs={"learning_rate": 1e39})
    with pytest.raises(UserError, match="td3_bc takes several updates at once, which cannot be replayed one by one"):
        replay_crash(dump)


def test_watch_sees_forward_and_backward_and_ignores_masks() -> None:
    with FirstNonFinite() as watch:
        x = torch.zeros(3)
        masked = x.masked_fill(torch.tensor([True, False, False]), float("-inf"))
        torch.softmax(masked, 0)
    assert watch.first is None
    with FirstNonFinite() as watch:
        torch.log(x)
        torch.log(x - 1)
    assert watch.first is not None
    assert (watch.first["operation"], watch.first["value"]) == ("log", "infinity")
    with FirstNonFinite() as watch:
        y = torch.zeros(2, requires_grad=True)
        torch.autograd.grad(y.sqrt().sum(), y)
    assert watch.first is not None


def test_bad_input(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "note.json").write_text('{"seed": 0, "seed": 1}')
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="is not a NaN dump"):
            replay_crash(path)
    assert main(["replay-crash", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
