"""Flow Q-learning: each loss against plain autograd, Euler's method against closed forms, and a bimodal policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import ACTION_DIM, BATCH, OBS_DIM, assert_same_bits, batch_for, make_algorithm, modules_of
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.offline import FQLModel
from rl_training.ops import rng

KEY = rng.key_from_seed(6)
RATE = 0.1


def noises() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The draws of an update: noise of the next action, of the flow, its times, noise of the distilled actions."""
    drawn = [rng.normal(rng.fold(KEY, i), (BATCH, ACTION_DIM)) for i in (0, 1, 3)]
    return drawn[0], drawn[1], rng.uniform(rng.fold(KEY, 2), (BATCH,)), drawn[2]


def weighted(values: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (batch["weights"] * values).sum() / BATCH


@pytest.mark.parametrize("options", [{}, {"q_agg": "min", "normalize_q": True, "alpha": 3.0, "flow_steps": 4}])
def test_an_update_descends_the_three_losses_of_the_paper(options: dict[str, Any]) -> None:
    algorithm: Any = make_algorithm("fql", optimizer="sgd", learning_rate=RATE, tau=0.25, **options)
    hp, state, batch = algorithm.hp, algorithm.init_state(0), batch_for(algorithm)
    modules = modules_of(algorithm, state)
    flow, actor, critic, slow = (modules[name] for name in ("flow", "actor", "critic", "slow_critic"))
    next_noise, start, times, noise = noises()
    obs, actions = batch["obs"], batch["actions"]

    next_action = actor(batch["next_obs"], next_noise).clamp(-1, 1)
    pair = slow(batch["next_obs"], next_action)
    next_q = 0.5 * (pair[0] + pair[1]) if hp.q_agg == "mean" else torch.minimum(pair[0], pair[1])
    target = (batch["rewards"] + batch["discounts"] * next_q).detach()
    critic_loss = weighted(((critic(obs, actions) - target) ** 2).mean(0), batch)

    t = times.unsqueeze(-1)
    velocity = flow(obs, (1 - t) * start + t * actions, times)
    flow_loss = weighted(((velocity - (actions - start)) ** 2).mean(-1), batch)

    point = noise
    for i in range(hp.flow_steps):
        point = point + flow(obs, point, torch.full((BATCH,), i / hp.flow_steps)) / hp.flow_steps
    cloned = point.clamp(-1, 1).detach()
    action = actor(obs, noise)
    value = critic(obs, action.clamp(-1, 1)).mean(0)
    size = weighted(value.abs(), batch).detach() if hp.normalize_q else 1.0
    actor_loss = weighted(hp.alpha * ((action - cloned) ** 2).mean(-1) - value / size, batch)

    losses = {"critic": critic_loss, "flow": flow_loss, "actor": actor_loss}
    gradients = {
        name: torch.autograd.grad(loss, list(modules[name].parameters()), retain_graph=True)
        for name, loss in losses.items()
    }
    new, aux = algorithm.train_step(state, batch, KEY)
    for name, loss in losses.items():
        torch.testing.assert_close(aux.metrics[f"{name}_loss"], loss.detach(), rtol=1e-4, atol=1e-5)
        moved = copy.deepcopy(modules[name])
        with torch.no_grad():
            for parameter, gradient in zip(moved.parameters(), gradients[name]):
                parameter -= RATE * gradient
        torch.testing.assert_close(new.params[name], algorithm.nets[name].flatten(moved), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(new.target["critic"], torch.lerp(state.target["critic"], new.params["critic"], 0.25))


class Velocity(nn.Module):
    """v = x, or v = t: the solutions at time 1 are x e and x + 1/2."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.unused = kind, nn.Parameter(torch.zeros(1))

    def forward(self, obs: Tensor, points: Tensor, times: Tensor) -> Tensor:
        return (points if self.kind == "x" else times.unsqueeze(-1).expand_as(points)) + self.unused


@pytest.mark.parametrize("steps", [1, 10])
def test_euler_steps_of_known_velocities(steps: int) -> None:
    noise, obs = torch.tensor([[0.1, -0.2], [0.3, 0.05]]), torch.zeros(2, OBS_DIM)
    for kind, expected in (
        ("x", noise * (1 + 1 / steps) ** steps),  # e as the number of steps grows
        ("t", noise + sum(i / steps for i in range(steps)) / steps),
    ):
        algorithm: Any = make_algorithm("fql", flow_steps=steps)
        algorithm.nets["flow"] = type(algorithm.nets["flow"])(Velocity(kind))
        params = algorithm.nets["flow"].flatten(Velocity(kind))
        torch.testing.assert_close(algorithm.follow(params, obs, noise), expected)
        far = algorithm.follow(params, obs, 50.0 + noise)
        assert far.tolist() == [[1.0, 1.0], [1.0, 1.0]]  # cut off at the bounds


class TwoModes(nn.Module):
    """The velocity that flow matching converges to if half of the actions are -m and half m: E[x1 - x0 | x_t = x]."""

    def __init__(self, mode: float) -> None:
        super().__init__()
        self.mode, self.unused = mode, nn.Parameter(torch.zeros(1))

    def forward(self, obs: Tensor, points: Tensor, times: Tensor) -> Tensor:
        left = 1.0 - times.unsqueeze(-1)
        action = self.mode * torch.tanh(self.mode * (1.0 - left) * points / left**2)  # E[x1 | x_t = x]
        return (action - points) / left + self.unused


def test_following_the_best_flow_ends_at_the_two_modes_of_the_data() -> None:
    algorithm: Any = make_algorithm("fql")
    algorithm.nets["flow"] = type(algorithm.nets["flow"])(TwoModes(0.6))
    noise = rng.normal(KEY, (500, ACTION_DIM))
    actions = algorithm.follow(algorithm.nets["flow"].flatten(TwoModes(0.6)), torch.zeros(500, OBS_DIM), noise)
    clear = noise.abs() > 0.3
    torch.testing.assert_close(actions[clear], 0.6 * noise[clear].sign(), rtol=0.0, atol=0.05)


def test_actions_without_exploration_do_not_depend_on_the_key() -> None:
    algorithm: Any = make_algorithm("fql")
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    acts = [algorithm.select_action(state, (), obs, rng.fold(KEY, i), explore=False)[1] for i in range(2)]
    assert torch.equal(*acts)
    zero = modules_of(algorithm, state)["actor"](obs, torch.zeros(BATCH, ACTION_DIM)).clamp(-1, 1)
    torch.testing.assert_close(acts[0], zero.detach())
    drawn = [algorithm.select_action(state, (), obs, rng.fold(KEY, i), explore=True)[1] for i in range(2)]
    assert not torch.equal(*drawn)


def test_defaults_are_the_published_settings() -> None:
    from rl_training.algorithms.offline.fql import FQLHyper

    hp = FQLHyper()
    assert (hp.hidden_sizes, hp.activation, hp.layer_norm, hp.batch_size) == ((512,) * 4, "gelu", True, 256)
    assert (hp.tau, hp.gamma, hp.flow_steps, hp.q_agg, hp.normalize_q) == (0.005, 0.99, 10, "mean", False)
    assert float(hp.learning_rate(torch.zeros(()))) == pytest.approx(3e-4)


def test_a_model_of_ones_own_is_used() -> None:
    algorithm: Any = make_algorithm("fql")
    model = FQLModel(algorithm.spec, (24,))
    own: Any = type(algorithm)(model=model)
    assert_same_bits(own.init_state(0).params["flow"], own.nets["flow"].flatten(model.flow))
    assert own.act(batch_for(algorithm)["obs"]).shape == (BATCH, ACTION_DIM)


def test_fql_settings_are_checked_at_construction() -> None:
    for field in ({"flow_steps": 0}, {"alpha": -1.0}, {"q_agg": "max"}):
        with pytest.raises(UserError, match=next(iter(field))):
            make_algorithm("fql", **field)
    with pytest.raises(UserError, match="fql needs a bounded continuous"):
        make_algorithm("fql", "discrete")
