"""MOPO: the penalty by its definition, the model alone, and exact resume inside the pretraining."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import OBS_DIM, assert_same_bits, batch_for, config_for, make_algorithm, run_digest

from rl_training import make_config
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng

KEY = rng.key_from_seed(8)


def frontier(rows: int) -> dict[str, Any]:
    obs = batch_for(make_algorithm("mopo"), size=rows)["obs"]
    return {"frontier": {"obs": obs, "alive": torch.ones(rows, dtype=torch.bool)}}


def test_reward_is_lowered_by_the_largest_deviation() -> None:
    penalised: Any = make_algorithm("mopo", penalty_coef=2.5, termination="none")
    plain: Any = make_algorithm("mopo", penalty_coef=0.0, termination="none")
    mbpo: Any = make_algorithm("mbpo", termination="none")
    state, batch = penalised.init_state(0), frontier(20)
    lowered, full, online = (a.imagine(state, batch, KEY)[1].rows for a in (penalised, plain, mbpo))
    assert torch.equal(full["rewards"], online["rewards"])  # lambda 0 is MBPO
    out = penalised.dynamics.predict(state, full["obs"], full["actions"], all_members=True)
    largest = torch.exp(0.5 * out.log_var).square().sum(-1).sqrt().amax(0)  # units of the identity normaliser
    torch.testing.assert_close(full["rewards"] - lowered["rewards"], 2.5 * largest, rtol=1e-4, atol=1e-5)
    assert torch.equal(full["next_obs"], lowered["next_obs"])


def test_update_model_changes_the_model_alone() -> None:
    mopo: Any = make_algorithm("mopo", model_learning_rate=1e-2, termination="none")
    batch = batch_for(mopo)
    before = {k: v.clone() for k, v in mopo.state.params.items()}
    losses = [mopo.update_model(batch).metrics["model_loss"] for _ in range(60)]
    assert losses[-1] < losses[0] - 0.5
    assert torch.equal(mopo.state.params["actor"], before["actor"])
    assert torch.equal(mopo.state.params["critic"], before["critic"])
    assert mopo.update(batch).metrics.keys() >= {"critic_loss", "actor_loss", "model_loss", "mse"}
    assert not torch.equal(mopo.state.params["actor"], before["actor"])
    assert mopo.modules["model"](torch.zeros(2, OBS_DIM), torch.zeros(2, 2)).mean.shape == (3, 2, OBS_DIM + 1)


def test_blocks_must_fit_the_rhythm_of_rollouts() -> None:
    with pytest.raises(UserError, match="rollout_freq = 15 must be a multiple of updates_per_call = 4"):
        make_algorithm("mopo", updates_per_call=4)


def test_two_critics_without_diversity_are_sac() -> None:
    """What `edac/pendulum_sac` rests on, which mopo has to beat: SAC on a dataset needs no algorithm of its own."""
    given = make_config("edac/pendulum_sac").algo_kwargs
    offline = make_algorithm("edac", num_critics=given["num_critics"], eta=given["eta"])
    sac = make_algorithm("sac")
    state, own = offline.init_state(3), sac.init_state(3)
    assert_same_bits(state.params, own.params)
    for i in range(3):
        batch, key = batch_for(sac, seed=i), rng.fold(KEY, i)
        state, _ = offline.train_step(state, batch, key)
        own, _ = sac.train_step(own, batch, key)
    assert_same_bits(state.params, own.params)
    assert_same_bits(state.target, own.target)


@pytest.mark.slow
def test_resume_inside_the_pretraining_and_a_rollout(tmp_path: Path) -> None:
    def config(side: str) -> Any:
        return config_for("mopo", tmp_path / side, total_timesteps=40)

    wanted = run_digest(Trainer(config("whole"), progress=False).run().checkpoint_path)
    trainer = Trainer(config("cut"), progress=False)
    for name, number in (("fit", 3), ("validate", 1), ("imagine", 1), ("imagine", 2)):
        learner: Any = trainer.loop.learner
        update, seen = learner.update, {"calls": 0}

        def counted(times: int, phase: Any, *, wanted: Any = (name, number), now: Any = (trainer, update, seen)) -> Any:
            owner, original, counter = now
            out = original(times, phase)
            counter["calls"] += phase.name == wanted[0]
            if phase.name == wanted[0] and counter["calls"] == wanted[1]:
                owner.request_stop("the test asks for it")
            return out

        learner.update = counted
        result = trainer.run()
        assert result.status == "stopped"
        assert trainer.loop.counters()["position"] is not None
        trainer = Trainer.resume(result.run_dir, progress=False)
    found = run_digest(trainer.run().checkpoint_path)
    assert {k: v for k, v in found.items() if k != "metrics"} == {k: v for k, v in wanted.items() if k != "metrics"}
