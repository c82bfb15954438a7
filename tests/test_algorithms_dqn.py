"""DQN by hand: targets with weights set by hand, gradients against plain autograd, options, rhythm."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch_for, make_algorithm
from torch import nn

from rl_training.algorithms import DQN
from rl_training.experiment.run.config import make_config
from rl_training.experiment.run.environment import with_env
from rl_training.models import MLPQNetwork
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def linear(weight: list[list[float]]) -> MLPQNetwork:
    """Q = W x, no hidden layer, no bias."""
    net = MLPQNetwork(2, 2, ())
    with torch.no_grad():
        net.advantage.weight.copy_(torch.tensor(weight))
        net.advantage.bias.zero_()
    return net


def hand_set(double: bool, **fields: Any) -> tuple[Any, Any]:
    """Online Q = (x0, x1); target Q = (3 x1, 2 x0)."""
    online, target = linear([[1.0, 0.0], [0.0, 1.0]]), linear([[0.0, 3.0], [2.0, 0.0]])
    algorithm = DQN(q_network=online, double=double, max_grad_norm=0.0, optimizer="sgd", learning_rate=0.1, **fields)
    state = algorithm.init_state(0)
    return algorithm, state._replace(target={"q": algorithm.nets["q"].flatten(target)})


BATCH = {
    "obs": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "actions": torch.tensor([0, 1]),
    "rewards": torch.tensor([0.5, -1.0]),
    "next_obs": torch.tensor([[4.0, 1.0], [1.0, 5.0]]), "discounts": torch.tensor([0.9, 0.0]),
    "weights": torch.ones(2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("double", "target"),
    [
        # Target Q at (4, 1) is (3, 8): the maximum is 8. Online Q there is (4, 1): it picks action 0, worth 3.
        (False, 0.5 + 0.9 * 8.0),
        (True, 0.5 + 0.9 * 3.0),
    ],
)
def test_target_by_hand(double: bool, target: float) -> None:
    algorithm, state = hand_set(double)
    new, aux = algorithm.train_step(state, BATCH, KEY)
    assert float(aux.metrics["target_mean"]) == pytest.approx((target - 1.0) / 2)  # the second row terminated
    errors = [1.0 - target, 2.0 + 1.0]  # Q of the actions taken: 1 and 2
    assert aux.priority.tolist() == pytest.approx([abs(e) for e in errors])
    huber = [abs(e) - 0.5 for e in errors]
    assert float(aux.metrics["loss"]) == pytest.approx(sum(huber) / 2)
    # Gradient of the Huber loss is the sign of the error here; W[a] moves by -lr * sign * obs / 2.
    weight = algorithm.nets["q"].named(new.params["q"])["advantage.weight"]
    expected = torch.tensor([[1.0 + 0.1 * 0.5, 0.0], [0.0, 1.0 - 0.1 * 2.0 / 2]])
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize(
    "options", [{}, {"double": True}, {"dueling": True}, {"double": True, "dueling": True}], ids=str
)
def test_update_equals_plain_autograd(options: dict[str, Any]) -> None:
    """The same step written the ordinary way: modules, backward, torch.optim."""
    algorithm = make_algorithm("dqn", hidden_sizes=[12], learning_rate=1e-2, max_grad_norm=0.5, **options)
    state = algorithm.init_state(0)
    state = state._replace(target={"q": algorithm.init_state(1).params["q"]})
    online, target = copy.deepcopy(algorithm.modules["q"]), copy.deepcopy(algorithm.modules["q"])
    online.requires_grad_()
    net = algorithm.nets["q"]
    net.write_to(online, state.params["q"])
    net.write_to(target, state.target["q"])
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    for i in range(4):
        batch = batch_for(algorithm, seed=i)
        with torch.no_grad():
            next_q = target(batch["next_obs"])
            choice = (online if options.get("double") else target)(batch["next_obs"]).argmax(-1, keepdim=True)
            goal = batch["rewards"] + batch["discounts"] * next_q.gather(-1, choice)[:, 0]
        q = online(batch["obs"]).gather(-1, batch["actions"][:, None])[:, 0]
        loss = (batch["weights"] * nn.functional.smooth_l1_loss(q, goal, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 0.5)
        optimizer.step()
        state, aux = algorithm.train_step(state, batch, rng.fold(KEY, i))
        assert float(aux.metrics["loss"]) == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(net.flatten(online), state.params["q"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("envs", "train_freq", "gradient_steps", "updates"),
    [(1, 1, 1, 12), (4, 1, 1, 3), (4, 1, -1, 12), (1, 4, 1, 3), (1, 4, 2, 6), (2, 2, -1, 12), (1, 16, 16, 16)],
)
def test_target_interval_counts_environment_steps(
    envs: int, train_freq: int, gradient_steps: int, updates: int
) -> None:
    """12 environment steps between copies, whatever the number of environments and the rhythm of updates."""
    base = make_algorithm("dqn")
    algorithm = type(base)(
        base.spec, num_envs=envs, target_update_interval=12, train_freq=train_freq, gradient_steps=gradient_steps,
        hidden_sizes=[4],
    )  # fmt: skip
    state, copied = algorithm.init_state(0), []
    for i in range(1, 34):
        before = state.target["q"]
        state, _ = algorithm.train_step(state, batch_for(algorithm, seed=i), KEY)
        if torch.equal(state.target["q"], state.params["q"]):
            copied.append(i)
        else:
            assert torch.equal(state.target["q"], before)
    assert copied == list(range(updates, 34, updates))


def test_epsilon_greedy_frequencies() -> None:
    algorithm, state = hand_set(False, exploration_initial_eps=0.8, exploration_final_eps=0.2, exploration_fraction=0.5)
    obs = torch.tensor([[5.0, 1.0]]).expand(4000, 2)  # greedy: 0
    for progress, epsilon in ((0.0, 0.8), (0.25, 0.5), (0.5, 0.2), (1.0, 0.2)):
        at = state._replace(progress=torch.tensor(progress))
        _, actions, _ = algorithm.select_action(at, (), obs, rng.fold(KEY, int(100 * progress)), explore=True)
        share = float((actions == 1).float().mean())
        assert share == pytest.approx(epsilon / 2, abs=4 * np.sqrt(0.25 / 4000))
        _, greedy, _ = algorithm.select_action(at, (), obs, KEY, explore=False)
        assert not greedy.any()


def test_noisy_explores_by_noise_only() -> None:
    algorithm = make_algorithm("noisy_dqn")
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    net, flat = algorithm.nets["q"], state.params["q"]
    assert not torch.equal(net(flat, obs, rng.fold(KEY, 0)), net(flat, obs, rng.fold(KEY, 1)))
    _, greedy, _ = algorithm.select_action(state, (), obs, rng.fold(KEY, 1), explore=False)
    assert torch.equal(greedy, net(flat, obs, None).argmax(-1))
    explored = [algorithm.select_action(state, (), obs, rng.fold(KEY, i), explore=True)[1] for i in range(40)]
    assert any(not torch.equal(actions, greedy) for actions in explored), "the noise explores"
    # No epsilon: without noise in the weights nothing is random, even at the start of training.
    silent = flat.clone()
    for name, view in net.named(silent).items():
        if name.endswith("sigma"):
            view.zero_()
    quiet = state._replace(params={**state.params, "q": silent})
    for i in range(40):
        _, actions, _ = algorithm.select_action(quiet, (), obs, rng.fold(KEY, i), explore=True)
        assert torch.equal(actions, greedy)


def test_variants_are_options() -> None:
    flags = {"double_dqn": "double", "dueling_dqn": "dueling", "noisy_dqn": "noisy", "prioritized_dqn": "prioritized"}
    for name, flag in flags.items():
        hp = make_algorithm(name).hp
        assert [getattr(hp, f) for f in flags.values()] == [f == flag for f in flags.values()]
    assert make_algorithm("n_step_dqn").hp.n_step == 3
    assert make_algorithm("double_dqn", double=False).hp.double is False


@pytest.mark.parametrize(("name", "rate"), [("dqn", 1e-4), ("qr_dqn", 1e-4), ("dueling_dqn", 1e-4)])
def test_defaults_on_images_are_those_of_atari(name: str, rate: float) -> None:
    """CleanRL's dqn_atari: Adam at 1e-4, batches of 32, an update every 4 steps, targets every 1,000."""
    image = make_config(algo=name, env_id="rl_training/TinyPixels-v0", total_timesteps=100, gamma=0.5)
    found = with_env(image, None)[0].hyper()
    assert found.learning_rate(torch.tensor(0.0)) == pytest.approx(rate)
    assert (found.batch_size, found.train_freq, found.target_update_interval, found.gamma) == (32, 4, 1_000, 0.5)
    vector = make_config(algo=name, env_id="CartPole-v1", total_timesteps=100)
    assert with_env(vector, None)[0].hyper() == vector.hyper()
    chosen = make_config(algo=name, env_id="rl_training/TinyPixels-v0", total_timesteps=100, batch_size=8)
    assert with_env(chosen, None)[0].hyper().batch_size == 8
