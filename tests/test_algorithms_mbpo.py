"""MBPO: the SAC inside is SAC, rollouts branch and end where they should, and a cut anywhere changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import OBS_DIM, assert_same_bits, batch_for, config_for, make_algorithm, run_digest, spec_for

from rl_training.algorithms.model_based.mbpo import MBPOHyper
from rl_training.data.saved import restore, saved_tensors
from rl_training.data.synthetic import SyntheticReplay, running_sum
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.models.dynamics import Imagined
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

KEY = rng.key_from_seed(2)


def test_policy_update_equals_sac() -> None:
    mbpo, sac = make_algorithm("mbpo", termination="none"), make_algorithm("sac")
    state = mbpo.init_state(0)
    own = sac.init_state(0)._replace(
        params={n: state.params[n] for n in ("actor", "critic")}, target={"critic": state.target["critic"]}
    )
    for i in range(3):
        batch, key = batch_for(mbpo, seed=i), rng.fold(KEY, i)
        state, _ = mbpo.policy_step(state, batch, key)  # type: ignore[attr-defined]
        own, _ = sac.train_step(own, batch, key)
    assert_same_bits({n: state.params[n] for n in own.params}, own.params)
    assert_same_bits(state.target, own.target)
    assert int(state.extra["policy_step"]) == 3
    obs = batch_for(mbpo)["obs"]
    assert torch.equal(mbpo.value(state, obs), sac.value(own, obs))


def test_length_schedule() -> None:
    hopper = MBPOHyper(rollout_length=1, rollout_length_final=15, rollout_schedule=(20_000, 150_000))
    # The schedule of the paper's table 2: 1 -> 15 over epochs 20 -> 150.
    assert [hopper.length_at(n) for n in (0, 20_000, 29_285, 29_286, 85_000, 150_000, 10**6)] == [1, 1, 1, 2, 8, 15, 15]
    assert {MBPOHyper(rollout_length=3).length_at(n) for n in (0, 50_000, 10**6)} == {3}
    falling = MBPOHyper(rollout_length=4, rollout_length_final=2, rollout_schedule=(0, 10))
    assert [falling.length_at(n) for n in (0, 5, 10)] == [4, 3, 2]


def test_rollouts_branch_at_real_states_and_stop_where_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that adds 1 to every state, pays the first number and ends at 3."""
    mbpo: Any = make_algorithm("mbpo", rollout_batch=4, rollout_length=3, termination="none")
    source: SyntheticReplay = mbpo.sources(1)["synthetic"]
    data, state = source.init(1, torch.device("cpu")), mbpo.init_state(0)

    def step(state: Any, obs: torch.Tensor, actions: torch.Tensor, key: torch.Tensor) -> Imagined:
        after = obs + 1.0
        zero = torch.zeros(len(obs))
        return Imagined(after, obs[:, 0], after[:, 0] >= 3.0, zero, zero)

    monkeypatch.setattr(mbpo.dynamics, "imagine", step)
    starts = torch.tensor([0.0, 1.0, 2.0, -5.0]).view(4, 1).expand(4, OBS_DIM)

    def run(call: Any, **batch: Any) -> None:
        frontier = tree_map(lambda x: x[0], data["frontier"])
        _, aux = call(state, {**batch, "frontier": frontier}, KEY)
        source.append(data, tree_map(lambda x: x.unsqueeze(0), aux.rows))

    run(mbpo.branch, obs=starts)
    assert int(data["count"]) == 0
    for _ in range(3):
        run(mbpo.imagine)
    # 0 -> 1 -> 2 -> 3 end; 1 -> 2 -> 3 end; 2 -> 3 end; -5 -> -4 -> -3 -> -2
    assert int(data["count"]) == 3 + 2 + 1 + 3
    rows = 9
    assert data["obs"][0, :rows, 0].tolist() == [0.0, 1.0, 2.0, -5.0, 1.0, 2.0, -4.0, 2.0, -3.0]
    assert data["terminated"][0, :rows].tolist() == [False, False, True, False, False, True, False, True, False]
    assert torch.equal(data["next_obs"][0, :rows], data["obs"][0, :rows] + 1.0)
    assert torch.equal(data["rewards"][0, :rows], data["obs"][0, :rows, 0])
    assert data["frontier"]["alive"].tolist() == [[False, False, False, True]]
    run(mbpo.branch, obs=starts)
    assert data["frontier"]["alive"].all()
    batch = source.sample(tree_map(lambda x: x[0], data), KEY, 3_000, torch.zeros(()))
    counts = torch.bincount(batch["indices"], minlength=rows)
    assert len(counts) == rows
    assert int(counts.min()) > 250
    assert int(counts.max()) < 420
    assert torch.equal(batch["discounts"] == 0.0, data["terminated"][0][batch["indices"]])


def rollout_step(data: Any, numbers: list[float], keep: list[bool]) -> dict[str, Any]:
    """Rows of a step of rollouts whose rewards are `numbers`."""
    number, width = torch.tensor(numbers), len(numbers)
    return {
        "obs": number.view(1, width, 1).expand(1, width, OBS_DIM), "next_obs": torch.zeros(1, width, OBS_DIM),
        "actions": torch.zeros(1, width, 2), "rewards": number.view(1, width),
        "terminated": torch.zeros(1, width).bool(), "keep": torch.tensor([keep]),
        "frontier": tree_map(torch.clone, data["frontier"]),
    }  # fmt: skip


def new_set(data: Any) -> dict[str, Any]:
    return {"frontier": tree_map(torch.clone, data["frontier"])}


def test_synthetic_ring_keeps_the_newest() -> None:
    source = SyntheticReplay(spec_for("mbpo"), 3, sets=2, longest=1, gamma=0.9)
    data = source.init(1, torch.device("cpu"))
    for t in range(5):
        source.append(data, new_set(data))
        source.append(data, rollout_step(data, [3.0 * t, 3.0 * t + 1, 3.0 * t + 2], [True, False, True]))
    assert int(data["count"]) == 6
    assert sorted(data["rewards"][0, :6].tolist()) == [6.0, 8.0, 9.0, 11.0, 12.0, 14.0]


def test_synthetic_ring_grows_with_the_rollouts_and_keeps_what_it_holds() -> None:
    """Two sets of two rollouts: 4 transitions at length 1, 8 at length 2, 12 at length 3."""
    source = SyntheticReplay(spec_for("mbpo"), 2, sets=2, longest=3, gamma=0.9)
    data = source.init(1, torch.device("cpu"))
    number = iter(range(100))

    def append(length: int) -> list[float]:
        source.append(data, new_set(data))
        for _ in range(length):
            source.append(data, rollout_step(data, [float(next(number)), float(next(number))], [True, True]))
        count = int(data["count"])
        drawn = source.sample(tree_map(lambda x: x[0], data), KEY, 400, torch.zeros(()))["rewards"]
        held = sorted(data["rewards"][0, :count].tolist())
        assert sorted(set(drawn.tolist())) == held
        return held

    assert append(1) == [0, 1]
    assert append(1) == [0, 1, 2, 3]
    assert append(1) == [2, 3, 4, 5]
    assert append(2) == [4, 5, 6, 7, 8, 9]  # its second step makes room
    assert append(2) == [6, 7, 8, 9, 10, 11, 12, 13]
    assert append(3) == [*range(10, 20)]
    assert append(3) == [10, 11, *range(16, 26)]  # once around it, rows are replaced in the order of the smaller ring
    assert append(1) == [10, 11, *range(18, 28)]  # it does not shrink
    assert append(3) == [*range(22, 34)]
    assert source.written(data)["rewards"].shape == (1, 1, 12)  # a checkpoint has the rows that are held


def test_synthetic_ring_restored_in_the_middle_of_a_set_goes_on_as_if_never_saved() -> None:
    source = SyntheticReplay(spec_for("mbpo"), 2, sets=2, longest=3, gamma=0.9)

    def go_on(data: Any, numbers: range) -> None:
        for number in numbers:
            if number % 3 == 0:  # a new set, of one, two or three steps
                source.append(data, new_set(data))
            source.append(data, rollout_step(data, [float(number), -float(number)], [True, number % 5 > 0]))

    whole = source.init(1, torch.device("cpu"))
    go_on(whole, range(1, 8))
    cut = source.init(1, torch.device("cpu"))
    restore(source, cut, saved_tensors(source, whole))
    for data in (whole, cut):
        go_on(data, range(8, 20))
    rows = int(whole["count"])
    assert_same_bits({k: v[:, :rows] if k in source.columns else v for k, v in whole.items()},
                     {k: v[:, :rows] if k in source.columns else v for k, v in cut.items()})  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "sets", "capacity"),
    [
        # Janner et al.'s code: epochs of 1,000 steps have four fits, so one epoch is 400,000 transitions at length 1.
        ({"rollout_batch": 100_000, "model_train_freq": 250}, 4, 400_000),
        ({"rollout_batch": 100_000, "model_train_freq": 250, "rollout_length_final": 15}, 4, 6_000_000),
        ({"rollout_batch": 100_000, "model_train_freq": 250, "model_retain_epochs": 5}, 20, 2_000_000),
        ({"rollout_batch": 10, "model_train_freq": 5_000, "rollout_length": 3}, 1, 30),
    ],
)
def test_room_for_length_x_rollouts_x_retained_fits(fields: dict[str, Any], sets: int, capacity: int) -> None:
    hyper = MBPOHyper(**fields)
    assert hyper.retained_sets(num_envs=1) == sets
    source = SyntheticReplay(spec_for("mbpo"), hyper.rollout_batch, sets, hyper.longest_rollout, gamma=0.9)
    assert source.capacity == capacity


@pytest.mark.parametrize("size", [1, 128, 129, 20_000])
def test_running_sum_in_blocks(size: int) -> None:
    x = torch.as_tensor(np.random.default_rng(0).integers(-3, 9, (2, size)))
    assert torch.equal(running_sum(x), torch.cumsum(x, -1))


def test_share_of_real_rows() -> None:
    def parts(ratio: float) -> tuple[Any, ...]:
        phase = make_algorithm("mbpo", batch_size=40, real_ratio=ratio).policy_phase()  # type: ignore[attr-defined]
        return phase.source, phase.batch_size, phase.also

    assert parts(0.05) == ("replay", 2, ("synthetic", 38))
    assert parts(1.0) == ("replay", 40, None)
    assert parts(0.0) == ("synthetic", None, None)


def test_unsuitable_settings_are_refused() -> None:
    for fields, message in (
        ({"rollout_length": 0}, "rollout_length = 0: .*greater than or equal to 1"),
        ({"real_ratio": 1.2}, "real_ratio = 1.2: .*less than or equal to 1"),
        ({"real_ratio": -0.1}, "greater than or equal to 0"),
        ({"model_retain_epochs": 0.0}, "model_retain_epochs = 0.0: .*greater than 0"),
        ({"rollout_schedule": [5, 3]}, "two rising steps"),
    ):
        with pytest.raises(UserError, match=message):
            make_algorithm("mbpo", **fields)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(0,), (3, 4)])
def test_resume_in_the_middle_of_fitting_and_of_a_rollout(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    """Cut after each of these calls of a phase, continue from the checkpoint: the same run, bit for bit."""

    def config(side: str) -> Any:
        options = {"seeds": seeds, "algo_kwargs": {"rollout_length": 3, "model_max_epochs": 2}, "total_timesteps": 90}
        return config_for("mbpo", tmp_path / side, **options)

    whole = Trainer(config("whole"), progress=False).run()
    wanted = run_digest(whole.checkpoint_path)

    def cut_at(trainer: Trainer, name: str, number: int) -> None:
        learner: Any = trainer.loop.learner
        update, seen = learner.update, {"calls": 0}

        def counted(times: int, phase: Any) -> Any:
            out = update(times, phase)
            seen["calls"] += phase.name == name
            if phase.name == name and seen["calls"] == number:
                trainer.request_stop("the test asks for it")
            return out

        learner.update = counted

    trainer = Trainer(config("cut"), progress=False)
    for name, number in (("fit", 2), ("begin", 1), ("imagine", 2), ("policy", 1), ("validate", 1)):
        cut_at(trainer, name, number)
        result = trainer.run()
        assert result.status == "stopped"
        assert trainer.loop.counters()["position"] is not None  # in the middle of learning
        trainer = Trainer.resume(result.run_dir, progress=False)
    result = trainer.run()
    assert result.status == "completed"
    found = run_digest(result.checkpoint_path)
    assert {k: v for k, v in found.items() if k != "metrics"} == {k: v for k, v in wanted.items() if k != "metrics"}
