"""discrete_cql, discrete_iql, marwil, bcq and decision_transformer against independent computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ACTION_DIM, BATCH, OBS_DIM, batch_for, config_for, make_algorithm, modules_of
from torch.nn import functional as F

from rl_training.data.dataset import TransitionDataset
from rl_training.data.windows import WindowSource
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent, build_algorithm
from rl_training.experiment.run.trainer import Trainer
from rl_training.models.transformer import Block
from rl_training.ops import rng
from rl_training.ops.tree import tree_stack
from rl_training.runtime.evaluator import Evaluator
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(0)


def step(module: torch.nn.Module, loss: torch.Tensor, rate: float) -> None:
    adam = torch.optim.Adam(module.parameters(), lr=rate)
    adam.zero_grad()
    loss.backward()
    adam.step()


def assert_network(algorithm: Any, module: torch.nn.Module, flat: torch.Tensor) -> None:
    name = next(n for n, m in algorithm.modules.items() if type(m) is type(module))
    torch.testing.assert_close(algorithm.nets[name].flatten(module), flat, rtol=1e-3, atol=2e-5)


# --- discrete CQL and IQL --------------------------------------------------------------------------------------------


def test_discrete_cql_update_equals_plain_autograd() -> None:
    algorithm = make_algorithm("discrete_cql", cql_alpha=0.7, learning_rate=1e-2, max_grad_norm=0.0)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state = state._replace(target={"q": algorithm.init_state(1).params["q"]})
    m = modules_of(algorithm, state)
    rows = torch.arange(BATCH)
    with torch.no_grad():
        best = m["q"](batch["next_obs"]).argmax(-1)  # double Q-learning
        target = batch["rewards"] + batch["discounts"] * m["slow_q"](batch["next_obs"])[rows, best]
    q = m["q"](batch["obs"])
    taken = q[rows, batch["actions"]]
    penalty = torch.log(torch.exp(q).sum(-1)) - taken
    loss = (batch["weights"] * (F.smooth_l1_loss(taken, target, reduction="none") + 0.7 * penalty)).mean()
    step(m["q"], loss, 1e-2)
    after, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_network(algorithm, m["q"], after.params["q"])


def test_discrete_cql_target_counts_gradient_steps() -> None:
    algorithm = make_algorithm("discrete_cql", target_update_interval=2, tau=1.0)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    first, _ = algorithm.train_step(state, batch, KEY)
    second, _ = algorithm.train_step(first, batch, KEY)
    assert torch.equal(first.target["q"], state.target["q"])
    assert torch.equal(second.target["q"], second.params["q"])


def test_discrete_iql_update_equals_plain_autograd() -> None:
    rate = 1e-2
    algorithm = make_algorithm("discrete_iql", learning_rate=rate, actor_learning_rate=rate, expectile=0.8, beta=2.0)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    m = modules_of(algorithm, state)
    obs, actions, weights, rows = batch["obs"], batch["actions"], batch["weights"], torch.arange(BATCH)
    q = torch.minimum(*(head[rows, actions] for head in m["slow_critic"](obs)))
    difference = q - m["value"](obs)
    with torch.no_grad():
        weight = torch.exp(2.0 * difference).clamp(max=100.0)
        target = batch["rewards"] + batch["discounts"] * m["value"](batch["next_obs"])
    step(m["value"], (weights * torch.where(difference > 0, 0.8, 0.2) * difference**2).mean(), rate)
    step(m["actor"], (weights * weight * F.cross_entropy(m["actor"](obs), actions, reduction="none")).mean(), rate)
    step(m["critic"], sum((weights * (head[rows, actions] - target) ** 2).mean() for head in m["critic"](obs)), rate)
    after, _ = algorithm.train_step(state, batch, KEY)
    for name in ("actor", "critic", "value"):
        assert_network(algorithm, m[name], after.params[name])
    values = algorithm.q_values(state.params, obs)
    torch.testing.assert_close(values, modules_of(algorithm, state)["critic"](obs).min(0).values, check_stride=False)


# --- MARWIL ----------------------------------------------------------------------------------------------------------


def test_marwil_weights_follow_the_running_size_of_the_advantage() -> None:
    algorithm = make_algorithm("marwil", "box", beta=0.5, norm_rate=0.25, learning_rate=1e-2)
    state = algorithm.init_state(0)
    square = 0.0
    for i in range(2):
        batch, m = batch_for(algorithm, seed=i), modules_of(algorithm, state)
        advantage = (batch["returns"] - m["value"](batch["obs"])).detach().numpy().astype(np.float64)
        weights = batch["weights"].numpy()
        now = (weights * advantage**2).mean()
        square = now if i == 0 else 0.75 * square + 0.25 * now
        factor = np.minimum(np.exp(0.5 * advantage / np.sqrt(square)), 20.0)
        mean, log_std = m["actor"](batch["obs"]).chunk(2, -1)
        log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(batch["actions"]).sum(-1)
        loss = -(batch["weights"] * torch.tensor(factor).float() * log_prob).mean()
        step(m["actor"], loss, 1e-2) if i == 0 else None
        after, aux = algorithm.train_step(state, batch, KEY)
        assert float(aux.metrics["actor_loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
        assert float(aux.metrics["value_loss"]) == pytest.approx(0.5 * now, rel=1e-4)
        assert float(after.extra["square"]) == pytest.approx(square, rel=1e-4)
        if i == 0:
            assert_network(algorithm, m["actor"], after.params["actor"])
        state = after


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_marwil_without_beta_is_cloning(kind: str) -> None:
    """The same step as behavioural cloning (of the noise too) from the same weights."""
    clone, marwil = make_algorithm("bc", kind, stochastic=True), make_algorithm("marwil", kind, beta=0.0)
    batch = batch_for(marwil)
    state = marwil.init_state(0)
    start = clone.init_state(0)._replace(params={"actor": state.params["actor"]})
    expected, _ = clone.train_step(start, batch, KEY)
    torch.testing.assert_close(marwil.train_step(state, batch, KEY)[0].params["actor"], expected.params["actor"])


# --- BCQ -------------------------------------------------------------------------------------------------------------


def test_bcq_autoencoder_loss() -> None:
    algorithm = make_algorithm("bcq", kl_coef=0.3)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    vae = modules_of(algorithm, state)["vae"]
    noise = rng.normal(rng.fold(KEY, 0), (BATCH, 2 * ACTION_DIM))
    hidden = vae.encoder(torch.cat([batch["obs"], batch["actions"]], -1))
    mean, log_std = vae.latent(hidden).chunk(2, -1)
    posterior = torch.distributions.Normal(mean, log_std.exp())
    decoded = torch.tanh(vae.head(vae.decoder(torch.cat([batch["obs"], mean + log_std.exp() * noise], -1))))
    divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).mean(-1)
    expected = (batch["weights"] * (((decoded - batch["actions"]) ** 2).mean(-1) + 0.3 * divergence)).mean()
    _, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["vae_loss"]) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_bcq_target_takes_the_best_candidate() -> None:
    """Row by row and candidate by candidate."""
    algorithm = make_algorithm("bcq", lmbda=0.6, num_actions=4, phi=0.2)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    state = state._replace(target={n: 1.3 * flat for n, flat in state.params.items() if n != "vae"})
    after, aux = algorithm.train_step(state, batch, KEY)
    m = {**modules_of(algorithm, state), "vae": modules_of(algorithm, after)["vae"]}  # the one just updated
    z = rng.normal(rng.fold(KEY, 1), (4, BATCH, 2 * ACTION_DIM)).clamp(-0.5, 0.5)
    targets = []
    with torch.no_grad():
        for row in range(BATCH):
            obs = batch["next_obs"][row : row + 1]
            values = []
            for n in range(4):
                action = m["vae"](obs, z[n, row : row + 1])
                moved = (action + 0.2 * m["slow_perturbation"](obs, action)).clamp(-1, 1)
                q = m["slow_critic"](obs, moved)[:, 0]
                values.append(float(0.6 * q.min() + 0.4 * q.max()))
            targets.append(float(batch["rewards"][row]) + float(batch["discounts"][row]) * max(values))
    weights = batch["weights"].numpy()
    assert float(aux.metrics["target_mean"]) == pytest.approx(float((weights * targets).mean()), rel=1e-4)


def test_bcq_acts_with_the_best_candidate_of_any_batch() -> None:
    algorithm = make_algorithm("bcq", num_actions_act=6)
    state, obs = algorithm.init_state(0), batch_for(algorithm)["obs"]
    m = modules_of(algorithm, state)
    _, chosen, _ = algorithm.select_action(state, (), obs, KEY, explore=False)
    _, alone, _ = algorithm.select_action(state, (), obs[3:4], rng.fold(KEY, 5), explore=False)
    torch.testing.assert_close(chosen[3:4], alone)
    with torch.no_grad():
        z = algorithm.fixed[:, 0]
        rows = obs[3:4].expand(6, -1)
        proposal = m["vae"](rows, z)
        moved = (proposal + algorithm.hp.phi * m["perturbation"](rows, proposal)).clamp(-1, 1)
        q = m["critic"](rows, moved)[0]
    torch.testing.assert_close(chosen[3], moved[q.argmax()])
    assert float(algorithm.value(state, obs)[3]) == pytest.approx(float(q.max()), rel=1e-5)


# --- Decision Transformer --------------------------------------------------------------------------------------------


def test_attention_equals_that_of_torch() -> None:
    torch.manual_seed(0)
    block, x = Block(12, 3, 0.0), torch.randn(2, 7, 12)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 7, 7)
    q, k, v = (part.view(2, 7, 3, 4).transpose(1, 2) for part in block.qkv(x).chunk(3, -1))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 7, 12)
    torch.testing.assert_close(block.attend(x, allowed), block.mix(expected), rtol=1e-4, atol=1e-5)


def changed(batch: dict[str, Any], at: int, names: tuple[str, ...]) -> dict[str, Any]:
    out = {name: value.clone() for name, value in batch.items()}
    for name in names:
        out[name][:, at] = out[name][:, at] + 1.0
    return out


def test_decision_transformer_sees_the_past_only() -> None:
    algorithm = make_algorithm("decision_transformer", context_length=4)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    batch["mask"][:] = True
    params, extra = state.params["actor"], state.extra
    before = algorithm.outputs(params, extra, batch, None)
    later = algorithm.outputs(params, extra, changed(batch, 2, ("obs", "returns", "actions")), None)
    assert torch.equal(before[:, :2], later[:, :2])
    assert not torch.allclose(before[:, 2], later[:, 2])
    own = algorithm.outputs(params, extra, changed(batch, 2, ("actions",)), None)  # an action does not see itself
    torch.testing.assert_close(before[:, :3], own[:, :3])
    assert not torch.allclose(before[:, 3], own[:, 3])
    batch["mask"][:, 0] = False  # a step that is not there has no influence
    missing = algorithm.outputs(params, extra, batch, None)
    other = algorithm.outputs(params, extra, changed(batch, 0, ("obs", "returns", "actions")), None)
    torch.testing.assert_close(missing[:, 1:], other[:, 1:])


@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_decision_transformer_acts_as_it_learned(kind: str) -> None:
    """Step by step, with its carry, it gives the outputs that the training pass has for the same window; and what was
    paid is taken off the return that is still wanted."""
    algorithm = make_algorithm("decision_transformer", kind, context_length=3, target_return=10.0)
    state = algorithm.init_state(0)
    g = torch.Generator().manual_seed(1)
    obs, paid = torch.randn(5, 2, OBS_DIM, generator=g), torch.randn(5, 2, generator=g)
    carry, actions, left = algorithm.init_carry(2), [], [torch.full((2,), 10.0)]
    for t in range(5):
        carry, action, _ = algorithm.select_action(state, carry, obs[t], KEY, explore=False)
        carry = algorithm.observe(carry, paid[t])
        actions.append(action)
        left.append(left[-1] - paid[t])
        first = max(0, t - 2)
        rows = range(first, t + 1)
        window = {
            "obs": torch.stack([obs[i] for i in rows], 1), "actions": torch.stack([actions[i] for i in rows], 1),
            "returns": torch.stack([left[i] for i in rows], 1), "times": torch.tensor([list(rows)] * 2),
            "mask": torch.ones(2, len(rows), dtype=torch.bool),
        }  # fmt: skip
        out = algorithm.outputs(state.params["actor"], state.extra, window, None)[:, -1]
        torch.testing.assert_close(action, out if kind == "box" else out.argmax(-1), rtol=1e-4, atol=1e-5)
    assert carry["count"].tolist() == [5, 5]


def test_windows_of_a_dataset() -> None:
    n, ends = 12, [4, 6]
    terminated = np.zeros(n, np.bool_)
    terminated[ends] = True
    truncated = np.zeros(n, np.bool_)
    truncated[-1] = True
    obs = np.arange(n, dtype=np.float32)[:, None]
    data = TransitionDataset(obs, obs / n, np.arange(n, dtype=np.float64), obs + 1, terminated, truncated)
    source = WindowSource(data, 3)
    tensors = {name: x[0] for name, x in source.init(1, torch.device("cpu")).items()}
    batch = source.sample(tensors, KEY, 200, torch.zeros(()))
    assert set(batch["indices"].tolist()) == set(range(n))
    starts = [0] * 5 + [5] * 2 + [7] * 5
    stops = [5] * 5 + [7] * 2 + [12] * 5
    for row in range(200):
        last = int(batch["indices"][row])
        for k in range(3):
            at = last - 2 + k
            assert bool(batch["mask"][row, k]) == (at >= starts[last])
            if at >= starts[last]:
                assert float(batch["obs"][row, k, 0]) == at
                assert int(batch["times"][row, k]) == at - starts[last]
                assert float(batch["returns"][row, k]) == sum(range(at, stops[at]))


def test_decision_transformer_in_a_run(tmp_path: Path) -> None:
    config = config_for("decision_transformer", tmp_path, env_id="Pendulum-v1", total_timesteps=30)
    trainer = Trainer(config, progress=False)
    best = trainer.algorithm.dataset.episode_returns().max()
    result = trainer.run()
    agent = Agent.load(result.checkpoint_path)
    assert float(agent.state.extra["target_return"]) == pytest.approx(best)
    obs = np.zeros(3, np.float32)
    agent.predict(obs)
    with pytest.raises(UserError, match="reward of its last action"):
        agent.predict(obs)
    agent.predict(obs, reward=-3.0)
    assert float(agent.episodes.carry["returns"][0, -1]) == pytest.approx(best + 3.0, rel=1e-5)
    agent.reset()
    agent.predict(obs)
    assert int(agent.episodes.carry["count"][0]) == 1


def test_evaluation_tells_what_was_paid() -> None:
    config = config_for("decision_transformer", "unused", env_id="Pendulum-v1")
    spec = EnvSpec("Pendulum-v1", ArraySpec((3,)), ActionSpec("box", (), (1,), (-2.0,), (2.0,)))
    algorithm = build_algorithm(config, spec, torch.device("cpu"))
    told = []
    observe = algorithm.observe
    algorithm.observe = lambda carry, rewards: told.append(rewards) or observe(carry, rewards)  # type: ignore
    evaluator = Evaluator(algorithm, "Pendulum-v1", (0, 1), 1)
    result = evaluator.run(tree_stack([algorithm.init_state(0), algorithm.init_state(1)]))
    evaluator.close()
    assert result is not None
    total = torch.stack(told).sum(0)  # [seeds, 1]
    np.testing.assert_allclose(total[:, 0], [r[0] for r in result.returns], rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizes": [16, 8]}, "all of one width"),
        ({"hidden_sizes": [16], "num_heads": 3}, "num_heads"),
        ({"dataset": {"reward_scale": 0.1}}, "return_scale"),
    ],
)
def test_decision_transformer_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_algorithm("decision_transformer", **fields)
