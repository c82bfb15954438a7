"""What the continuous-control family shares: exploration, deterministic evaluation, and refusing what cannot work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ACTION_DIM, BATCH, batch_for, config_for, make_algorithm, slow_unless, spec_for

from rl_training import registry
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.exploration import Exploration
from rl_training.ops.tree import tree_leaves
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

FAMILY = [e.name for e in registry.entries().values() if e.family == "continuous control"]
KEY = rng.key_from_seed(5)


def noise_of(process: Exploration, steps: int, batch: int, features: torch.Tensor | None = None) -> torch.Tensor:
    """[T, B, A]."""
    carry, rows = process.init(batch), []
    for t in range(steps):
        carry, noise = process.noise(carry, rng.fold(KEY, t), batch, features)
        rows.append(noise)
    return torch.stack(rows)


def correlation(x: torch.Tensor, lag: int) -> float:
    return float((x[lag:] * x[: len(x) - lag]).mean() / x.square().mean())


def test_gaussian_noise_is_white_with_variance_one() -> None:
    x = noise_of(Exploration("gaussian", 2), 200, 100)
    assert float(x.var()) == pytest.approx(1.0, abs=0.03)
    assert correlation(x, 1) == pytest.approx(0.0, abs=0.03)


def test_ornstein_uhlenbeck_equals_its_recursion_and_stationary_moments() -> None:
    process = Exploration("ou", 2, theta=0.15)
    x = noise_of(process, 400, 100)
    state = torch.zeros(100, 2)
    for t in range(5):  # x' = x - theta x + sigma n with the sigma that makes the stationary variance 1
        state = state - 0.15 * state + math.sqrt(1.0 - 0.85**2) * rng.normal(rng.fold(KEY, t), (100, 2))
        torch.testing.assert_close(x[t], state)
    late = x[100:]
    assert float(late.var()) == pytest.approx(1.0, abs=0.05)
    for lag in (1, 3):
        assert correlation(late, lag) == pytest.approx(0.85**lag, abs=0.03)
    assert float(x[0].var()) < 0.4  # each episode starts from 0


def test_state_dependent_noise_is_a_function_of_the_state_until_it_is_drawn_anew() -> None:
    features = torch.rand(3000, 8, generator=torch.Generator().manual_seed(0)) * 50.0
    process = Exploration("gsde", 2, features=8, period=4)
    x = noise_of(process, 9, 3000, features)
    for t in range(9):
        assert torch.equal(x[t], x[t // 4 * 4])
    assert not torch.equal(x[0], x[4])
    assert not torch.equal(x[4], x[8])
    assert x.var(1).flatten().tolist() == pytest.approx([1.0] * 18, abs=0.1)  # whatever the size of the features
    episode = noise_of(Exploration("gsde", 2, features=8), 9, 3000, features)
    assert all(torch.equal(episode[t], episode[0]) for t in range(9))
    # Close states get close noise, distant states do not.
    near, far = features.clone(), features.flip(-1)
    near[:, 0] *= 1.01
    _, base = process.noise(process.init(3000), KEY, 3000, features)
    _, other = process.noise(process.init(3000), KEY, 3000, near)
    _, distant = process.noise(process.init(3000), KEY, 3000, far)
    assert float((base - other).abs().max()) < 0.1 < float((base - distant).abs().mean())


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("kind", ["gaussian", "ou", "gsde"])
def test_every_algorithm_explores_with_every_process_and_evaluates_without(name: str, kind: str) -> None:
    algorithm = make_algorithm(name, exploration=kind)
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    carry = algorithm.init_carry(BATCH)
    _, greedy, _ = algorithm.select_action(state, carry, obs, KEY, explore=False)
    _, other_key, _ = algorithm.select_action(state, carry, obs, rng.fold(KEY, 1), explore=False)
    assert torch.equal(greedy, other_key)
    carry, first, _ = algorithm.select_action(state, carry, obs, KEY, explore=True)
    carry, second, _ = algorithm.select_action(state, carry, obs, rng.fold(KEY, 1), explore=True)
    assert not torch.equal(first, greedy)
    assert torch.equal(first, second) == (kind == "gsde")
    for action in (greedy, first, second):
        assert action.shape == (BATCH, ACTION_DIM)
        assert float(action.abs().max()) <= 1.0


@pytest.mark.parametrize("name", ["td3", "naf", "d4pg"])
def test_exploration_noise_is_the_standard_deviation_of_the_action(name: str) -> None:
    algorithm = make_algorithm(name, exploration_noise={"kind": "linear", "start": 0.02, "end": 0.01})
    state, rows = algorithm.init_state(0), torch.zeros(4000, 5)
    for progress, scale in ((0.0, 0.02), (1.0, 0.01)):
        now = state._replace(progress=torch.tensor(progress))
        _, action, _ = algorithm.select_action(now, (), rows, KEY, explore=True)
        assert action.std(0).tolist() == pytest.approx([scale] * ACTION_DIM, rel=0.1)


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "ou", ["ou", "gsde"]))
def test_a_study_keeps_one_noise_process_per_environment(kind: str, tmp_path: Path) -> None:
    """Two seeds together collect what each collects alone, until learning starts."""
    kwargs = {"exploration": kind, "learning_starts": 0, "train_freq": 1000, "exploration_noise": 0.5}
    carries = []
    for seeds in ([0], [1], [0, 1]):
        config = config_for("td3", tmp_path, seeds=seeds, total_timesteps=240, algo_kwargs=kwargs)
        trainer = Trainer(config, progress=False)
        trainer.run()
        carries.append(trainer.loop.learner.tree["data"]["actions"])
    assert float(carries[0].abs().sum()) > 0.0
    torch.testing.assert_close(torch.cat(carries[:2]), carries[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILY)
def test_refuses_what_it_cannot_do(name: str) -> None:
    cls: Any = registry.entry(name).load()
    expected = rf"^{name} needs a bounded continuous \(Box\) action space; Test-v0 has Discrete\(3\)$"
    with pytest.raises(UserError, match=expected):
        cls(spec_for("dqn"))
    endless = EnvSpec("Free-v0", ArraySpec((3,)), ActionSpec("box", (), (1,), (-math.inf,), (math.inf,)))
    with pytest.raises(UserError, match=rf"^{name} needs a bounded action space; Free-v0 has an unbounded Box\(1,\)$"):
        cls(endless)
    with pytest.raises(UserError, match="n_step"):
        make_algorithm(name, n_step=0)
    with pytest.raises(UserError, match="exploration"):
        make_algorithm(name, exploration="pink")


@pytest.mark.parametrize("name", ["td3", "redq", "droq", "crossq"])
def test_a_run_skips_the_policy_between_its_updates(name: str) -> None:
    """The two functions of a run, one without the policy, give bit for bit what one function with a select gives."""
    algorithm = make_algorithm(name, policy_delay=3)
    (phase,) = algorithm.phases()
    assert phase.between is not None
    by_select = in_turn = algorithm.init_state(0)
    for i in range(7):
        batch, key = batch_for(algorithm, seed=i), rng.fold(KEY, i)
        by_select, aux = algorithm.train_step(by_select, batch, key)
        due = i % phase.period == 0
        in_turn, own = (phase.step if due else phase.between)(in_turn, batch, key)
        assert ("actor_loss" in own.metrics) == due
        assert torch.equal(own.metrics["critic_loss"], aux.metrics["critic_loss"])
        for a, b in zip(tree_leaves(in_turn), tree_leaves(by_select)):
            assert torch.equal(a, b)


def test_the_learner_counts_updates_from_where_a_run_resumes() -> None:
    algorithm = make_algorithm("td3", policy_delay=3, buffer_size=64)
    learner = ReplayLearner(algorithm, [0], 1, 1_000, Executor("eager", torch.device("cpu")))
    learner.tree["data"]["count"].fill_(64)
    learner.train.step.fill_(4)
    assert ["actor_loss" in learner.update(1) for _ in range(4)] == [False, False, True, False]
