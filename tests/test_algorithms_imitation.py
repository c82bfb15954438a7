"""GAIL, AIRL and DAgger: formulas against NumPy and plain autograd, absorbing states, expert data that does not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ACTION_SPECS, BATCH, OBS_DIM, batch_for, config_for, make_algorithm, random_actions, spec_for

from rl_training.algorithms.acting import Expert
from rl_training.algorithms.imitation.gail import ExpertSource
from rl_training.data import TransitionDataset
from rl_training.data.dataset_files import write_dataset
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.config import make_config
from rl_training.experiment.run.trainer import Trainer
from rl_training.models import MLPAIRLReward, MLPGAILDiscriminator
from rl_training.models.imitation import action_code, action_code_size
from rl_training.ops import rng
from rl_training.ops.returns import gae

KEY = rng.key_from_seed(4)


def labelled(algorithm: Any, seed: int = 0, size: int = BATCH) -> dict[str, torch.Tensor]:
    """Half expert, half policy, as the discriminator's phase sees them."""
    g, spec = np.random.default_rng(seed), algorithm.spec
    labels = torch.as_tensor(g.random(size) < 0.5, dtype=torch.float32)
    return {
        "states": torch.as_tensor(g.standard_normal((size, OBS_DIM)), dtype=torch.float32),
        "next_states": torch.as_tensor(g.standard_normal((size, OBS_DIM)), dtype=torch.float32),
        "actions": random_actions(spec, (size,), g),
        "terminated": torch.as_tensor(g.random(size) < 0.3),
        "labels": labels,
        "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32),
        "endings": torch.where(labels > 0, 0.02, 0.1),
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def test_discriminator_gradient_equals_the_formula() -> None:
    """A linear discriminator: the gradient of the cross-entropy is (D - y) x, weighted, with the absorbing mass."""
    rate, gamma = 0.1, 0.9
    algorithm: Any = make_algorithm(
        "gail", optimizer="sgd", discriminator_hidden_sizes=[], discriminator_learning_rate=rate, gamma=gamma
    )
    state, batch = algorithm.init_state(0), labelled(algorithm)
    module = copy.deepcopy(algorithm.modules["discriminator"])
    algorithm.nets["discriminator"].write_to(module, state.params["discriminator"])
    w, b = module.head.weight.detach().numpy().astype(np.float64), float(module.head.bias.detach())
    one_hot = np.eye(3)[batch["actions"].numpy()]
    obs = np.clip(batch["states"].numpy().astype(np.float64) / np.sqrt(1.0 + 1e-8), -10, 10)
    x = np.concatenate([obs, one_hot, np.zeros((BATCH, 1))], 1)
    absorbing = np.zeros(x.shape[1])
    absorbing[-1] = 1.0
    y, weights = batch["labels"].numpy().astype(np.float64), batch["weights"].numpy().astype(np.float64)
    mass = gamma / (1 - gamma) * batch["endings"].numpy().astype(np.float64)
    share = weights / (1 + mass) / BATCH
    at_rows, at_end = share * (sigmoid(x @ w + b) - y), share * mass * (sigmoid(absorbing @ w + b) - y)
    grad_w = (at_rows[:, None] * x).sum(0) + at_end.sum() * absorbing
    grad_b = at_rows.sum() + at_end.sum()
    new, aux = algorithm.discriminator_step(state, batch, KEY)
    algorithm.nets["discriminator"].write_to(module, new.params["discriminator"])
    np.testing.assert_allclose(module.head.weight.detach().numpy(), w - rate * grad_w, rtol=1e-5, atol=1e-6)
    assert float(module.head.bias.detach()) == pytest.approx(b - rate * grad_b, abs=1e-6)
    logits = np.array([x @ w + b, np.full(BATCH, absorbing @ w + b)])
    errors = np.log1p(np.exp(logits)) - y * logits
    loss = (weights * (errors[0] + mass * errors[1]) / (1 + mass)).sum() / BATCH
    assert float(aux.metrics["discriminator_loss"]) == pytest.approx(loss, rel=1e-5)
    assert torch.equal(new.params["policy"], state.params["policy"])


@pytest.mark.parametrize("name", ["gail", "airl"])
def test_discriminator_gradient_equals_plain_autograd(name: str) -> None:
    algorithm: Any = make_algorithm(name, "box", optimizer="sgd", discriminator_learning_rate=0.1)
    state, batch = algorithm.init_state(1), labelled(algorithm, 1)
    logits, absorbing = algorithm.logits(state.params["discriminator"].requires_grad_(), state, batch)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    mass = 99.0 * batch["endings"]
    at_end = cross_entropy(absorbing.expand(BATCH), batch["labels"], reduction="none")
    error = (cross_entropy(logits, batch["labels"], reduction="none") + mass * at_end) / (1 + mass)
    (gradient,) = torch.autograd.grad((batch["weights"] * error).mean(), state.params["discriminator"])
    state.params["discriminator"].requires_grad_(False)
    new, _ = algorithm.discriminator_step(state, batch, KEY)
    moved = state.params["discriminator"] - 0.1 * gradient
    torch.testing.assert_close(new.params["discriminator"], moved, rtol=1e-4, atol=1e-6)


def test_best_discriminator_is_the_log_ratio_of_discounted_occupancies() -> None:
    """Three states, one action: at logit = log(expert / policy), absorbing state included, the gradient vanishes."""
    gamma = 0.9
    algorithm: Any = make_algorithm("gail", "multi_binary", discriminator_hidden_sizes=[], gamma=gamma)
    expert, policy = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])  # shares of the states in real steps
    endings = {"expert": 0.05, "policy": 0.3}

    def occupancy(shares: np.ndarray, rate: float) -> np.ndarray:
        steps = np.append(shares, rate * gamma / (1 - gamma))  # the last one is the absorbing state
        return steps / steps.sum()

    ratio = np.log(occupancy(expert, endings["expert"]) / occupancy(policy, endings["policy"]))
    states = torch.zeros(6, OBS_DIM)
    states[torch.arange(6), torch.arange(6) % 3] = 1.0
    batch = {
        "states": states, "actions": torch.zeros(6, 3, dtype=torch.int64),
        "labels": torch.tensor([1.0] * 3 + [0.0] * 3),
        "weights": torch.as_tensor(np.concatenate([expert, policy]), dtype=torch.float32),
        "endings": torch.tensor([endings["expert"]] * 3 + [endings["policy"]] * 3),
    }  # fmt: skip
    module = copy.deepcopy(algorithm.modules["discriminator"])
    with torch.no_grad():
        module.head.bias.zero_()
        module.head.weight.zero_()
        module.head.weight[:3] = torch.as_tensor(ratio[:3])
        module.head.weight[-1] = ratio[3]
    flat = algorithm.nets["discriminator"].flatten(module)
    state = algorithm.init_state(0)

    def gradient(params: torch.Tensor) -> torch.Tensor:
        sgd: Any = make_algorithm(
            "gail", "multi_binary", discriminator_hidden_sizes=[], gamma=gamma, optimizer="sgd",
            discriminator_learning_rate=1.0,
        )  # fmt: skip
        at = state._replace(params={**state.params, "discriminator": params}, opt=sgd.init_state(0).opt)
        return params - sgd.fit(at, batch, KEY)[0].params["discriminator"]

    assert float(gradient(flat).abs().max()) < 1e-6
    assert float(gradient(0.5 * flat).abs().max()) > 1e-3


def test_expert_like_pairs_get_a_higher_reward() -> None:
    algorithm: Any = make_algorithm("gail", discriminator_learning_rate=1e-2)
    state, batch = algorithm.init_state(0), labelled(algorithm, size=64)
    batch["states"][:, 0] += torch.where(batch["labels"] > 0, 4.0, -4.0)
    for i in range(60):
        state, _ = algorithm.discriminator_step(state, batch, rng.fold(KEY, i))
    rewards = algorithm.rewards(state, batch)
    expert = batch["labels"] > 0
    assert float(rewards[expert].min()) > float(rewards[~expert].max())
    assert (algorithm.reward(torch.linspace(-20, 20, 9)) >= 0).all()  # which is why surviving pays without absorbing
    assert (algorithm.reward(torch.linspace(-20, 20, 9)).diff() > 0).all()


def test_rewards_relative_to_the_absorbing_state_give_the_same_advantages() -> None:
    """As an endless stay there, whose value is r / (1 - gamma), with a critic that is higher by that constant."""
    gamma, lam = 0.95, 0.9
    g = torch.Generator().manual_seed(2)
    rewards, values, next_values = (torch.rand(20, 3, generator=g, dtype=torch.float64) for _ in range(3))
    terminated = torch.rand(20, 3, generator=g) < 0.15
    truncated = ~terminated & (torch.rand(20, 3, generator=g) < 0.1)
    absorbing, continues = 0.7, 1.0 - (terminated | truncated).double()
    worth = absorbing / (1 - gamma)
    relative, _ = gae(rewards - absorbing, values, next_values, gamma * (1.0 - terminated.double()), continues, lam)
    endless = torch.where(terminated, worth, next_values + worth)  # every state has a next one
    full, _ = gae(rewards, values + worth, endless, torch.full_like(rewards, gamma), continues, lam)
    torch.testing.assert_close(relative, full)


@pytest.mark.parametrize("absorbing", [True, False])
def test_prepare_replaces_the_rewards_and_leaves_the_rest_to_ppo(absorbing: bool) -> None:
    algorithm: Any = make_algorithm("gail", absorbing_states=absorbing, normalize_observations=True)
    state, g = algorithm.init_state(0), np.random.default_rng(0)
    shape = (8, 2)
    rollout = {
        "obs": torch.as_tensor(g.standard_normal((*shape, OBS_DIM)), dtype=torch.float32),
        "next_obs": torch.as_tensor(g.standard_normal((*shape, OBS_DIM)), dtype=torch.float32),
        "actions": random_actions(algorithm.spec, shape, g), "rewards": torch.full(shape, 1e6),
        "terminated": torch.as_tensor(g.random(shape) < 0.2), "truncated": torch.zeros(shape, dtype=torch.bool),
        "valid": torch.as_tensor(g.random(shape) < 0.9),
    }  # fmt: skip
    new, batch = algorithm.prepare(state, rollout, KEY)
    flat = {k: v.flatten(0, 1) for k, v in rollout.items()}
    module = copy.deepcopy(algorithm.modules["discriminator"])
    algorithm.nets["discriminator"].write_to(module, state.params["discriminator"])
    logits = module(flat["obs"], torch.nn.functional.one_hot(flat["actions"], 3).float())
    at_end = module(torch.zeros(1, OBS_DIM), torch.zeros(1, 3), torch.ones(1))
    rewards = torch.log1p(torch.exp(logits)) - (torch.log1p(torch.exp(at_end)) if absorbing else 0.0)
    _, plain = algorithm.ppo.prepare(
        algorithm.policy_state(state), {**rollout, "rewards": rewards.detach().view(shape)}, KEY
    )
    for name in ("advantages", "returns", "log_probs", "obs", "weights"):
        torch.testing.assert_close(batch[name], plain[name], rtol=1e-4, atol=1e-5)
    valid = flat["valid"]
    assert batch["endings"].tolist() == pytest.approx([float(flat["terminated"][valid].float().mean())] * 16)
    assert not batch["labels"].any()
    moments = new.extra["inputs"]
    torch.testing.assert_close(moments["mean"], flat["obs"][valid].mean(0), rtol=1e-3, atol=1e-3)
    assert set(new.extra) == {"inputs", "observations"}


@pytest.mark.parametrize("kind", ["discrete", "box"])
@pytest.mark.parametrize("absorbing", [True, False])
def test_airl_logit_is_f_minus_log_pi(kind: str, absorbing: bool) -> None:
    gamma = 0.9
    algorithm: Any = make_algorithm("airl", kind, gamma=gamma, absorbing_states=absorbing)
    state, batch = algorithm.init_state(0), labelled(algorithm)
    net: Any = copy.deepcopy(algorithm.modules["discriminator"])
    algorithm.nets["discriminator"].write_to(net, state.params["discriminator"])
    policy: Any = copy.deepcopy(algorithm.modules["policy"])
    algorithm.nets["policy"].write_to(policy, state.params["policy"])
    with torch.no_grad():
        out = policy(batch["states"], "policy")
        if kind == "box":
            mean, log_std = out.chunk(2, -1)
            log_pi = torch.distributions.Normal(mean, log_std.exp()).log_prob(batch["actions"]).sum(-1)
            code = batch["actions"]
        else:
            log_pi = torch.distributions.Categorical(logits=out).log_prob(batch["actions"])
            code = torch.nn.functional.one_hot(batch["actions"], 3).float()
        nowhere, zero, one = torch.zeros(1, OBS_DIM), torch.zeros(BATCH), torch.ones(1)
        end = net.h(nowhere, one)
        after = torch.where(batch["terminated"], end if absorbing else 0.0, net.h(batch["next_states"], zero))
        f = net.g(batch["states"], code, zero) + gamma * after - net.h(batch["states"], zero)
        at_end = net.g(nowhere, torch.zeros(1, code.shape[1]), one) + (gamma if absorbing else 0.0) * end - end
        logits, absorbed = algorithm.logits(state.params["discriminator"], state, batch)
    torch.testing.assert_close(logits, f - log_pi, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(absorbed, at_end[0], rtol=1e-4, atol=1e-5)
    rewards = algorithm.rewards(state, batch)
    torch.testing.assert_close(rewards, f - log_pi - (at_end if absorbing else 0.0), rtol=1e-4, atol=1e-5)


def test_airl_reward_of_states_alone_ignores_the_action() -> None:
    net = MLPAIRLReward(OBS_DIM, 2, (8,), state_only=True)
    obs, zero = torch.randn(4, OBS_DIM, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    rows = [net(obs, action * torch.ones(4, 2), obs, zero, zero, zero + 1.0) for action in (-1.0, 1.0)]
    assert torch.equal(rows[0], rows[1])
    torch.testing.assert_close(rows[0], net.g(obs, obs, zero) + (net.gamma - 1.0) * net.h(obs, zero))


def test_action_code() -> None:
    def code(kind: str, actions: Any) -> list[list[float]]:
        spec = ACTION_SPECS[kind]
        out = action_code(spec, torch.as_tensor(actions))
        assert out.shape[1] == action_code_size(spec)
        return out.tolist()

    assert code("discrete", [2, 0]) == [[0, 0, 1], [1, 0, 0]]
    assert code("multi_discrete", [[1, 1]]) == [[0, 1, 0, 0, 1]]
    assert code("multi_binary", [[1, 0, 1]]) == [[1, 0, 1]]
    assert code("box", [[0.5, -3.0]]) == [[0.5, -1.0]]
    assert MLPGAILDiscriminator(4, 2)(torch.zeros(3, 4), torch.zeros(3, 2)).shape == (3,)


# --- expert data -----------------------------------------------------------------------------------------------------


def transitions(rows: int = 30, obs_dim: int = 4, actions: Any = None) -> TransitionDataset:
    g = np.random.default_rng(0)
    obs = g.standard_normal((rows + 1, obs_dim)).astype(np.float32)
    flags = np.arange(rows) % 10 == 9
    return TransitionDataset(
        obs=obs[:-1], next_obs=obs[1:], actions=g.integers(0, 2, rows) if actions is None else actions,
        rewards=np.zeros(rows, np.float32), terminated=flags, truncated=np.zeros(rows, bool),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (transitions(actions=np.arange(30) % 3), "actions range from 0 to 2, which is outside the actions of CartPole"),
        (transitions(actions=np.zeros((30, 2), np.float32)), r"actions have shape \(2,\); CartPole-v1 needs Discrete"),
        (transitions(actions=np.zeros(30, np.float32)), "actions are float32; CartPole-v1 needs whole numbers"),
        (transitions(obs_dim=3), r"observations have shape \(3,\); CartPole-v1 needs \(4,\)"),
    ],
)
def test_expert_data_of_another_space_is_refused(tmp_path: Path, dataset: TransitionDataset, words: str) -> None:
    write_dataset(dataset, tmp_path / "expert.npz")
    kwargs = {"dataset": {"kind": "npz", "path": str(tmp_path / "expert.npz")}}
    with pytest.raises(UserError, match=words):
        Trainer(config_for("gail", tmp_path, algo_kwargs=kwargs), progress=False)


def test_expert_source_labels_its_rows() -> None:
    source = ExpertSource(transitions(), 0.99)
    data = {k: v[0] for k, v in source.init(1, torch.device("cpu")).items()}
    batch = source.sample(data, KEY, 200, torch.zeros(()))
    assert batch["labels"].tolist() == [1.0] * 200
    assert batch["endings"].tolist() == pytest.approx([0.1] * 200)
    row = {tuple(obs): bool(end) for obs, end in zip(transitions().obs.tolist(), transitions().terminated)}
    assert all(row[tuple(obs)] == bool(end) for obs, end in zip(batch["states"].tolist(), batch["terminated"]))


def test_short_forms_of_the_recipe(tmp_path: Path) -> None:
    def recipe(**fields: Any) -> Any:
        return make_algorithm("gail", **fields).hp.dataset

    assert recipe(expert_dataset_kind="npz", expert_dataset_path="x.npz").model_dump(exclude_defaults=True) == {
        "kind": "npz", "path": "x.npz", "size": 200,
    }  # fmt: skip
    trained = {"kind": "policy", "train": {"preset": "ppo/cartpole"}, "size": 7}
    assert recipe(dataset=trained, expert_dataset_kind="random").train is None
    assert recipe(dataset=trained, expert_dataset_path="runs/x").path == "runs/x"
    assert recipe(dataset=trained, expert_dataset_kind="policy").train == {"preset": "ppo/cartpole"}
    config = config_for("gail", tmp_path, algo_kwargs={"expert_dataset_kind": "random"}).resolved()
    assert type(config)(**config.to_dict()).hyper() == config.hyper()
    for fields, words in [
        ({"expert_dataset_kind": "npz"}, "needs a path"),
        ({"expert_dataset_kind": "policy"}, "needs an agent"),
        ({"expert_dataset_kind": "nope"}, "dataset.kind = 'nope'"),
        ({"expert_dataset_kind": "npz", "dataset": 3}, "dataset"),
        ({"gamma": 1.0}, "gamma must be below 1"),
    ]:
        with pytest.raises(UserError, match=words):
            recipe(**fields)
    assert make_algorithm("gail", gamma=1.0, absorbing_states=False).hp.absorbing_steps == 0.0


def test_discriminator_batch_must_divide_the_rollout(tmp_path: Path) -> None:
    config = config_for("gail", tmp_path, num_envs=2, algo_kwargs={"discriminator_batch_size": 24})
    with pytest.raises(UserError, match="discriminator_batch_size = 24 must divide n_steps x num_envs = 16 x 2"):
        Trainer(config, progress=False)


def test_phases_mix_the_rollout_with_the_expert_and_clone_once(tmp_path: Path) -> None:
    kwargs = {"bc_steps": 40, "learning_rate": 1e-2, "discriminator_batch_size": 16}
    dataset = transitions(300)
    left = dataset.obs[:, 0] < 0
    write_dataset(transitions(300, actions=left.astype(np.int64)), tmp_path / "expert.npz")
    kwargs["dataset"] = {"kind": "npz", "path": str(tmp_path / "expert.npz")}
    run = Trainer(config_for("gail", tmp_path, num_envs=2, algo_kwargs=kwargs), progress=False)
    learner: Any = run.loop.learner
    run.loop.advance(32)
    assert run.loop.gradient_steps == 2 * 2 + 2 + 40  # epochs x minibatches, discriminator, cloning
    _, batch, _ = learner.next_step(0, learner.phases[1], {**learner.scratch["rollout"], "offset": torch.tensor([0])})
    assert batch["labels"].tolist() == [0.0] * 16 + [1.0] * 16
    known = {tuple(row) for row in dataset.obs.tolist()}
    assert [tuple(row) in known for row in batch["states"].tolist()] == [False] * 16 + [True] * 16
    agent = run.agent()
    chosen = agent.predict(dataset.obs)
    assert (chosen == left).mean() > 0.9  # the policy is the expert's by now
    run.loop.advance(64)
    assert run.loop.gradient_steps == 2 * (2 * 2 + 2) + 40
    run.envs.close()


# --- dagger ----------------------------------------------------------------------------------------------------------


def with_expert(kind: str, **fields: Any) -> Any:
    algorithm: Any = make_algorithm("dagger", kind, **fields)
    expert: Any = make_algorithm("ppo", kind)
    algorithm.expert = Expert(expert, expert.init_state(5))
    return algorithm


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_dagger_executes_a_mixture_and_stores_the_advice(kind: str) -> None:
    algorithm = with_expert(kind, beta=0.3)
    state = algorithm.init_state(0)
    obs = torch.randn(2000, OBS_DIM, generator=torch.Generator().manual_seed(1))
    _, advice, _ = algorithm.expert.policy.select_action(algorithm.expert.state, (), obs, KEY, explore=False)
    advice = advice.clamp(-1, 1) if kind == "box" else advice

    def executed(beta: float) -> torch.Tensor:
        changed = with_expert(kind, beta=beta)
        _, actions, extras = changed.select_action(state, (), obs, KEY, explore=True)
        assert torch.equal(extras["expert_actions"], advice)
        return actions

    assert torch.equal(executed(1.0), advice)
    own, mixed = executed(0.0), executed(0.3)
    same = (own == advice).view(2000, -1).all(-1)
    assert not same.all()
    from_expert = (mixed == advice).view(2000, -1).all(-1)[~same].float().mean()
    assert float(from_expert) == pytest.approx(0.3, abs=0.06)
    batch = {**batch_for(algorithm), "actions": random_actions(algorithm.spec, (BATCH,), np.random.default_rng(9))}
    relabelled = {**batch, "actions": 1 - batch["actions"] if kind == "box" else (batch["actions"] + 1) % 3}
    updates = [algorithm.train_step(state, b, KEY)[0].params["actor"] for b in (batch, relabelled)]
    assert torch.equal(*updates)  # what was executed is not what is learned


def test_dagger_learns_from_its_expert_and_needs_a_fitting_one(tmp_path: Path) -> None:
    kwargs = {"learning_rate": 3e-3, "batch_size": 64, "buffer_size": 300, "gradient_steps": 2, "hidden_sizes": [64]}
    run = Trainer(config_for("dagger", tmp_path, total_timesteps=200, algo_kwargs=kwargs), progress=False)
    agent = Agent.load(run.run().checkpoint_path, device="cpu")
    recipe, expert, data = agent.algorithm.hp.expert, run.algorithm.expert, run.loop.learner.tree["data"]
    assert expert is not None
    obs = data["obs"][0, :200]
    _, advice, _ = expert.policy.select_action(expert.state, (), obs, KEY, explore=False)
    assert torch.equal(data["expert_actions"][0, :200], advice)
    assert not torch.equal(data["actions"][0, :200], advice)  # the learner acted too
    assert (agent.predict(obs.numpy()) == advice.numpy()).mean() > 0.9
    assert agent.algorithm.expert is None  # a trained learner needs its expert no more
    with pytest.raises(UserError, match="was trained on CartPole-v1"):
        Trainer(config_for("dagger", tmp_path, env_id="Acrobot-v1"), progress=False)
    with pytest.raises(UserError, match="dagger needs an expert: set expert"):
        Trainer(config_for("dagger", tmp_path, algo_kwargs={"expert": {}}), progress=False)
    with pytest.raises(UserError, match="either path or train"):
        make_algorithm("dagger", expert={**recipe.model_dump(), "path": "x"})


def test_resume_refuses_another_expert(tmp_path: Path) -> None:
    def train(seed: int) -> Any:
        fields = {"total_timesteps": 16, "num_envs": 1, "algo_kwargs": {"n_steps": 8, "batch_size": 8}}
        return Trainer(make_config({"algo": "ppo", "env_id": "CartPole-v1", **fields}, seed=seed,
                                   output_dir=str(tmp_path / str(seed)), eval_episodes=1, device="cpu"),
                       progress=False).run()  # fmt: skip

    first, second = train(1), train(2)
    link = tmp_path / "expert"
    link.symlink_to(first.run_dir)
    kwargs = {"expert": {"path": str(link), "train": None}}
    done = Trainer(config_for("dagger", tmp_path, algo_kwargs=kwargs), progress=False).run()
    link.unlink()
    link.symlink_to(second.run_dir)
    with pytest.raises(UserError, match="the dataset or expert is not the one"):
        Trainer.resume(done.run_dir, total_timesteps=400, progress=False)


def test_imitation_needs_vector_observations() -> None:
    from rl_training.algorithms.imitation.gail import GAIL
    from rl_training.spec import ArraySpec, EnvSpec

    image = EnvSpec("Pixels-v0", ArraySpec((3, 16, 16), "uint8"), spec_for("gail").action)
    with pytest.raises(UserError, match="gail needs vector observations; Pixels-v0"):
        GAIL(image)
