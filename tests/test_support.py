"""The support of categorical value distributions: found from the rewards, widened at its edges, or given."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from helpers import batch_for, make_algorithm
from torch import Tensor

from rl_training.algorithms.state import TrainState
from rl_training.algorithms.support import EDGE, RATE, SETTLING, Support
from rl_training.errors import UserError
from rl_training.experiment.run.config import make_config
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.tools.verify_resume import verify_resume

CPU = torch.device("cpu")


def state_of(support: Support, step: int = 0) -> TrainState:
    return TrainState({}, {}, {}, support.init_extra(), torch.tensor(step), torch.tensor(0.0))


def see(support: Support, rewards: list[float], step: int = 0, state: TrainState | None = None) -> list[float]:
    batch = {"rewards": torch.tensor(rewards), "weights": torch.ones(len(rewards))}
    state = support.hold_rewards(state or state_of(support, step), batch)
    bounds: list[float] = state.extra["support"]["range"].tolist()
    return bounds


def auto(discount: float = 0.99) -> Support:
    return Support(51, "auto", "auto", discount, CPU)


@pytest.mark.parametrize(
    ("rewards", "discount", "expected"),
    [
        ([1.0] * 64, 0.99, [0.0, 100.0]),  # CartPole: 1 / (1 - gamma), and zero
        ([-1.0] * 64, 0.99, [-100.0, 0.0]),  # Acrobot
        # Mean 0, deviation 2: three deviations of the return, 3 * 2 / sqrt(1 - gamma^2).
        ([2.0, -2.0] * 32, 0.9, [-6.0 / math.sqrt(0.19), 6.0 / math.sqrt(0.19)]),
        ([1.0] * 64, 1.0, [0.0, 1000.0]),  # without discounting: a horizon of 1,000 steps
    ],
)
def test_the_first_range_follows_from_rewards_and_gamma(
    rewards: list[float], discount: float, expected: list[float]
) -> None:
    assert see(auto(discount), rewards) == pytest.approx(expected, abs=0.2, rel=2e-3)


def test_a_reward_is_always_held() -> None:
    assert see(auto(0.0), [0.0] * 63 + [50.0])[1] == pytest.approx(50.0)
    assert see(auto(), [0.0] * 64, SETTLING)[1] < 1.0
    late = auto()
    state = late.hold_rewards(state_of(late), {"rewards": torch.ones(8), "weights": torch.ones(8)})
    state = state._replace(step=torch.tensor(SETTLING))
    assert see(late, [-300.0] + [1.0] * 7, state=state) == pytest.approx([-300.0, 100.0], abs=0.2)
    # Not by the estimate: it would be far below -300. A row of weight 0 is not seen.
    unseen = {"rewards": torch.tensor([-1e6, 1.0]), "weights": torch.tensor([0.0, 1.0])}
    assert late.hold_rewards(state, unseen).extra["support"]["range"].tolist() == pytest.approx([0.0, 100.0], abs=0.2)


def widened(support: Support, state: TrainState, clip: Tensor, times: int) -> TrainState:
    for _ in range(times):
        state, _ = support.widen(state, clip, torch.ones(len(clip)))
    return state


def test_the_support_grows_by_its_width_where_it_clips() -> None:
    support = auto()
    state = support.hold_rewards(state_of(support), {"rewards": torch.ones(64), "weights": torch.ones(64)})
    low, high = state.extra["support"]["range"].tolist()
    clip = torch.zeros(10)
    clip[:3] = -5.0  # three of ten targets lie above the support
    calls = math.ceil(math.log(1.0 - EDGE / 0.3) / math.log(1.0 - RATE))  # until the moving average exceeds EDGE
    assert widened(support, state, clip, calls - 1).extra["support"]["range"].tolist() == [low, high]
    grown = widened(support, state, clip, calls)
    assert grown.extra["support"]["range"].tolist() == pytest.approx([low, high + (high - low)])
    assert grown.extra["support"]["clipped"].tolist() == [0.0, 0.0]
    below = widened(support, state, -clip, calls)
    assert below.extra["support"]["range"].tolist() == pytest.approx([low - (high - low), high])
    spacing = (high - low) / 50  # the change of a mean that is a small part of an atom does not count
    kept = widened(support, state, 0.09 * spacing * torch.ones(10), 500)
    assert kept.extra["support"]["range"].tolist() == [low, high]


def test_a_given_support_has_no_state_and_is_watched() -> None:
    support = Support(11, -5.0, 5.0, 0.99, CPU)
    assert support.init_extra() == {}  # checkpoints of runs with a support are as they were
    clip = torch.tensor([0.0, 2.0, -2.0, 0.05])
    state, share = support.widen(state_of(support), clip, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert float(share) == pytest.approx(1 / 3)  # of the three rows that count, one; 0.05 is below a tenth of an atom
    assert state.extra == {}
    assert support.warning("c51_dqn", 0.01) is None
    assert support.warning("c51_dqn", 0.37) == (
        "c51_dqn: v_min = -5 and v_max = 5 clip 37% of the targets, so values beyond them cannot be learned;"
        " set both to auto, or to the range of the returns"
    )
    assert auto().warning("c51_dqn", 1.0) is None


@pytest.mark.parametrize("name", ["c51_dqn", "rainbow_dqn", "d4pg"])
def test_updates_report_clipped_targets(name: str) -> None:
    for fields, expected in (({"v_min": -1e-3, "v_max": 1e-3}, 1.0), ({"v_min": -500.0, "v_max": 500.0}, 0.0)):
        algorithm = make_algorithm(name, **fields)
        batch = batch_for(algorithm)
        batch["rewards"] = torch.full_like(batch["rewards"], 2.0)
        _, aux = algorithm.train_step(algorithm.init_state(0), batch, torch.tensor(0))
        assert float(aux.metrics["target_clipped"]) == expected


@pytest.mark.parametrize("name", ["c51_dqn", "d4pg"])
def test_a_wider_support_keeps_the_order_of_actions(name: str) -> None:
    algorithm = make_algorithm(name)
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    support = state.extra["support"]
    wide = state._replace(extra={**state.extra, "support": {**support, "range": torch.tensor([-7.0, 300.0])}})
    before, after = algorithm.value(state, obs), algorithm.value(wide, obs)
    assert not torch.allclose(before, after)
    assert torch.equal(before.argsort(), after.argsort())
    act = algorithm.select_action(state, (), obs, torch.tensor(0), explore=False)[1]
    assert torch.equal(act, algorithm.select_action(wide, (), obs, torch.tensor(0), explore=False)[1])


@pytest.mark.parametrize("fields", [{"v_min": -10.0}, {"v_max": 10.0}])
def test_half_a_support_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="give two numbers, or leave both on auto"):
        make_algorithm("c51_dqn", **fields)


def run(tmp_path: Any, **settings: Any) -> list[str]:
    """The warnings of a short run on CartPole, whose rewards are 1."""
    config = make_config(
        None, algo="c51_dqn", env_id="CartPole-v1", total_timesteps=150, log_interval=50, output_dir=str(tmp_path),
        execution="eager", eval_episodes=1, eval_interval=0, learning_starts=20, **settings,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(config, progress=False).run()
    return [str(w.message) for w in caught if "clip" in str(w.message)]


@pytest.mark.slow
def test_a_run_warns_once_about_a_support_that_clips(tmp_path: Any) -> None:
    said = run(tmp_path, v_min=-0.5, v_max=0.5)
    assert len(said) == 1
    assert "c51_dqn: v_min = -0.5 and v_max = 0.5 clip 100% of the targets" in said[0]
    assert run(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "env_id"), [("c51_dqn", "Acrobot-v1"), ("d4pg", "Pendulum-v1")])
def test_resume_is_exact(algo: str, env_id: str, tmp_path: Any) -> None:
    config = make_config(
        None, algo=algo, env_id=env_id, total_timesteps=200, seeds=(0, 1), learning_starts=20, batch_size=16,
        hidden_sizes=(16, 16), execution="eager", eval_episodes=1, eval_interval=100, output_dir=str(tmp_path),
    )  # fmt: skip
    assert verify_resume(config)["identical"]
