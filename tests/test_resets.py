"""Periodic resets: what starts again and what goes on, for every algorithm with replay, in every kind of run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    ALGORITHMS,
    assert_near,
    assert_same_bits,
    batch_for,
    env_for,
    make_algorithm,
    small_fields,
    spec_for,
)

from rl_training import registry
from rl_training.algorithms.hyper import OffPolicyHyper
from rl_training.algorithms.resets import Resets
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.config import make_config
from rl_training.experiment.tools.verify_resume import verify_resume
from rl_training.models import MLPSACModel
from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.runtime.engine.executor import Executor, Mode
from rl_training.runtime.loops import OffPolicyLoop

KEY = rng.key_from_seed(8)
REPLAY = [name for name in ALGORITHMS if issubclass(registry.entry(name).load().Hyper, OffPolicyHyper)]
SEVERAL_PHASES = ("bbf", "dac", "mbpo", "pets")


def trained(algorithm: Any, steps: int, seed: int = 0) -> Any:
    state = algorithm.init_state(seed)
    for i in range(steps):
        state, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), rng.fold(KEY, i))
    return state


@pytest.mark.parametrize("name", [name for name in REPLAY if name not in (*SEVERAL_PHASES, "dagger")])
def test_a_reset_is_a_fresh_start_that_keeps_clocks_and_statistics(name: str) -> None:
    known = registry.entry(name).load().Hyper.model_fields
    fields = {"normalize_observations": True} if "normalize_observations" in known else {}
    algorithm = make_algorithm(name, reset_interval=2, **fields)
    before = trained(algorithm, 2)._replace(progress=torch.tensor(0.5))
    resets = Resets(algorithm)
    after = resets.apply(before, 0)
    fresh = algorithm.init_state(resets.seed(0, 2))
    assert_same_bits(after.params, fresh.params)
    assert_same_bits(after.target, {n: fresh.params[n] for n in after.target})
    assert_same_bits(after.opt, fresh.opt)
    assert all(not moments["m"].any() for moments in after.opt.values() if "m" in moments)
    assert int(after.step) == 2
    assert float(after.progress) == 0.5
    for part, value in before.extra.items():
        assert_same_bits(after.extra[part], value if part in ("observations", "support") else fresh.extra[part])
    for network, flat in after.params.items():  # neither the old weights nor those that the run began with
        assert not torch.equal(flat, before.params[network])
        assert not torch.equal(flat, algorithm.init_state(0).params[network])


def test_each_reset_and_each_seed_draws_other_weights() -> None:
    resets = Resets(make_algorithm("sac", reset_interval=10))
    assert len({resets.seed(seed, step) for seed in range(5) for step in (10, 20, 30)}) == 15


def test_shrink_and_perturb_mixes_old_and_fresh_weights() -> None:
    algorithm = make_algorithm("td3", reset_at=[3], reset_share=0.2)
    before, resets = trained(algorithm, 3), Resets(algorithm)
    after, fresh = resets.apply(before, 5), algorithm.init_state(resets.seed(5, 3))
    for network in ("actor", "critic"):
        torch.testing.assert_close(after.params[network], 0.8 * before.params[network] + 0.2 * fresh.params[network])
        torch.testing.assert_close(after.target[network], 0.8 * before.target[network] + 0.2 * fresh.params[network])
        assert not after.opt[network]["m"].any()


def test_due_steps_are_multiples_and_single_numbers() -> None:
    resets = Resets(make_algorithm("sac", reset_interval=4, reset_at=[1, 6]))
    assert [step for step in range(1, 13) if resets.due(step)] == [1, 4, 6, 8, 12]
    assert not Resets(make_algorithm("sac")).wanted


def loop_of(name: str, seeds: tuple[int, ...], mode: Mode = "eager", **fields: Any) -> OffPolicyLoop:
    envs = make_vector_env(env_for(name), seeds=seeds, num_envs=1, vectorization="sync")
    settings = {**small_fields(name), "learning_starts": 20, "batch_size": 8, "hidden_sizes": [8], **fields}
    algorithm = registry.entry(name).load()(envs.spec, **settings)
    return OffPolicyLoop(algorithm, envs, seeds, 60, Executor(mode, torch.device("cpu")))


@pytest.mark.parametrize("name", ["sac", "dqn"])
def test_a_run_starts_again_after_the_given_update_and_keeps_its_replay(name: str) -> None:
    loop, plain = (loop_of(name, (3,), **fields) for fields in ({"reset_at": [12]}, {}))
    for each in (loop, plain):
        each.advance(32)
        while each.gradient_steps < 12:
            each.advance(each.env_steps + 1)
    resets = loop.learner.resets
    fresh = loop.algorithm.init_state(resets.seed(3, 12))
    assert_same_bits(tree_map(lambda x: x[0], loop.learner.train.params), fresh.params)
    assert not torch.equal(next(iter(plain.learner.train.params.values()))[0], next(iter(fresh.params.values())))
    assert_same_bits(loop.learner.tree["data"], plain.learner.tree["data"])
    loop.advance(60)  # it goes on learning from there
    assert int(loop.learner.train.step[0]) == loop.gradient_steps > 12
    assert all(torch.isfinite(flat).all() for flat in loop.learner.train.params.values())


def test_a_recorded_run_resets_as_a_plain_one() -> None:
    runs = [loop_of("td3", (0,), mode, reset_interval=5) for mode in ("eager", "recorded")]
    for loop in runs:
        loop.advance(45)
    assert_same_bits(runs[0].learner.train, runs[1].learner.train)


@pytest.mark.slow
def test_a_compiled_run_resets_as_a_plain_one() -> None:
    runs = [loop_of("sac", (0,), mode, reset_at=[3]) for mode in ("eager", "compile")]
    for loop in runs:
        while loop.gradient_steps < 3:
            loop.advance(loop.env_steps + 1)
    assert_same_bits(runs[0].learner.train.params, runs[1].learner.train.params)
    for loop in runs:
        loop.advance(loop.env_steps + 3)
    assert_near(runs[0].learner.train, runs[1].learner.train, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_a_run_with_resets_resumes_exactly(algo: str, tmp_path: Path) -> None:
    config = make_config(
        None, algo=algo, env_id="Pendulum-v1", total_timesteps=120, learning_starts=20, batch_size=16,
        hidden_sizes=(8, 8), reset_interval=15, execution="eager", eval_episodes=1, eval_interval=60,
        output_dir=str(tmp_path),
    )  # fmt: skip
    assert verify_resume(config)["identical"]


def test_seeds_of_a_study_reset_as_in_runs_of_their_own() -> None:
    def after_reset(seeds: tuple[int, ...]) -> Any:
        loop = loop_of("sac", seeds, reset_interval=20)
        while loop.gradient_steps < 20:
            loop.advance(loop.env_steps + 1)
        return loop.learner.train

    together = after_reset((1, 4))
    for i, seed in enumerate((1, 4)):
        alone = after_reset((seed,))
        assert_same_bits(tree_map(lambda x, i=i: x[i], together.params), tree_map(lambda x: x[0], alone.params))


def test_the_algorithm_on_its_own_resets_too() -> None:
    algorithm = make_algorithm("sac", reset_interval=3)
    for i in range(3):
        algorithm.update(batch_for(algorithm, seed=i))
    assert_same_bits(algorithm.state.params, algorithm.init_state(Resets(algorithm).seed(0, 3)).params)


def test_what_cannot_start_again_is_refused() -> None:
    for name in SEVERAL_PHASES:
        with pytest.raises(UserError, match="several kinds of updates"):
            Resets(make_algorithm(name, reset_interval=5))
    given = registry.entry("sac").load()(spec_for("sac"), model=MLPSACModel(5, 2, (8,)), reset_interval=5)
    with pytest.raises(UserError, match="impossible for a network that was passed in"):
        Resets(given)
    with pytest.raises(UserError, match="reset_share"):
        make_algorithm("sac", reset_share=0.0)
    with pytest.raises(UserError, match="reset_at"):
        make_algorithm("sac", reset_at=[0])
