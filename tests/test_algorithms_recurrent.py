"""Recurrent agents: targets and gradients against a walk step by step, the carry on its way through the engine, and
what a user sees of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import make_algorithm
from torch import Tensor

from rl_training.algorithms.value.drqn import DRQN
from rl_training.data import RecurrentReplayBuffer
from rl_training.envs import make_env
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import Trainer
from rl_training.models import MLPQNetwork, MLPRecurrentQNetwork
from rl_training.ops import rng
from rl_training.ops.returns import gae
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

ENV = "rl_training/CartPoleNoVelocity-v0"
KEY = rng.key_from_seed(1)
NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
SPEC = EnvSpec("Test-v0", ArraySpec((2,)), ActionSpec("discrete", (3,)))
SMALL = {"hidden_sizes": [6], "cell_size": 5}


def trainer(algo: str, tmp_path: Path, **changes: Any) -> Trainer:
    small: dict[str, Any] = {"hidden_sizes": [8], "cell_size": 6, "sequence_length": 4}
    small |= {"n_steps": 32, "batch_size": 32, "n_epochs": 1} if algo == "recurrent_ppo" else {"learning_starts": 80}
    kwargs = {**small, **changes.pop("algo_kwargs", {})}
    config = TrainConfig(
        algo=algo, env_id=ENV, total_timesteps=changes.pop("total_timesteps", 128), output_dir=str(tmp_path),
        eval_episodes=3, execution="eager", device="cpu", algo_kwargs=kwargs, **{"num_envs": 4, **changes},
    )  # fmt: skip
    return Trainer(config, progress=False)


# --- recurrent PPO ---------------------------------------------------------------------------------------------------


def test_ppo_outlook_equals_a_step_by_step_loop() -> None:
    """Values, next values and advantages of a rollout with ends inside it, one step at a time."""
    algorithm: Any = make_algorithm("recurrent_ppo", sequence_length=4)
    state, (steps, envs) = algorithm.init_state(0), (8, 3)
    g = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    rollout = {
        "obs": normal(steps, envs, 5), "next_obs": normal(steps, envs, 5), "rewards": normal(steps, envs),
        "actions": torch.randint(0, 3, (steps, envs), generator=g), "terminated": torch.zeros(steps, envs) > 0,
        "truncated": torch.zeros(steps, envs) > 0, "valid": torch.ones(steps, envs) > 0,
        "state": normal(steps, envs, 2, algorithm.carry_size),
    }  # fmt: skip
    rollout["terminated"][2, 0] = rollout["truncated"][5, 1] = True
    rollout["truncated"][3, 2] = True
    rollout["valid"][4, 2] = False  # the row of a reset: the episode begins after it
    net, params = algorithm.nets["policy"], state.params["policy"]
    values, next_values, log_probs = (torch.zeros(steps, envs) for _ in range(3))
    for n in range(envs):
        carry = rollout["state"][0, n : n + 1]
        for t in range(steps):
            before = t and (rollout["terminated"] | rollout["truncated"] | ~rollout["valid"])[t - 1, n]
            carry = torch.zeros_like(carry) if before else carry
            rollout["state"][t, n] = carry[0]  # stored while acting
            out, value, carry = net(params, rollout["obs"][t, n : n + 1], carry)
            values[t, n], log_probs[t, n] = value, out.log_softmax(-1)[0, rollout["actions"][t, n]]
            next_values[t, n] = net(params, rollout["next_obs"][t, n : n + 1], carry)[1]
    terminated = rollout["terminated"].float()
    advantages, _ = gae(
        rollout["rewards"], values, next_values, 0.99 * (1 - terminated),
        1 - (rollout["terminated"] | rollout["truncated"]).float(), 0.95,
    )  # fmt: skip
    _, batch = algorithm.prepare(state, rollout, KEY)
    assert batch["obs"].shape == (2 * envs, 4, 5)  # sequences: first halves of all environments, then second halves
    for row in range(2 * envs):
        part, n = divmod(row, envs)
        time = slice(4 * part, 4 * part + 4)
        assert torch.equal(batch["obs"][row], rollout["obs"][time, n])
        assert torch.equal(batch["state"][row], rollout["state"][4 * part, n])
        torch.testing.assert_close(batch["advantages"][row], advantages[time, n], **NEAR)
        torch.testing.assert_close(batch["log_probs"][row], log_probs[time, n], **NEAR)
        assert torch.equal(batch["weights"][row], rollout["valid"][time, n].float())
    assert batch["is_first"].flatten().nonzero().flatten().tolist() == [3, 18, 20, 21]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_ppo_ratio_is_one_before_the_first_update(tmp_path: Path, cell: str) -> None:
    """What is stored while acting is what learning starts from: episodes end inside the rollout, sequences begin in the
    middle of others, and yet the policy gives every action the probability it was drawn with."""
    run = trainer("recurrent_ppo", tmp_path, algo_kwargs={"cell": cell, "n_steps": 48})
    loop: Any = run.loop
    loop.start()
    for _ in range(2):  # the second rollout begins in the middle of episodes
        loop._collect(48)
        learner = loop.learner
        rollout = learner.store.whole({k: v[0] for k, v in learner.tree["data"].items()})
        _, batch = learner.prepare_fn(learner.tree)
        minibatch = {k: v[0] for k, v in batch.items()}
        out, _ = run.algorithm.evaluate(  # type: ignore[attr-defined]
            {"policy": learner.train.params["policy"][0]}, minibatch
        )
        log_probs = run.algorithm.dist.log_prob(out, minibatch["actions"])  # type: ignore[attr-defined]
        torch.testing.assert_close(log_probs, minibatch["log_probs"], **NEAR)
        ended = (rollout["terminated"] | rollout["truncated"])[:-1]
        assert 4 < ended.sum() < 40
        fresh = rollout["state"][1:].abs().sum((-1, -2)) == 0
        assert torch.equal(fresh, ended)
        with torch.no_grad():
            learner.tree["data"]["count"].zero_()
    run.envs.close()


def test_ppo_sequence_must_divide_the_rollout() -> None:
    with pytest.raises(UserError, match="sequence_length = 5 must divide n_steps = 16"):
        make_algorithm("recurrent_ppo", sequence_length=5)
    with pytest.raises(UserError, match="sequence_length = 16 must divide batch_size = 8"):
        make_algorithm("recurrent_ppo", sequence_length=16, batch_size=8)


# --- DRQN and R2D2 ---------------------------------------------------------------------------------------------------


def h(x: Tensor) -> Tensor:
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + 1e-3 * x


def h_inverse(x: Tensor) -> Tensor:
    """As the paper has it (Pohlen et al. 2018, Proposition A.2), in double precision."""
    x = x.double()
    root = ((1 + 4e-3 * (x.abs() + 1 + 1e-3)).sqrt() - 1) / 2e-3
    return (x.sign() * (root.square() - 1)).float()


R2D2 = {"stored_state": True, "burn_in": 2, "value_rescaling": True, "double": True, "dueling": True, "n_step": 2}


@pytest.mark.parametrize("options", [{}, {"burn_in": 3, "cell": "gru"}, R2D2], ids=["drqn", "burn_in", "r2d2"])
def test_update_equals_a_step_by_step_loop(options: dict[str, Any]) -> None:
    """One plain gradient step against sequences walked one by one, with autograd on the walk."""
    fields = {**SMALL, "sequence_length": 3, "optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, **options}
    algorithm = DRQN(SPEC, **fields)
    hp, n_step = algorithm.hp, algorithm.hp.n_step
    length, size = hp.burn_in + 3, algorithm.carry_size
    buffer = RecurrentReplayBuffer(
        SPEC, 200, length=length, period=2, gamma=hp.gamma, n_step=n_step,
        state_shape=(size,) if hp.stored_state else None, alpha=0.9,
    )  # fmt: skip
    g = torch.Generator().manual_seed(3)
    for _ in range(60):
        state = {"state": torch.randn(size, generator=g)} if hp.stored_state else {}
        terminated = bool(torch.rand((), generator=g) < 0.15)
        truncated = not terminated and bool(torch.rand((), generator=g) < 0.15)
        buffer.add(
            torch.randn(2, generator=g), int(torch.randint(0, 3, (), generator=g)), 3 * torch.randn((), generator=g),
            torch.randn(2, generator=g), terminated, truncated, **state,
        )  # fmt: skip
    batch = buffer.sample(7)
    batch["weights"] = torch.linspace(0.2, 1.0, 7)
    state = algorithm.init_state(0)
    state = state._replace(target={"q": algorithm.init_state(9).params["q"]})
    net = algorithm.nets["q"]

    def walk(flat: Tensor, b: int) -> tuple[list[Tensor], list[Tensor]]:
        """Values of every step, and of the observation after it."""
        carry = batch["state"][b : b + 1] if hp.stored_state else torch.zeros(1, size)
        here, after = [], []
        for t in range(length):
            if t and batch["is_first"][b, t]:
                carry = torch.zeros_like(carry)
            q, carry = net(flat, batch["obs"][b, t : t + 1], carry)
            here.append(q[0])
            after.append(net(flat, batch["next_obs"][b, t : t + 1], carry)[0][0].detach())
            if t == hp.burn_in - 1:
                carry = carry.detach()
        return here, after

    flat = state.params["q"].clone().requires_grad_()
    losses, errors = [], torch.zeros(7, 3)
    for b in range(7):
        here, online = walk(flat, b)
        with torch.no_grad():
            _, slow = walk(state.target["q"], b)
        for k in range(3):
            t = hp.burn_in + k
            end = int(batch["bootstrap"][b, t])
            action = (online if hp.double else slow)[end].argmax()
            value = slow[end][action]
            if hp.value_rescaling:
                target = h(batch["rewards"][b, t] + batch["discounts"][b, t] * h_inverse(value))
            else:
                target = batch["rewards"][b, t] + batch["discounts"][b, t] * value
            error = here[t][batch["actions"][b, t]] - target
            errors[b, k] = error.detach().abs()
            huber = torch.where(error.abs() <= 1, 0.5 * error**2, error.abs() - 0.5)
            losses.append(batch["weights"][b] * huber)
    loss = torch.stack(losses).mean()
    (gradient,) = torch.autograd.grad(loss, flat)
    new, aux = algorithm.train_step(state, batch, KEY)
    torch.testing.assert_close(aux.metrics["loss"], loss.detach(), **NEAR)
    torch.testing.assert_close(state.params["q"] - new.params["q"], gradient, **NEAR)
    assert aux.priority is not None
    torch.testing.assert_close(aux.priority, 0.9 * errors.amax(-1) + 0.1 * errors.mean(-1), **NEAR)


def test_rescaled_agents_report_values_in_units_of_the_return() -> None:
    plain, scaled = (DRQN(SPEC, **SMALL, value_rescaling=on) for on in (False, True))
    obs = torch.randn(4, 2)
    q = plain.q_values(plain.init_state(0).params, obs)
    torch.testing.assert_close(scaled.q_values(scaled.init_state(0).params, obs), h_inverse(q), **NEAR)
    torch.testing.assert_close(scaled.value(scaled.init_state(0), obs), h_inverse(q).amax(-1), **NEAR)


def test_own_network_keeps_its_carry_outside_a_run() -> None:
    algorithm = DRQN(q_network=MLPRecurrentQNetwork(2, 3, [6], units=5))
    obs = torch.randn(4, 2)
    first = algorithm.act(obs, deterministic=True)
    carry = algorithm.shell.episodes.carry
    assert carry.shape == (4, 10)
    algorithm.act(obs, deterministic=True)
    assert not torch.equal(algorithm.shell.episodes.carry, carry)
    assert (algorithm.act(obs, deterministic=True, episode_start=True) == first).all()
    torch.testing.assert_close(algorithm.shell.episodes.carry, carry)
    with pytest.raises(UserError, match="returns one recurrent value per action"):
        DRQN(q_network=MLPQNetwork(2, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlap": 10}, "overlap = 10 must be below sequence_length = 10"),
        (
            {"value_rescaling": True, "target_rule": "soft"},
            "value_rescaling cannot be combined with target_rule = soft",
        ),
        ({"sequence_length": 40, "burn_in": 20}, "sequences of 60 steps .* which ends after 50"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    spec = EnvSpec("Test-v0", ArraySpec((2,)), ActionSpec("discrete", (3,)), max_episode_steps=50)
    with pytest.raises(UserError, match=message):
        DRQN(spec, **fields)


def test_learning_must_start_late_enough(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="learning_starts = 80 must be at least 160"):
        trainer("drqn", tmp_path, algo_kwargs={"sequence_length": 40})


# --- the carry in the engine -----------------------------------------------------------------------------------------


def test_replay_stores_the_states_that_the_policy_acted_with(tmp_path: Path) -> None:
    """Every stored state, walked to from the start of its episode through the stored observations."""
    kwargs = {"burn_in": 2, "overlap": 0, "learning_starts": 1000, "buffer_size": 800}
    run = trainer("r2d2", tmp_path, total_timesteps=400, algo_kwargs=kwargs)
    run.loop.advance(400)
    run.loop.finish()
    learner: Any = run.loop.learner
    data = {k: v[0] for k, v in learner.tree["data"].items()}
    params, net, store = learner.train.params["q"][0], run.algorithm.nets["q"], learner.store
    starts = 0
    for n in range(4):
        carry = torch.zeros(1, run.algorithm.carry_size)  # type: ignore[attr-defined]
        for t in range(100):
            row = n * store.stride + t
            if t % store.period == 0:
                kept = data["state"][n * store.slots_each + t // store.period]
                torch.testing.assert_close(kept, carry[0], **NEAR)
            carry = net(params, data["obs"][row : row + 1], carry)[1]
            if data["terminated"][row] or data["truncated"][row]:
                carry, starts = torch.zeros_like(carry), starts + 1
    assert starts > 8
    run.envs.close()


@pytest.fixture(scope="module", params=["recurrent_ppo", "r2d2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    seeds = {"seeds": (3, 4)} if request.param == "r2d2" else {"seed": 3}
    extra = {} if request.param == "recurrent_ppo" else {"burn_in": 2, "overlap": 2, "batch_size": 4}
    run = trainer(request.param, tmp_path_factory.mktemp("run"), algo_kwargs=extra, **seeds)
    return run.run().checkpoint_path


def test_predict_remembers_and_evaluation_agrees(trained: Path) -> None:
    """Episodes played with predict() equal those of the evaluator, which runs several at once and restarts them."""
    agent = Agent.load(trained, device="cpu")
    five = agent.evaluate(5, seed=0)
    env = make_env(ENV)
    from rl_training.envs.vector import episode_seed
    from rl_training.runtime.evaluator import EVALUATION_STREAM, Evaluator

    evaluator = Evaluator(agent.algorithm, ENV, [3], 5, max_envs=2)  # more episodes than environments
    result = evaluator.run(type(agent.train)(*(_first(x) for x in agent.train)))
    evaluator.close()
    assert result is not None
    played = []
    for n, episodes in enumerate((3, 2)):
        for episode in range(episodes):
            obs, _ = env.reset(seed=episode_seed(3, EVALUATION_STREAM, n, episode))
            played.append(play(agent, env, obs))
    assert result.returns[0] == played
    assert five["episodes"] == 5


def _first(tree: Any) -> Any:
    from rl_training.ops.tree import tree_map

    return tree_map(lambda x: x[:1], tree)


def play(agent: Agent, env: gym.Env[Any, Any], obs: Any) -> float:
    agent.reset()
    total, done = 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(agent.predict(obs))
        total, done = total + float(reward), terminated or truncated
    return total


def test_single_rows_can_begin_a_new_episode(trained: Path) -> None:
    agent = Agent.load(trained, device="cpu")
    obs = np.array([[0.1, 0.02], [-0.1, 0.1], [0.0, -0.1]], np.float32)
    agent.predict(obs)
    first = agent.episodes.carry
    agent.predict(obs)
    second = agent.episodes.carry
    before = agent.value(obs)
    assert agent.episodes.carry is second  # asking for a value is not remembered
    agent.predict(obs, episode_start=[True, False, True])
    mixed = agent.episodes.carry
    torch.testing.assert_close(mixed[[0, 2]], first[[0, 2]])
    assert not torch.allclose(mixed[1], first[1], atol=1e-5)
    agent.reset()
    assert not np.allclose(agent.value(obs), before)
    agent.episodes.carry = second
    assert np.allclose(agent.value(obs), before)
    with pytest.raises(UserError, match="remembers 3 running episodes, but was given 1 observation; call reset"):
        agent.predict(obs[0])
    agent.predict(obs[0], episode_start=True)
    with pytest.raises(UserError, match="episode_start has 2 entries for 1 observations"):
        agent.predict(obs[0], episode_start=[True, False])
