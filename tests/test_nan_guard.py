"""Numbers that are none: caught, told with the place, evidence kept, the last good checkpoint intact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import config_for, slow_unless
from safetensors.torch import load_file

from rl_training.envs import EnvError
from rl_training.errors import NonFiniteError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.checkpoint import list_checkpoints, load_checkpoint, verify
from rl_training.experiment.run.trainer import Trainer


class Poisoned(gym.Env[Any, Any]):
    """Well until step `at` of its life, then one number is wrong."""

    def __init__(self, what: str = "none", at: int = 90, continuous: bool = False) -> None:
        self.what, self.at, self.t = what, at, 0
        self.observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32) if continuous else gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        bad = self.t >= self.at
        obs = self.np_random.normal(size=2).astype(np.float32)
        reward = 1.0
        if bad and self.what.startswith("obs"):
            obs[1] = float(self.what.split()[1])
        if bad and self.what.startswith("reward"):
            reward = float(self.what.split()[1])
        return obs, reward, self.t % 10 == 0, False, {}


def poisoned(what: str, continuous: bool = False) -> Any:
    def make() -> gym.Env[Any, Any]:
        return Poisoned(what, continuous=continuous)

    return make


def last_good(run: Path) -> Path:
    paths = list_checkpoints(run, "step")
    assert paths, "no checkpoint was left"
    for path in paths:
        assert verify(path) is None
        state = load_checkpoint(path).tensors["state"]
        assert all(torch.isfinite(x).all() for k, x in state.items() if k.startswith("train.params"))
    return paths[-1]


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "dqn", ["dqn", "ppo", "sac"]))
@pytest.mark.parametrize("what", ["obs nan", "obs inf", "reward nan", "reward -inf"])
def test_environment_that_returns_nan_is_named(name: str, what: str, tmp_path: Path) -> None:
    env = poisoned(what, continuous=name == "sac")
    trainer = Trainer(config_for(name, tmp_path, num_envs=1, checkpoint_interval=32), env=env, progress=False)
    with pytest.raises(EnvError, match=r"sub-environment 0.*(NaN|inf|nan)"):
        trainer.run()
    assert json.loads((trainer.run_dir / "metadata.json").read_text())["status"] == "failed"
    path = last_good(trainer.run_dir)
    healthy = poisoned("none", continuous=name == "sac")
    agent = Agent.load(path, device="cpu", env=healthy)
    assert np.isfinite(agent.value(np.zeros(2, np.float32)))
    resumed = Trainer.resume(trainer.run_dir, env=healthy, progress=False).run()
    assert (resumed.status, resumed.summary["env_steps"]) == ("completed", 160)


@pytest.mark.parametrize("name", ["dqn", "ppo", "sac"])
def test_exploding_learning_rate_is_caught(name: str, tmp_path: Path) -> None:
    """The rate is 0 for the first half, so there are good checkpoints; then it rises to infinity's doorstep."""
    rate = {"kind": "constant", "start": 1e25, "warmup": 0.99}
    small = {"kind": "linear", "start": 0.0, "end": 1e30}
    kwargs = {"learning_rate": rate if name == "ppo" else small, "max_grad_norm": 0.0}
    config = config_for(name, tmp_path, num_envs=1, checkpoint_interval=16, log_interval=16, algo_kwargs=kwargs)
    trainer = Trainer(config, progress=False)
    with pytest.raises(NonFiniteError, match="gave NaN or infinity") as caught:
        trainer.run()
    dump = next(trainer.run_dir.glob("nan_dump_*"))
    assert str(dump) in str(caught.value)
    note = json.loads((dump / "note.json").read_text())
    tensors = load_file(dump / "tensors.safetensors")
    assert note["seed"] == 0
    assert any(name.startswith("batch") for name in tensors)
    assert note["non_finite_tensors"], "the dump shows what broke"
    assert json.loads((trainer.run_dir / "metadata.json").read_text())["status"] == "failed"


def test_parameters_are_checked_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    """One update with a finite loss and an infinite step: the very next checkpoint must not be written."""
    kwargs = {"learning_rate": 1e39, "learning_starts": 64, "max_grad_norm": 0.0}
    config = config_for("dqn", tmp_path, checkpoint_interval=64, log_interval=1_000, algo_kwargs=kwargs)
    trainer = Trainer(config, progress=False)
    trainer._next_check = lambda step: step + 1  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError):
        trainer.run()
    assert last_good(trainer.run_dir).name == "step_000000000064"


def test_dump_contains_the_batch_that_caused_it(tmp_path: Path) -> None:
    """A reward that overflows the loss: finite in the environment, not in the update."""
    env = poisoned("reward 3e38")
    config = config_for(
        "dqn", tmp_path, num_envs=1, log_interval=10, algo_kwargs={"batch_size": 64, "max_grad_norm": 0.0}
    )
    trainer = Trainer(config, env=env, progress=False)
    with pytest.raises(NonFiniteError) as caught:
        trainer.run()
    dump = next(trainer.run_dir.glob("nan_dump_*"))
    update = json.loads((dump / "note.json").read_text())["update"]
    assert f"update {update} of seed 0" in str(caught.value)
    tensors = load_file(dump / "tensors.safetensors")
    assert float(tensors["batch.rewards"].max()) > 1e38
