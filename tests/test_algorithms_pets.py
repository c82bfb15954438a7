"""The planner on problems with a known answer, and PETS' particles against a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import OBS_DIM, batch_for, make_algorithm

from rl_training.errors import UserError
from rl_training.models.dynamics import Prediction
from rl_training.ops import rng
from rl_training.ops.planning import CEM, noise_colouring_matrix, shift_plan

KEY = rng.key_from_seed(6)


@pytest.mark.parametrize("keep", [0.0, 0.3])
def test_planner_finds_the_best_plan(keep: float) -> None:
    goal = torch.tensor([[[0.5, -0.3], [-0.8, 0.1], [0.9, 3.0]], [[0.0, 0.0], [0.2, 0.2], [-0.7, -3.0]]])  # [B, H, A]

    def score(plans: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return -(plans - goal.unsqueeze(1)).square().sum((-1, -2))

    cem = CEM(3, 2, population=200, elites=20, iterations=15, momentum=0.0, keep=keep)
    plan, value = cem.plan(score, torch.zeros(2, 3, 2), KEY)
    torch.testing.assert_close(plan, goal.clamp(-1.0, 1.0), atol=0.05, rtol=0.0)
    torch.testing.assert_close(value, torch.tensor([-4.0, -4.0]), atol=0.1, rtol=0.0)


def test_one_iteration_by_hand() -> None:
    cem = CEM(2, 1, population=6, elites=2, iterations=1, momentum=0.25, deviation=0.5)
    start = torch.full((1, 2, 1), 0.2)
    noise = rng.normal(rng.fold(KEY, 0), (1, 6, 1, 2)).transpose(-1, -2)
    plans = (0.2 + 0.5 * noise).clamp(-1, 1)[0, :, :, 0].numpy()  # [6, 2]
    best = plans[np.argsort(-plans.sum(1))[:2]]
    plan, value = cem.plan(lambda p, _: p.sum((-1, -2)), start, KEY)
    np.testing.assert_allclose(plan[0, :, 0].numpy(), 0.25 * 0.2 + 0.75 * best.mean(0), rtol=1e-5)
    assert float(value) == pytest.approx(best.sum(1).mean(), rel=1e-5)


@pytest.mark.parametrize("horizon", [1, 2, 7, 12])
def test_coloured_noise(horizon: int) -> None:
    matrix = noise_colouring_matrix(horizon, 2.0)
    assert matrix.shape == (horizon, horizon)
    torch.testing.assert_close(matrix.square().sum(0), torch.ones(horizon))  # variance 1 at each time
    if horizon > 2:

        def neighbours(beta: float) -> float:
            covariance = noise_colouring_matrix(horizon, beta).T @ noise_colouring_matrix(horizon, beta)
            return float(torch.diagonal(covariance, 1).mean())

        assert neighbours(3.0) > neighbours(1.0) > 0.2  # redder is smoother


def test_shifted_plan_repeats_its_last_action() -> None:
    assert shift_plan(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten().tolist() == [2.0, 3.0, 3.0]


@pytest.mark.parametrize("sampling", ["ts1", "tsinf"])
def test_returns_of_particles(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without noise whose member k adds (k + 1) x action to the state and pays the state."""
    pets: Any = make_algorithm("pets", num_members=3, num_elites=3, plan_horizon=4, termination="none",
                               trajectory_sampling=sampling)  # fmt: skip

    def predict(state: Any, obs: torch.Tensor, actions: torch.Tensor) -> Prediction:
        step = actions[..., :1] * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        mean = torch.cat([step.expand_as(obs), obs[..., :1]], -1)
        return Prediction(mean, torch.full_like(mean, -200.0), None)

    monkeypatch.setattr(pets.dynamics, "predict", predict)
    plans = torch.as_tensor(np.random.default_rng(0).uniform(-1, 1, (2, 5, 4, 2)), dtype=torch.float32)
    obs = torch.tensor([[1.0], [-2.0]]).expand(2, OBS_DIM)
    found = pets.returns(pets.init_state(0), obs, plans, KEY)
    if sampling == "tsinf":
        for b in range(2):
            for n in range(5):
                totals = []
                for gain in (1.0, 2.0, 3.0):
                    x, total = float(obs[b, 0]), 0.0
                    for t in range(4):
                        total += x
                        x += gain * float(plans[b, n, t, 0])
                    totals.append(total)
                assert float(found[b, n]) == pytest.approx(np.mean(totals), abs=1e-4)
    else:  # each step hands the three particles to the three members in some order: the mean moves by the mean gain
        x, total = obs[:, :1].expand(2, 5).clone(), torch.zeros(2, 5)
        for t in range(4):
            total += x
            x = x + 2.0 * plans[:, :, t, 0]
        torch.testing.assert_close(found, total, atol=1e-4, rtol=1e-4)


def test_particles_that_ended_earn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pets: Any = make_algorithm("pets", plan_horizon=4, termination="none")
    monkeypatch.setattr(pets.dynamics, "ends", lambda obs: obs[..., 0] > 1.5)

    def predict(state: Any, obs: torch.Tensor, actions: torch.Tensor) -> Prediction:
        mean = torch.ones(*obs.shape[:-1], OBS_DIM + 1)
        return Prediction(mean, torch.full_like(mean, -200.0), None)

    monkeypatch.setattr(pets.dynamics, "predict", predict)
    returns = pets.returns(pets.init_state(0), torch.zeros(1, OBS_DIM), torch.zeros(1, 1, 4, 2), KEY)
    assert float(returns) == pytest.approx(2.0)  # 0 -> 1 -> 2: the second step is the last that is paid


def test_shifted_plan_is_where_the_next_search_begins() -> None:
    pets: Any = make_algorithm("pets")
    state, obs = pets.init_state(0), batch_for(pets)["obs"]
    carry, action, _ = pets.select_action(state, pets.init_carry(len(obs)), obs, KEY, explore=True)
    plan, _ = pets.plan(state, obs, pets.init_carry(len(obs))["plan"], KEY)
    assert torch.equal(action, plan[:, 0])
    assert torch.equal(carry["plan"], shift_plan(plan))
    assert action.abs().max() <= 1.0


def test_refuses_more_elites_than_plans() -> None:
    with pytest.raises(UserError, match="plan_elites = 9 is more than plan_population = 8"):
        make_algorithm("pets", plan_elites=9)
