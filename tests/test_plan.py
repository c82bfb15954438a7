"""`plan`: sizes are those of the real run, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import config_for, slow_unless

from rl_training.cli import main
from rl_training.experiment.run.checkpoint import load_checkpoint
from rl_training.experiment.run.estimate import plan
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops.tree import tree_items


@pytest.mark.parametrize(("name", "seeds"), [("dqn", None), ("ppo", (0, 1))])
def test_sizes_and_updates_match_the_run(name: str, seeds: Any, tmp_path: Path) -> None:
    config = config_for(name, tmp_path, seeds=seeds, total_timesteps=256, num_envs=2)
    found = plan(config, seconds=0.05)
    result = Trainer(config, progress=False).run()
    checkpoint = load_checkpoint(result.checkpoint_path)
    tensors = {stem: sum(x.nbytes for x in group.values()) for stem, group in checkpoint.tensors.items()}
    assert found["stored_bytes"] >= tensors["replay"]
    on_disk = sum(file.stat().st_size for file in result.checkpoint_path.iterdir())
    assert found["checkpoint_bytes"] == pytest.approx(on_disk, rel=0.5)
    assert found["gradient_steps"] == pytest.approx(result.summary["gradient_steps"], abs=2)
    assert found["update_ratio"] == found["gradient_steps"] / 256
    assert found["ram_bytes"] > found["stored_bytes"]
    assert found["probe"]["steps"] > 0
    assert found["eta_s"] > 0


@pytest.mark.parametrize(
    ("name", "env_id", "fields"),
    [
        ("ppo", "CartPole-v1", {}),
        ("recurrent_ppo", "GridMaze-v0", {}),
        ("ppg", "Pendulum-v1", {}),
        ("pqn", "MinAtar/Breakout-v1", {"hidden_sizes": [16]}),
        ("prioritized_dqn", "CartPole-v1", {}),
        ("fast_td3", "Pendulum-v1", {"batch_size": 16}),
    ],
)
@pytest.mark.parametrize("seeds", slow_unless(bool, [(None,), ((0, 1),)]))
def test_memory_of_environments_on_the_device_is_that_of_the_run(
    name: str, env_id: str, fields: dict[str, Any], seeds: Any, tmp_path: Path
) -> None:
    """Every tensor that a run keeps: networks, replay or rollout, environments, and the prepared rollout."""
    config = config_for(
        name, tmp_path, env_id=env_id, vectorization="device", num_envs=4, seeds=seeds, total_timesteps=192,
        algo_kwargs=fields,
    )  # fmt: skip
    found = plan(config, probe=False)
    trainer = Trainer(config, progress=False)
    trainer.run()
    learner: Any = trainer.loop.learner

    def size(tree: Any) -> int:
        return sum(x.nbytes for _, x in tree_items(tree))

    staged = getattr(learner, "scratch", {}).get("rollout", {})
    assert found["batch_bytes"] == size(staged)
    assert found["stored_bytes"] == size(learner.tree["data"])
    assert found["tensor_bytes"] == size((learner.tree, learner.inputs, staged))
    assert found["environment_bytes"] > size(learner.tree["env"]) > 0
    assert found["ram_bytes"] > found["tensor_bytes"] + found["batch_bytes"]


@pytest.mark.parametrize("name", ["bc", "r2d2", "dreamer", "ars"])
def test_every_kind_of_run_can_be_planned(name: str, tmp_path: Path) -> None:
    """The probe learns as early as sequences allow; offline runs save no transitions."""
    found = plan(config_for(name, tmp_path, total_timesteps=200, num_envs=2), probe=False)
    assert 0 < found["checkpoint_bytes"] < found["disk_bytes"]


def test_a_large_buffer_takes_memory_but_no_disk_before_it_is_filled(tmp_path: Path) -> None:
    sizes = (300, 100_000)
    plans = [plan(config_for("dqn", tmp_path, algo_kwargs={"buffer_size": n}), probe=False) for n in sizes]
    small, large = ({k: p[k] for k in ("stored_bytes", "checkpoint_bytes")} for p in plans)
    assert large["stored_bytes"] > 100 * small["stored_bytes"]
    assert large["checkpoint_bytes"] == small["checkpoint_bytes"]


def test_command_line(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["plan", "--config", "sac/pendulum", "--execution", "eager", "--no-probe"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["probe"], found["eta_s"], found["vram_bytes"]) == (None, None, 0)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert f"{found['gradient_steps']:,}" in out
    assert main(["plan"]) == 2
    assert main(["plan", "--config", "dqn/cartpole", "--env", "Pendulum-v1"]) == 2
    assert "discrete" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
