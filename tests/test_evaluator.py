"""Evaluation watches and never touches: repeatable, deterministic, and without any effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ALGORITHMS, SHORT_EVALUATION, assert_near, config_for, is_quick, run_digest, slow_unless

from rl_training import registry
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.checkpoint import load_checkpoint
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops.tree import tree_map
from rl_training.runtime.engine import recorder
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.evaluator import Evaluator

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(name: str, root: Path, **changes: Any) -> Any:
    return Trainer(config_for(name, root, **changes), progress=False).run()


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "dqn", ["dqn", "ppo", "sac"]))
def test_evaluating_more_often_changes_nothing(name: str, tmp_path: Path) -> None:
    digests = []
    for interval, episodes in ((0, 1), (16, 1), (32, 3)):
        result = run(name, tmp_path, eval_interval=interval, eval_episodes=episodes)
        digests.append({k: v for k, v in run_digest(result.checkpoint_path).items() if k != "metrics"})
    assert digests[0] == digests[1] == digests[2]


def test_evaluation_is_deterministic_and_ignores_the_global_generator(tmp_path: Path) -> None:
    agent = Agent.load(run("sac", tmp_path).checkpoint_path, device="cpu")
    torch.manual_seed(1)
    first = agent.evaluate(5)
    torch.manual_seed(2)
    assert agent.evaluate(5) == first
    other = agent.evaluate(5, seed=1)
    assert other["mean_return"] != first["mean_return"]
    assert first["episodes"] == 5
    assert len(first["per_seed"]) == 1


def test_sampled_evaluation_repeats_itself_and_is_that_of_the_random_policy(tmp_path: Path) -> None:
    """PPO before its first update: a policy that is almost uniform, whose most likely actions end an episode sooner or
    later than random play does."""
    agent = Agent.load(run("ppo", tmp_path, total_timesteps=8).checkpoint_path, device="cpu")
    sampled = agent.evaluate(40, deterministic=False)
    assert sampled == agent.evaluate(40, deterministic=False)
    assert sampled["mean_return"] != agent.evaluate(40)["mean_return"]
    assert 15.0 < sampled["mean_return"] < 32.0  # uniform actions: 22, with a deviation of 12 an episode


def test_each_environment_contributes_its_share(tmp_path: Path) -> None:
    """More episodes than environments: the first finished ones must not crowd out the long ones."""
    agent = Agent.load(run("dqn", tmp_path).checkpoint_path, device="cpu")
    evaluator = Evaluator(agent.algorithm, "CartPole-v1", (0,), 7, max_envs=3)
    result = evaluator.run(agent.train)
    assert result is not None
    assert [len(result.returns[0]), len(result.lengths[0])] == [7, 7]
    assert result.returns[0] == [float(n) for n in result.lengths[0]]  # CartPole pays 1 a step
    again = evaluator.run(agent.train)
    assert again == result
    assert evaluator.run(agent.train, should_stop=lambda: True) is None
    evaluator.close()


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "ppo", ["dqn", "ppo", "sac"]))
def test_seeds_of_a_study_equal_their_single_runs(name: str, tmp_path: Path) -> None:
    changes = {"total_timesteps": 96, **({"num_envs": 2} if name == "ppo" else {})}  # three rollouts
    study = run(name, tmp_path, seeds=(3, 5), **changes)
    assert study.summary["gradient_steps"] > 0
    together = load_checkpoint(study.checkpoint_path).tensors
    assert [row["seed"] for row in study.final_eval["per_seed"]] == [3, 5]
    for i, seed in enumerate((3, 5)):
        single = run(name, tmp_path, seed=seed, **changes)
        alone = load_checkpoint(single.checkpoint_path).tensors
        same = {k: v[i : i + 1] for k, v in together["state"].items()}
        assert_near(
            {k: v for k, v in same.items() if k.startswith("train.")},
            {k: v for k, v in alone["state"].items() if k.startswith("train.")}, rtol=1e-3, atol=1e-4,
        )  # fmt: skip
        # The data: exactly the same before learning starts, to float tolerance after it.
        warm = 32 if name != "ppo" else 0
        for column, rows in alone["replay"].items():
            ours = together["replay"][column][i : i + 1]
            if name != "ppo" and column.startswith("rows."):
                ours, rows = ours.flatten(1, 2), rows.flatten(1, 2)  # [1, N, rows, ...]
            assert torch.equal(ours[:, :warm], rows[:, :warm])
            torch.testing.assert_close(ours, rows, rtol=1e-3, atol=1e-3)
        mean = study.final_eval["per_seed"][i]["mean_return"]
        assert mean == pytest.approx(single.final_eval["mean_return"], rel=1e-2)


@pytest.mark.parametrize("name", slow_unless(is_quick, ALGORITHMS))
def test_every_variant_trains_as_a_study(name: str, tmp_path: Path) -> None:
    steps = {"on_policy": 128, "evolution": 400}.get(registry.entry(name).loop, 48)  # enough for one update
    result = run(name, tmp_path, seeds=(1, 2), total_timesteps=steps, **SHORT_EVALUATION)
    assert result.status == "completed"
    assert result.summary["gradient_steps"] > 0
    agent = Agent.load(result.checkpoint_path, seed=2, device="cpu")
    assert agent.evaluate(1)["per_seed"][0]["seed"] == 2


@pytest.mark.parametrize("mode", ["recorded", pytest.param("cudagraph", marks=needs_gpu)])
def test_policies_run_in_the_mode_of_the_training(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded or captured, with or without worker processes: the same episodes as with plain operations."""
    monkeypatch.setattr(recorder, "RECORD_AFTER", 2)
    device = "cuda" if mode == "cudagraph" else "cpu"
    for name in ("sac", "drqn"):
        agent = Agent.load(run(name, tmp_path).checkpoint_path, device=device)
        results = []
        choices: list[Any] = [{}, {"executor": Executor(mode, agent.algorithm.device)}, {"vectorization": "async"}]
        for options in choices:
            evaluator = Evaluator(agent.algorithm, agent.config.env_id, (0, 1), 3, deterministic=False, **options)
            both = tree_map(lambda x: torch.cat([x, x]), agent.train)
            results.append([evaluator.run(both), evaluator.run(both)])
            evaluator.close()
        assert results[0][0] is not None
        assert results[0][0] == results[0][1] == results[1][0] == results[1][1] == results[2][0]
