"""The formulas of the offline algorithms against independent computations, and the offline loop end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import ACTION_DIM, BATCH, OBS_DIM, batch_for, config_for, make_algorithm, modules_of
from scipy import integrate, optimize

from rl_training.algorithms import IQL, iql_loss
from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.continuous.base import ContinuousControl
from rl_training.algorithms.continuous.critics.penalised import gradient_similarity
from rl_training.algorithms.offline.iql import advantage_weights
from rl_training.algorithms.offline.xql import gumbel_loss
from rl_training.data import load_transition_dataset
from rl_training.data.dataset_files import write_dataset
from rl_training.data.source import MixedSource
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.checkpoint import load_checkpoint
from rl_training.experiment.run.trainer import Trainer
from rl_training.models import MLPIQLModel
from rl_training.ops import rng
from rl_training.ops.losses import expectile_loss

KEY = rng.key_from_seed(0)


def test_expectile_loss_has_its_minimum_at_the_expectile() -> None:
    """The tau-expectile m solves tau E[(x - m)+] = (1 - tau) E[(m - x)+]."""
    x = np.random.default_rng(0).standard_normal(500)
    for tau in (0.1, 0.5, 0.9):
        found = optimize.minimize_scalar(lambda m, tau=tau: float(expectile_loss(torch.tensor(x - m), tau).mean())).x
        balance = tau * np.maximum(x - found, 0).mean() - (1 - tau) * np.maximum(found - x, 0).mean()
        assert abs(balance) < 1e-5
    assert float(expectile_loss(torch.tensor(-2.0), 0.9)) == pytest.approx(0.1 * 4.0)
    assert float(expectile_loss(torch.tensor(2.0), 0.9)) == pytest.approx(0.9 * 4.0)


def test_gumbel_loss_has_its_minimum_at_the_soft_maximum() -> None:
    q, temperature = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64), 0.8
    found = optimize.minimize_scalar(lambda v: float(gumbel_loss(q - v, temperature, 50.0).mean())).x
    soft = temperature * (torch.logsumexp(q / temperature, 0) - math.log(4))
    assert found == pytest.approx(float(soft), abs=1e-4)


def test_advantage_weights_are_clipped_exponentials() -> None:
    advantage = torch.tensor([-1.0, 0.0, 1.0, 5.0, 1e6])
    expected = [math.exp(-3.0), 1.0, math.exp(3.0), 100.0, 100.0]
    torch.testing.assert_close(advantage_weights(advantage, 3.0, 100.0), torch.tensor(expected))


def test_iql_update_equals_plain_autograd() -> None:
    rate, tau = 1e-2, 0.1
    algorithm = make_algorithm("iql", learning_rate=rate, actor_learning_rate=rate, tau=tau, expectile=0.8, beta=2.0)
    state = algorithm.init_state(0)
    m = modules_of(algorithm, state)
    adams = {n: torch.optim.Adam(m[n].parameters(), lr=rate) for n in ("actor", "critic", "value")}
    for i in range(4):
        batch = batch_for(algorithm, seed=i)
        obs, actions, weights = batch["obs"], batch["actions"], batch["weights"]
        with torch.no_grad():
            q = m["slow_critic"](obs, actions).min(0).values
        difference = q - m["value"](obs)
        value_loss = (weights * torch.where(difference > 0, 0.8, 0.2) * difference**2).mean()
        with torch.no_grad():
            weight = torch.exp(2.0 * difference).clamp(max=100.0)
            target = batch["rewards"] + batch["discounts"] * m["value"](batch["next_obs"])
        step(adams["value"], value_loss)
        mean, log_std = m["actor"](obs).chunk(2, -1)
        log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(actions).sum(-1)
        step(adams["actor"], (-weights * weight * log_prob).mean())
        critic_loss = (weights * ((m["critic"](obs, actions) - target) ** 2).sum(0)).mean()
        step(adams["critic"], critic_loss)
        with torch.no_grad():
            for old, new in zip(m["slow_critic"].parameters(), m["critic"].parameters()):
                old.lerp_(new, tau)
        state, aux = algorithm.train_step(state, batch, KEY)
        assert float(aux.metrics["value_loss"]) == pytest.approx(float(value_loss.detach()), rel=1e-4)
        assert float(aux.metrics["critic_loss"]) == pytest.approx(float(critic_loss.detach()), rel=1e-4)
        for n, net in algorithm.nets.items():
            torch.testing.assert_close(net.flatten(m[n]), state.params[n], rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(
            algorithm.nets["critic"].flatten(m["slow_critic"]), state.target["critic"], rtol=1e-3, atol=2e-5
        )


def step(adam: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    adam.zero_grad()
    loss.backward()
    adam.step()


def test_iql_loss_and_model_on_their_own() -> None:
    model = MLPIQLModel(OBS_DIM, ACTION_DIM, (8,))
    batch = batch_for(make_algorithm("iql"))
    out = model.actor(batch["obs"])
    assert out.shape == (BATCH, 2 * ACTION_DIM)
    assert float(out[:, :ACTION_DIM].abs().max()) <= 1.0
    q, value = model.critic(batch["obs"], batch["actions"]), model.value(batch["obs"])
    target_q, next_value = q.amin(0).detach() + 1.0, model.value(batch["next_obs"])
    metrics = iql_loss(q, target_q, value, next_value, torch.zeros(BATCH) - 1.0, batch, expectile=0.9, beta=1.0)
    weights = batch["weights"]
    difference = target_q - value
    expected = (weights * torch.where(difference > 0, 0.9, 0.1) * difference**2).mean()
    assert float(metrics["value_loss"].detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(metrics["actor_loss"]) == pytest.approx(
        float((weights * difference.detach().exp().clamp(max=100)).mean()), rel=1e-5
    )
    gradients = torch.autograd.grad(metrics["critic_loss"], list(model.value.parameters()), allow_unused=True)
    assert all(g is None for g in gradients)  # the target is a constant
    algorithm = IQL(model=model)
    assert algorithm.update(batch).metrics["critic_loss"] > 0.0
    assert algorithm.act(batch["obs"]).shape == (BATCH, ACTION_DIM)


@pytest.mark.parametrize("field", [{"expectile": 1.0}, {"expectile": 0.0}, {"beta": 0.0}])
def test_iql_settings_are_checked_at_construction(field: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        make_algorithm("iql", **field)


def test_cql_soft_maximum_equals_the_integral() -> None:
    """Importance sampling with three proposals against quadrature over one action dimension."""
    from rl_training import registry
    from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

    spec = EnvSpec("Test-v0", ArraySpec((OBS_DIM,)), ActionSpec("box", (), (1,), (-1.0,), (1.0,)))
    algorithm: Any = registry.entry("cql").load()(spec, num_actions=20_000, hidden_sizes=[16])
    state = algorithm.init_state(0)
    g = torch.Generator().manual_seed(0)
    batch = {"obs": torch.randn(3, OBS_DIM, generator=g), "next_obs": torch.randn(3, OBS_DIM, generator=g)}
    params = 3.0 * state.params["critic"]
    found = algorithm.critic.soft_maximum(params, state, batch, KEY)
    assert found.shape == (2, 3)

    def integrand(action: float, critic: int, row: int) -> float:
        q = algorithm.critic.values(params, batch["obs"][row : row + 1], torch.tensor([[action]]))
        return math.exp(float(q[critic, 0]))

    for critic in range(2):
        for row in range(3):
            exact = math.log(integrate.quad(integrand, -1.0, 1.0, args=(critic, row), epsabs=1e-5, limit=50)[0])
            assert float(found[critic, row]) == pytest.approx(exact, abs=0.02)


def test_cql_penalty_and_cal_ql_floor() -> None:
    """The loss is SAC's without the entropy bonus, plus alpha x (soft maximum - Q on the data) of both critics."""
    algorithm = make_algorithm("cql", cql_alpha=3.0, num_actions=4)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    params, actions, bonus = state.params["critic"], batch["actions"], torch.full((BATCH,), 9.0)
    loss, report = algorithm.critic.loss(params, state, batch, actions, bonus, KEY)
    m = modules_of(algorithm, state)
    target = batch["rewards"] + batch["discounts"] * m["slow_critic"](batch["next_obs"], actions).min(0).values
    torch.testing.assert_close(report.target, target)
    q = m["critic"](batch["obs"], actions).detach()
    gap = algorithm.critic.soft_maximum(params, state, batch, rng.fold(KEY, 2))
    expected = ((q - target) ** 2).sum(0) + 3.0 * (gap - q).sum(0)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)

    calibrated = make_algorithm("cal_ql", num_actions=4)
    low = {**batch, "returns": torch.full((BATCH,), -1e6)}
    torch.testing.assert_close(
        calibrated.critic.soft_maximum(params, state, low, KEY),
        algorithm.critic.soft_maximum(params, state, batch, KEY),
    )
    # A floor far above every value: two thirds of the samples are the floor, whatever the critic says.
    high = {**batch, "returns": torch.full((BATCH,), 50.0)}
    _, log_here = calibrated.propose(state, batch["obs"], rng.fold(KEY, 0), 4)
    _, log_there = calibrated.propose(state, batch["next_obs"], rng.fold(KEY, 1), 4)
    log_density = torch.cat([log_here, log_there])
    exact = torch.logsumexp(50.0 - log_density, 0) - math.log(12)
    torch.testing.assert_close(calibrated.critic.soft_maximum(params, state, high, KEY)[0], exact, rtol=1e-5, atol=1e-4)


def test_td3_bc_policy_loss() -> None:
    algorithm = make_algorithm("td3_bc", alpha=2.0)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    action = 0.5 * batch["actions"]
    q = modules_of(algorithm, state)["critic"](batch["obs"], action)[0].detach()
    scale = 2.0 / ((batch["weights"] * q.abs()).sum() / BATCH)
    expected = ((action - batch["actions"]) ** 2).mean(-1) - scale * q
    value = algorithm.critic.policy_value(state.params["critic"], {}, batch["obs"], action, KEY)
    torch.testing.assert_close(algorithm.regularizer.policy_loss(value, action, batch), expected)


def test_rebrac_penalises_the_distance_to_the_next_action_where_it_is_known() -> None:
    algorithm = make_algorithm("rebrac", critic_penalty=0.7, actor_penalty=0.3, normalize_q=False)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    critic = modules_of(algorithm, state)["critic"]
    action = 0.5 * batch["actions"]
    distance = ((action - batch["next_actions"]) ** 2).sum(-1)
    expected = critic(batch["next_obs"], action).min(0).values - 0.7 * distance * batch["has_next"]
    assert not batch["has_next"].all()
    bonus = algorithm.regularizer.next_bonus(batch, action)
    _, report = algorithm.critic.loss(state.params["critic"], state, batch, action, bonus, KEY)
    target = batch["rewards"] + batch["discounts"] * expected.detach()
    torch.testing.assert_close(report.target, target)
    loss = 0.3 * (0.25 * batch["actions"] ** 2).sum(-1) - critic(batch["obs"], action).min(0).values
    value = algorithm.critic.policy_value(state.params["critic"], {}, batch["obs"], action, KEY)
    torch.testing.assert_close(algorithm.regularizer.policy_loss(value, action, batch), loss.detach())


def test_edac_similarity_is_the_mean_cosine_of_pairs() -> None:
    gradients = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(6)
    for i in range(4):
        for j in range(4):
            if i != j:
                expected += torch.cosine_similarity(gradients[i], gradients[j], dim=-1) / 3
    torch.testing.assert_close(gradient_similarity(gradients), expected, rtol=1e-4, atol=1e-5)


def test_edac_gradients_are_those_of_each_critic() -> None:
    algorithm = make_algorithm("edac", num_critics=3, eta=2.0)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    params, bonus = state.params["critic"], torch.zeros(BATCH)
    with_term, _ = algorithm.critic.loss(params, state, batch, batch["actions"], bonus, KEY)
    without, _ = algorithm.critic.base.loss(params, state, batch, batch["actions"], bonus, KEY)
    actions = batch["actions"].clone().requires_grad_()
    q = modules_of(algorithm, state)["critic"](batch["obs"], actions)
    gradients = torch.stack([torch.autograd.grad(q[i].sum(), actions, retain_graph=True)[0] for i in range(3)])
    torch.testing.assert_close(with_term - without, 2.0 * gradient_similarity(gradients), rtol=1e-3, atol=1e-4)


def test_crr_weights_and_baseline() -> None:
    awac, crr = make_algorithm("awac", temperature=0.5), make_algorithm("crr")
    advantage = torch.tensor([-1.0, 0.5, 4.0])
    torch.testing.assert_close(awac.policy_weights(advantage), torch.tensor([math.exp(-2.0), math.e, 100.0]))
    assert crr.policy_weights(advantage).tolist() == [0.0, 1.0, 1.0]
    state, obs = crr.init_state(0), batch_for(crr)["obs"]
    draws = [
        crr.q(state.params["critic"], obs, crr.sample(state.params["actor"], obs, rng.fold(KEY, i))) for i in range(4)
    ]
    found = crr.baseline(state.params["actor"], state.params["critic"], obs, KEY)
    torch.testing.assert_close(found, torch.stack(draws).mean(0))


def test_bc_learns_a_linear_policy(tmp_path: Path) -> None:
    """The policy that made the data comes back: a state-feedback law on Pendulum."""
    raw = load_transition_dataset("random", env_id="Pendulum-v1", size=1500)
    torque = np.clip(1.5 * raw.obs[:, 1:2] - 0.1 * raw.obs[:, 2:3], -2.0, 2.0).astype(np.float32)
    write_dataset(type(raw)(**{**raw.columns(), "actions": torque}), tmp_path / "law.npz")
    kwargs: dict[str, Any] = {"hidden_sizes": [32], "batch_size": 128, "learning_rate": 3e-3}
    kwargs["dataset"] = {"kind": "npz", "path": str(tmp_path / "law.npz")}
    result = Trainer(
        config_for("bc", tmp_path, env_id="Pendulum-v1", total_timesteps=800, algo_kwargs=kwargs), progress=False
    ).run()
    predicted = Agent.load(result.checkpoint_path).predict(raw.obs[:300])
    assert float(np.abs(predicted - torque[:300]).mean()) < 0.1


def test_stochastic_bc_is_the_likelihood_of_a_gaussian() -> None:
    algorithm = make_algorithm("bc", "box", stochastic=True)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    actor = modules_of(algorithm, state)["actor"]
    mean = torch.tanh(actor.head(actor.torso(batch["obs"])))
    normal = torch.distributions.Normal(mean, actor.log_std.exp())
    found = algorithm.train_step(state, batch, KEY)[1].metrics["loss"]
    torch.testing.assert_close(found, -(normal.log_prob(batch["actions"]).sum(-1) * batch["weights"]).mean())
    obs = batch["obs"][:1].expand(4000, -1)
    drawn = algorithm.select_action(state, (), obs, KEY, explore=True)[1]
    assert drawn.abs().max() == 1.0  # a deviation of 1: many are cut off at the bounds
    inside = (drawn.abs() < 1.0).float().mean(0)
    cdf = torch.distributions.Normal(mean[0], torch.ones(mean.shape[-1])).cdf
    torch.testing.assert_close(inside, cdf(torch.tensor(1.0)) - cdf(torch.tensor(-1.0)), atol=0.03, rtol=0.0)
    torch.testing.assert_close(algorithm.select_action(state, (), obs, KEY, explore=False)[1][0], mean[0])


def test_checkpoint_has_recipe_and_hash_but_no_data(tmp_path: Path) -> None:
    data = load_transition_dataset("random", env_id="Pendulum-v1", size=300)
    write_dataset(data, tmp_path / "data.npz")
    kwargs = {"dataset": {"kind": "npz", "path": str(tmp_path / "data.npz")}, "updates_per_call": 3}
    config = config_for("td3_bc", tmp_path, total_timesteps=40, algo_kwargs=kwargs)
    result = Trainer(config, progress=False).run()
    assert result.summary["gradient_steps"] == result.summary["env_steps"] == 40
    checkpoint = load_checkpoint(result.checkpoint_path)
    assert set(checkpoint.tensors) == {"state"}
    assert checkpoint.meta["config"]["algo_kwargs"]["dataset"]["path"] == str(tmp_path / "data.npz")
    assert len(checkpoint.meta["dataset_hash"]) == 64
    mean = checkpoint.tensors["state"]["train.extra.obs_mean"][0]
    np.testing.assert_allclose(mean, data.obs.mean(0), rtol=1e-4, atol=1e-5)
    write_dataset(data.with_rewards(scale=2.0), tmp_path / "data.npz")
    with pytest.raises(UserError, match="not the one that this run trained on"):
        Trainer.resume(result.run_dir, total_timesteps=80, progress=False)


@pytest.mark.parametrize(("algo", "blocks"), [("iql", (1, 4)), ("td3_bc", (1, 3, 0))])
def test_blocks_of_updates_equal_single_ones(
    algo: str, blocks: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several updates in a call are the same updates, wherever the run is cut; also those of a delayed policy, which
    are of two kinds, and where one graph takes the policy's step every time to throw every second one away (0)."""
    states = []
    for block in blocks:
        if block == 0:
            monkeypatch.setattr(ContinuousControl, "phases", Algorithm.phases)
        kwargs = {"updates_per_call": max(1, block)}
        config = config_for(algo, tmp_path / str(block), total_timesteps=22, algo_kwargs=kwargs)
        result = Trainer(config, progress=False).run()
        states.append(load_checkpoint(result.checkpoint_path).tensors["state"])
    for other in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(tensor, other[name]), name


def test_rlpd_batches_are_half_prior_data(tmp_path: Path) -> None:
    config = config_for("rlpd", tmp_path, total_timesteps=60)
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    learner = trainer.loop.learner
    tree, phase = learner.tree, learner.phases[0]
    data = {"first": {k: v[0] for k, v in tree["data"].items()}, "second": {k: v[0] for k, v in tree["prior"].items()}}
    train = type(learner.train)(*(getattr(learner.train, f) for f in learner.train._fields))
    key = tree["keys"][0]
    batch = learner.sources[phase.source].sample(data, key, 16, train.progress[0])
    prior = {tuple(row) for row in tree["prior"]["obs"][0].tolist()}
    assert [tuple(row) in prior for row in batch["obs"].tolist()] == [False] * 8 + [True] * 8
    assert isinstance(learner.sources[phase.source], MixedSource)
    names = load_checkpoint(result.checkpoint_path).tensors["state"]
    assert not any("prior" in name for name in names)
    views = len(learner._views)
    learner.update(3)
    assert len(learner._views) == views  # one entry a static tree, not one an update


class Camera(gym.Env[Any, Any]):
    """An image and a vector."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        image = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        self.observation_space = gym.spaces.Dict(camera=image, speed=gym.spaces.Box(-1, 1, (2,), np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, bool(self.np_random.random() < 0.2), {}


def test_data_of_images_beside_vectors(tmp_path: Path) -> None:
    config = config_for("bc", tmp_path, total_timesteps=4, algo_kwargs={"dataset": {"size": 40}})
    result = Trainer(config, env=Camera, progress=False).run()
    assert result.status == "completed"
    other = {"dataset": {"kind": "random", "env_id": "CartPole-v1", "size": 40}}
    with pytest.raises(UserError, match=r"observations have shape \(4,\); Camera needs Dict"):
        Trainer(config_for("bc", tmp_path, algo_kwargs=other), env=Camera, progress=False)


BAD = [
    ({"kind": "npz", "path": "nowhere.npz"}, "does not exist"),
    ({"kind": "random", "env_id": "CartPole-v1"}, "observations have shape"),
    ({"kind": "random", "env_id": "MountainCarContinuous-v0"}, "observations have shape"),
]


@pytest.mark.parametrize(("dataset", "message"), BAD)
def test_bad_datasets_are_refused_before_a_run_begins(tmp_path: Path, dataset: Any, message: str) -> None:
    config = config_for("iql", tmp_path, algo_kwargs={"dataset": {"size": 50, **dataset}})
    with pytest.raises(UserError, match=message) as error:
        Trainer(config, progress=False)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_wrong_action_dimension(tmp_path: Path) -> None:
    raw = load_transition_dataset("random", env_id="Pendulum-v1", size=50)
    write_dataset(type(raw)(**{**raw.columns(), "actions": np.zeros((50, 3), np.float32)}), tmp_path / "a.npz")
    kwargs = {"dataset": {"kind": "npz", "path": str(tmp_path / "a.npz")}}
    config = config_for("bc", tmp_path, env_id="Pendulum-v1", algo_kwargs=kwargs)
    with pytest.raises(UserError, match=r"actions have shape \(3,\); Pendulum-v1 needs Box\(1,\)"):
        Trainer(config, progress=False)


def test_recipe_survives_json() -> None:
    from rl_training.data.recipes import DatasetRecipe

    recipe = DatasetRecipe(mix=({"kind": "random", "size": 10}, {"kind": "npz", "path": "x"}), ratio=(1, 3))
    assert DatasetRecipe(**json.loads(recipe.model_dump_json())) == recipe
