"""The dynamics ensemble against SciPy, hand-made numbers and the real environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import scipy.stats
import torch
from helpers import OBS_DIM, make_algorithm, spec_for
from torch import Tensor

from rl_training.algorithms import mopo_model_loss
from rl_training.algorithms.base import TrainState
from rl_training.algorithms.model_based.model_fit import Dynamics, DynamicsHyper
from rl_training.errors import UserError
from rl_training.models import MLPMOPOEnsembleModel
from rl_training.models.dynamics import EnsembleDynamics, Prediction, denormalise, identity_norm, imagine, targets_of
from rl_training.ops import rng
from rl_training.ops.termination import KNOWN, termination
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def batch_of(rows: int, obs_dim: int = 3, actions: int = 2, seed: int = 0) -> dict[str, Any]:
    draw = normal(rows, 2 * obs_dim + actions + 1, seed=seed)
    return {
        "obs": draw[:, :obs_dim], "next_obs": draw[:, obs_dim : 2 * obs_dim], "rewards": draw[:, -1],
        "actions": draw[:, 2 * obs_dim : -1].clamp(-1, 1), "weights": torch.ones(rows),
        "discounts": torch.full((rows,), 0.99), "indices": torch.arange(rows),
    }  # fmt: skip


def test_loss_is_the_gaussian_likelihood_of_scipy() -> None:
    batch, norm = batch_of(11), identity_norm(3, 2)
    norm |= {"target_mean": normal(4, seed=1), "target_std": normal(4, seed=2).abs() + 0.5}
    batch["weights"] = torch.linspace(0.0, 2.0, 11)
    p = Prediction(normal(3, 11, 4, seed=3), normal(3, 11, 4, seed=4), None)
    metrics = mopo_model_loss(p, batch, norm)
    target = (targets_of(batch["obs"], batch["next_obs"], batch["rewards"]) - norm["target_mean"]) / norm["target_std"]
    density = scipy.stats.norm.logpdf(target.numpy(), p.mean.numpy(), np.exp(0.5 * p.log_var.numpy()))  # [3, 11, 4]
    expected = -(batch["weights"].numpy() * density.mean(-1)).sum(-1) / 10  # ten rows have weight
    assert float(metrics["model_loss"]) == pytest.approx(expected.sum(), rel=1e-5)
    assert float(metrics["nll"]) == pytest.approx(expected.mean(), rel=1e-5)
    errors = (p.mean.numpy() - target.numpy()) ** 2
    torch.testing.assert_close(
        metrics["mse"], torch.tensor((batch["weights"].numpy() * errors.mean(-1)).sum(-1) / 10, dtype=torch.float32)
    )


def test_beta_weights_the_likelihood_by_the_variance() -> None:
    """Its gradients are those of the likelihood times variance^beta (Seitzer et al. 2022, Eq. 6-7), over its mean."""
    batch, norm = batch_of(5), identity_norm(3, 2)
    batch["weights"] = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    mean, log_var = normal(2, 5, 4, seed=3).requires_grad_(), normal(2, 5, 4, seed=4).requires_grad_()
    loss = mopo_model_loss(Prediction(mean, log_var, None), batch, norm, beta=0.5)["model_loss"]
    found = torch.autograd.grad(loss, [mean, log_var])
    error = (mean - targets_of(batch["obs"], batch["next_obs"], batch["rewards"])).detach().numpy()
    variance = np.exp(log_var.detach().numpy())
    counts = np.array([1.0, 1.0, 0.0, 1.0, 1.0]).reshape(1, 5, 1)
    emphasis = (
        counts * variance**0.5 / (counts * variance**0.5).sum(1, keepdims=True) / 4
    )  # four rows count, four numbers
    np.testing.assert_allclose(found[0], emphasis * error / variance, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found[1], emphasis * 0.5 * (1.0 - error**2 / variance), rtol=1e-4, atol=1e-7)
    plain = mopo_model_loss(Prediction(mean, log_var, None), batch, norm)
    assert float(plain["model_loss"].detach()) == pytest.approx(2.0 * float(plain["nll"].detach()), rel=1e-6)


def test_discrete_actions_enter_one_hot() -> None:
    spec = EnvSpec("Test-v0", ArraySpec((3,)), ActionSpec("discrete", (4,)))
    torch.manual_seed(0)
    model = EnsembleDynamics(spec, (8,), num_members=2, num_elites=1)
    obs, actions = normal(6, 3), torch.tensor([0, 3, 1, 2, 0, 3])
    as_vectors = MLPMOPOEnsembleModel(3, 4, (8,), num_members=2, num_elites=1)
    as_vectors.load_state_dict(model.state_dict())
    same = as_vectors(obs, torch.eye(4)[actions])
    torch.testing.assert_close(model(obs, actions).mean, same.mean, atol=0.0, rtol=0.0)


def test_ensemble_is_separate_networks_and_bounds_its_variance() -> None:
    torch.manual_seed(0)
    model = MLPMOPOEnsembleModel(3, 2, (8, 8), num_members=4, num_elites=2)
    model.input_mean.copy_(normal(5, seed=5))
    model.input_std.fill_(2.0)
    batch = batch_of(7)
    out = model(batch["obs"], batch["actions"])
    x = (torch.cat([batch["obs"], batch["actions"]], -1) - model.input_mean) / 2.0
    for member in range(4):
        h = x
        for layer in (model.hidden[0], model.hidden[2]):
            h = torch.nn.functional.silu(h @ layer.weight[member] + layer.bias[member])
        raw = h @ model.head.weight[member] + model.head.bias[member]
        torch.testing.assert_close(out.mean[member], raw[:, :4])
    with torch.no_grad():
        model.head.bias[..., 4:] = torch.tensor([300.0, -300.0, 300.0, -300.0])
    bounded = model(batch["obs"], batch["actions"]).log_var
    torch.testing.assert_close(bounded[..., [0, 2]], torch.full((4, 7, 2), 0.5), atol=1e-3, rtol=0.0)
    torch.testing.assert_close(bounded[..., [1, 3]], torch.full((4, 7, 2), -10.0), atol=1e-3, rtol=0.0)
    some = model(batch["obs"], batch["actions"], members=torch.tensor([2, 0]))
    torch.testing.assert_close(some.mean, model(batch["obs"], batch["actions"]).mean[[2, 0]])


def test_uncertainty_and_disagreement_by_definition() -> None:
    torch.manual_seed(1)
    model = MLPMOPOEnsembleModel(3, 2, (8,), num_members=3, num_elites=1)
    model.target_std.copy_(torch.tensor([0.5, 2.0, 1.0, 3.0]))
    batch = batch_of(5)
    out = model(batch["obs"], batch["actions"])
    for row in range(5):
        stds = [np.exp(0.5 * out.log_var[e, row].detach().numpy()) * model.target_std.numpy() for e in range(3)]
        largest = max(np.sqrt((s**2).sum()) for s in stds)
        assert float(model.uncertainty(batch["obs"], batch["actions"])[row]) == pytest.approx(largest, rel=1e-5)
        means = out.mean[:, row].detach().numpy() * model.target_std.numpy()
        spread = np.linalg.norm(means.std(0))
        assert float(model.disagreement(batch["obs"], batch["actions"])[row]) == pytest.approx(spread, rel=1e-4)


def test_samples_come_from_the_elites_with_their_mean_and_spread() -> None:
    rows = 40_000
    mean = torch.tensor([[1.0, -1.0], [5.0, 5.0], [3.0, 0.0]]).unsqueeze(1).expand(3, rows, 2)
    log_var = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-2.0, -2.0]]).unsqueeze(1).expand(3, rows, 2)
    obs = torch.full((rows, 1), 10.0)
    out = imagine(
        Prediction(mean, log_var, None), obs, identity_norm(1, 1), KEY, KNOWN["Pendulum-v1"].ends, torch.tensor([2, 0])
    )
    change = out.next_obs[:, 0] - 10.0
    assert float(change.mean()) == pytest.approx(2.0, abs=0.02)
    # A mixture of N(1, 1) and N(3, e^-2): variance = mean variance + variance of the means.
    assert float(change.var()) == pytest.approx((1 + np.exp(-2)) / 2 + 1.0, rel=0.03)
    assert float(out.rewards.mean()) == pytest.approx(-0.5, abs=0.02)
    assert not out.terminated.any()


def test_learned_termination_is_drawn_with_its_probability() -> None:
    logits = torch.full((2, 20_000), float(np.log(0.25 / 0.75)))
    zeros = torch.zeros(2, 20_000, 2)
    out = imagine(Prediction(zeros, zeros, logits), torch.zeros(20_000, 1), identity_norm(1, 1), KEY, None)
    assert float(out.terminated.float().mean()) == pytest.approx(0.25, abs=0.015)
    with pytest.raises(ValueError, match="termination function"):
        imagine(Prediction(zeros, zeros, None), torch.zeros(20_000, 1), identity_norm(1, 1), KEY, None)


# --- fitting ---------------------------------------------------------------------------------------------------------


def fresh(**fields: Any) -> tuple[Dynamics, TrainState]:
    settings = {"model_hidden_sizes": (16,), "num_members": 4, "num_elites": 2, "termination": "none", **fields}
    dynamics = Dynamics(spec_for("sac"), DynamicsHyper(**settings))
    torch.manual_seed(0)
    params = dynamics.net.flatten(dynamics.network())
    zero = torch.zeros((), dtype=torch.int64)
    opt = {"model": dynamics.adam.init(params)}
    return dynamics, TrainState({"model": params}, {}, opt, {"dynamics": dynamics.init_extra()}, zero, torch.zeros(()))


def test_nothing_that_is_learned_sees_the_held_out_rows() -> None:
    dynamics, start = fresh(model_holdout=0.3)
    batch = batch_of(400, OBS_DIM)
    held = dynamics.held_out(batch)
    assert 0.27 < float(held.float().mean()) < 0.33
    changed = {**batch, **{k: torch.where(held.view(-1, *[1] * (batch[k].ndim - 1)), 50.0 * batch[k] - 3.0, batch[k])
                           for k in ("obs", "next_obs", "actions", "rewards")}}  # fmt: skip
    ends = []
    for data in (batch, changed):
        state, _ = dynamics.begin(start, data, KEY)
        for _ in range(3):
            state, _ = dynamics.fit(state, data, KEY)
        ends.append(state)
    assert torch.equal(ends[0].params["model"], ends[1].params["model"])
    for name, value in ends[0].extra["dynamics"]["norm"].items():
        assert torch.equal(value, ends[1].extra["dynamics"]["norm"][name])
    errors = [dynamics.validate(end, data, KEY)[1].metrics["error"] for end, data in zip(ends, (batch, changed))]
    assert float(errors[1]) > 10.0 * float(errors[0])  # and only they judge
    seen = {**batch, "rewards": torch.where(held, batch["rewards"], batch["rewards"] + 1e3)}
    assert torch.equal(dynamics.validate(ends[0], seen, KEY)[1].metrics["error"], errors[0])


def with_errors(dynamics: Dynamics, state: TrainState, errors: list[float], monkeypatch: Any) -> TrainState:
    """`validate` in a world where the members have these held-out errors."""
    import rl_training.algorithms.model_based.model_fit as module

    monkeypatch.setattr(module, "mopo_model_loss", lambda *_: {"mse": torch.tensor(errors)})
    return dynamics.validate(state, batch_of(20, OBS_DIM), KEY)[0]


def test_elites_best_parameters_and_early_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamics, state = fresh(model_patience=2)
    state, _ = dynamics.begin(state, batch_of(50, OBS_DIM), KEY)
    owner = dynamics.owner
    state = state._replace(params={"model": torch.full_like(state.params["model"], 1.0)})
    state = with_errors(dynamics, state, [0.4, 0.1, 0.3, 0.2], monkeypatch)
    assert state.extra["dynamics"]["elites"].tolist() == [1, 3]
    state = state._replace(params={"model": torch.full_like(state.params["model"], 2.0)})
    state = with_errors(dynamics, state, [0.05, 0.0995, 0.5, 0.2], monkeypatch)  # member 1: better by half a per cent
    inner = state.extra["dynamics"]
    assert inner["elites"].tolist() == [0, 1]
    assert inner["best_error"].tolist() == pytest.approx([0.05, 0.1, 0.3, 0.2])
    assert (inner["best"][owner == 0] == 2.0).all()
    assert (inner["best"][owner == 1] == 1.0).all()
    state = state._replace(params={"model": torch.full_like(state.params["model"], 3.0)})
    state = with_errors(dynamics, state, [0.9] * 4, monkeypatch)
    assert not state.extra["dynamics"]["fitted"]
    assert (state.params["model"] == 3.0).all()
    state = with_errors(dynamics, state, [0.9] * 4, monkeypatch)
    assert state.extra["dynamics"]["fitted"]
    assert torch.equal(state.params["model"], state.extra["dynamics"]["best"])
    monkeypatch.undo()
    later, _ = dynamics.fit(state, batch_of(400, OBS_DIM), KEY)  # a fit that is over changes nothing more
    assert torch.equal(later.params["model"], state.params["model"])
    assert torch.equal(later.opt["model"]["m"], state.opt["model"]["m"])


def test_weight_decay_and_owners_reach_the_right_parameters() -> None:
    dynamics, _ = fresh(model_hidden_sizes=(6, 6), model_weight_decay=(1.0, 2.0, 7.0))
    named = dynamics.net.named(dynamics.decay)
    assert {n: sorted(set(x.flatten().tolist())) for n, x in named.items() if "weight" in n} == {
        "hidden.0.weight": [1.0], "hidden.2.weight": [2.0], "head.weight": [7.0],
    }  # fmt: skip
    assert not named["head.bias"].any()
    owners = dynamics.net.named(dynamics.owner)
    assert owners["head.bias"][2].unique().tolist() == [2]
    assert owners["max_log_var"].unique().tolist() == [4]


def test_fit_learns_linear_dynamics() -> None:
    dynamics, state = fresh(model_batch_size=64, model_learning_rate=3e-3)
    batch = batch_of(512, OBS_DIM, seed=3)
    mix = normal(OBS_DIM + 2, OBS_DIM, seed=4)
    batch["next_obs"] = batch["obs"] + torch.cat([batch["obs"], batch["actions"]], -1) @ mix
    batch["rewards"] = batch["obs"].sum(-1)
    state, _ = dynamics.begin(state, batch, KEY)
    for i in range(400):
        rows = rng.randint(rng.fold(KEY, i), (256,), 512)
        state, _ = dynamics.fit(state, {k: v[rows] for k, v in batch.items()}, KEY)
    _, aux = dynamics.validate(state, batch, KEY)
    assert float(aux.metrics["error"]) < 0.02  # of a variance of 1


# --- termination -----------------------------------------------------------------------------------------------------

STATES = 10_000


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Walker2d-v5", "Ant-v5", "InvertedPendulum-v5"])
def test_termination_equals_mujoco(env_id: str) -> None:
    """Random states set in the simulator: what the environment says of them."""
    env: Any = gymnasium.make(env_id).unwrapped
    env.reset(seed=0)
    g = np.random.default_rng(0)
    observations, ended = [], []
    for _ in range(STATES):
        env.data.qpos[:] = env.init_qpos + g.uniform(-0.5, 0.5, env.model.nq)
        env.data.qvel[:] = g.normal(0.0, 3.0, env.model.nv)
        obs = env._get_obs()
        if env_id == "InvertedPendulum-v5":  # it has no `is_healthy`: the line of its `step`
            done = not np.isfinite(obs).all() or abs(obs[1]) > 0.2
        else:
            done = not env.is_healthy
        observations.append(obs)
        ended.append(done)
    found = KNOWN[env_id].ends(torch.as_tensor(np.array(observations), dtype=torch.float32)).numpy()
    assert KNOWN[env_id].obs_dim == len(observations[0])
    assert 0.02 < np.mean(ended) < 0.98
    assert (found == np.array(ended)).all()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"])
def test_termination_equals_the_environments_steps(env_id: str) -> None:
    steps = STATES if env_id != "HalfCheetah-v5" else 1_000
    env = gymnasium.make(env_id).unwrapped
    env.action_space.seed(0)
    env.reset(seed=0)
    g = np.random.default_rng(1)
    observations, ended = [], []
    for _ in range(steps):
        if env_id == "CartPole-v1":
            env.state = g.uniform([-3.0, -2.0, -0.4, -2.0], [3.0, 2.0, 0.4, 2.0])  # type: ignore[attr-defined]
            env.steps_beyond_terminated = None  # type: ignore[attr-defined]
        obs, _, terminated, _, _ = env.step(env.action_space.sample())
        observations.append(obs)
        ended.append(terminated)
    found = KNOWN[env_id].ends(torch.as_tensor(np.array(observations), dtype=torch.float32)).numpy()
    assert (found == np.array(ended)).all()
    assert (0.2 < np.mean(ended) < 0.8) == (env_id == "CartPole-v1")


def test_choice_of_the_termination_function() -> None:
    action = ActionSpec("box", (), (3,), (-1.0,) * 3, (1.0,) * 3)
    hopper, other = (EnvSpec(name, ArraySpec((11,)), action) for name in ("Hopper-v5", "Mine-v0"))
    assert termination("auto", hopper) is KNOWN["Hopper-v5"].ends
    assert termination("auto", EnvSpec("Hopper-v5", ArraySpec((12,)), action)) is None  # another layout: learned
    assert termination("auto", other) is None
    assert termination("learned", hopper) is None
    assert termination("Hopper-v5", other) is KNOWN["Hopper-v5"].ends
    ends = termination("none", hopper)
    assert ends is not None
    assert not ends(torch.full((3, 11), -5.0)).any()
    with pytest.raises(UserError, match=r"unknown termination 'hoper'.*Known: auto, learned, none, Hopper-v5"):
        termination("hoper", hopper)
    with pytest.raises(UserError, match="needs 17-dimensional observations; Hopper-v5 has 11 dimensions"):
        termination("Walker2d-v5", hopper)


@pytest.mark.parametrize("name", ["mbpo", "pets"])
def test_bad_input_is_refused_at_construction(name: str) -> None:
    from rl_training import registry

    image = EnvSpec("Pixels-v0", ArraySpec((3, 64, 64), "uint8"), spec_for("sac").action)
    with pytest.raises(UserError, match="needs vector observations; Pixels-v0 has"):
        registry.entry(name).load()(image)
    for fields, message in (
        ({"num_elites": 0}, "num_elites = 0: .*greater than or equal to 1"),
        ({"num_elites": 9}, "num_elites = 9 is more than num_members"),
        ({"termination": "Hoper-v5"}, "Did you mean 'Hopper-v5'"),
        ({"n_step": 3}, "n_step must be 1"),
        ({"prioritized": True}, "prioritized must be false"),
        ({"model_weight_decay": [-1.0]}, "at least 0"),
    ):
        with pytest.raises(UserError, match=message):
            make_algorithm(name, **fields)


def test_physical_units() -> None:
    norm = {**identity_norm(1, 1), "target_mean": torch.tensor([1.0, 2.0]), "target_std": torch.tensor([3.0, 4.0])}
    mean, std = denormalise(Prediction(torch.ones(1, 1, 2), torch.zeros(1, 1, 2), None), norm)
    assert mean.flatten().tolist() == [4.0, 6.0]
    assert std.flatten().tolist() == [3.0, 4.0]
