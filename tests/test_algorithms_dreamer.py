"""Dreamer: what flows where (gradients, memory, time), exact returns, its rhythm, and bad input."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ACTIONS, batch_for, config_for, make_algorithm

from rl_training.algorithms.phases import ReplayPhase
from rl_training.algorithms.world_model.dreamer import Dreamer
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.runtime.loops.off_policy import OffPolicyLoop
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(7)
T, H = 6, 3  # as in tests/helpers.py


def agent(kind: str = "discrete", **fields: Any) -> Any:
    return make_algorithm("dreamer", kind, **fields)


def observe(algorithm: Any, params: Any, rows: Any, key: torch.Tensor = KEY) -> Any:
    """The states of a sequence, one step after the other, as an ordinary function of the parameters."""
    u = rng.uniform(key, (*rows.rewards.shape, algorithm.sizes.stoch))
    net = algorithm.nets["world"]
    return net(params["world"], "observe", rows.obs, rows.actions, rows.keep, rows.start, u)


def imagine(algorithm: Any, params: Any, latents: Any) -> Any:
    fixed = {name: list(algorithm.nets[name].named(flat.detach()).values()) for name, flat in params.items()}
    return algorithm.imagine(fixed, tree_map(torch.detach, latents), KEY)


def gradients(algorithm: Any, which: str, **fields: Any) -> dict[str, bool]:
    """Which networks one part of the loss has a gradient for."""
    state, rows = algorithm.init_state(0), algorithm.sequence(batch_for(algorithm))
    state = state._replace(target={"critic": state.params["critic"] + 0.1})
    # Heads that start at zero stop all gradients below them: move them away.
    params = tree_map(lambda x: (x + 0.02 * torch.randn_like(x)).requires_grad_(), state.params)
    seen = observe(algorithm, params, rows)
    world, _ = algorithm.world_loss(params, rows, seen)
    dream = imagine(algorithm, params, seen.latents)
    behaviour, metrics, _ = algorithm.behaviour_loss(params, state, rows, seen.latents, dream)
    value = {"world": world, "behaviour": behaviour, **metrics}[which]
    found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    return {name: g is not None and bool(g.any()) for name, g in zip(params, found)}


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_gradients_reach_only_their_own_networks(kind: str) -> None:
    torch.manual_seed(0)
    algorithm = agent(kind)
    assert gradients(algorithm, "world") == {"world": True, "actor": False, "critic": False}
    assert gradients(algorithm, "actor_loss") == {"world": False, "actor": True, "critic": False}
    assert gradients(algorithm, "critic_loss") == {"world": False, "actor": False, "critic": True}
    assert gradients(algorithm, "replay_value_loss") == {"world": True, "actor": False, "critic": True}


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_gradients_through_time_are_those_of_the_whole_loop(kind: str) -> None:
    """An update takes them apart (states, what passes through them, all weights at once); autograd of the plain loop
    over the sequence does not."""
    torch.manual_seed(0)
    algorithm = agent(kind)
    state, batch = algorithm.init_state(0), batch_for(algorithm, size=4)
    state = state._replace(params=tree_map(lambda x: x + 0.05 * torch.randn_like(x), state.params))
    rows = algorithm.sequence(batch)
    assert 0 < float(rows.keep.sum()) < rows.keep.numel()  # with episodes that begin on the way
    params = tree_map(lambda x: x.clone().requires_grad_(), state.params)
    seen = observe(algorithm, params, rows, rng.fold(KEY, 0))
    world, losses = algorithm.world_loss(params, rows, seen)
    dream = imagine(algorithm, params, seen.latents)
    behaviour, more, _ = algorithm.behaviour_loss(params, state, rows, seen.latents, dream)
    expected = torch.autograd.grad(world + behaviour, list(params.values()))
    found, (metrics, _, deter, codes) = algorithm.gradients(state, rows, KEY)
    assert torch.equal(codes, seen.codes)
    torch.testing.assert_close(deter, seen.latents.deter)
    torch.testing.assert_close(metrics, {**losses, **more}, rtol=1e-4, atol=1e-5)
    for name, grad in zip(params, expected):
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_imagination_from_posteriors(kind: str) -> None:
    algorithm = agent(kind)
    state, rows = algorithm.init_state(0), algorithm.sequence(batch_for(algorithm, size=4))
    seen = observe(algorithm, state.params, rows)
    dream = imagine(algorithm, state.params, seen.latents)
    width = algorithm.sizes.deter + algorithm.sizes.stoch * algorithm.sizes.classes
    assert dream.features.shape == (H + 1, T, 4, width)
    assert dream.actions.shape[:3] == (H, T, 4)
    assert torch.equal(dream.features[0], seen.latents.features)
    # Every step is one step of the model with the action that was drawn.
    u = rng.uniform(rng.fold(KEY, 1), (H, T, 4, algorithm.sizes.stoch))
    latents = seen.latents
    for step in range(H):
        action = algorithm.vectors(dream.actions[step])
        latents = algorithm.nets["world"](state.params["world"], "imagine", latents, action, u[step])
        torch.testing.assert_close(dream.features[step + 1], latents.features)


def test_returns_of_imagined_and_replayed_states_by_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """G_t = r_{t+1} + gamma c_{t+1} ((1 - lambda) v_{t+1} + lambda G_{t+1}), written out in a loop."""
    algorithm = agent(gamma=0.9, gae_lambda=0.7)
    state, batch = algorithm.init_state(0), batch_for(algorithm, size=4)
    state = state._replace(params=tree_map(lambda x: x + 0.05 * torch.sin(torch.arange(len(x))), state.params))
    rows, targets = algorithm.sequence(batch), []
    original = algorithm.value_loss
    monkeypatch.setattr(algorithm, "value_loss", lambda a, b, c: (targets.append(b), original(a, b, c))[1])
    seen = observe(algorithm, state.params, rows)
    dream = imagine(algorithm, state.params, seen.latents)
    algorithm.behaviour_loss(state.params, state, rows, seen.latents, dream)
    values = algorithm.expected(algorithm.nets["critic"](state.params["critic"], dream.features)).double()
    logits, go_on = algorithm.nets["world"](state.params["world"], "outcome", dream.features)
    rewards, continues = algorithm.expected(logits).double(), torch.sigmoid(go_on).double()
    expected = [values[H]]
    for t in range(H - 1, -1, -1):
        after = 0.3 * values[t + 1] + 0.7 * expected[0]
        expected.insert(0, rewards[t + 1] + 0.9 * continues[t + 1] * after)
    imagined = torch.stack(expected[:-1])
    torch.testing.assert_close(targets[0].double(), imagined, rtol=1e-4, atol=1e-4)
    # Replayed: real rewards; after the last row and after the end of an episode the imagined return stands in.
    found = targets[1]
    assert found.shape == (T - 1, 4)
    checked = 0
    for b in range(4):
        ends = rows.last[:, b].tolist()
        following = float(imagined[0, T - 1, b])
        for t in range(T - 2, -1, -1):
            boot = float(imagined[0, t + 1, b])
            cut = ends[t + 1] or t == T - 2
            after = boot if cut else 0.3 * boot + 0.7 * following
            following = float(rows.rewards[t + 1, b]) + 0.9 * (1.0 - float(rows.terminal[t + 1, b])) * after
            if not ends[t]:  # else the row after belongs to another episode, and the loss leaves it out
                assert float(found[t, b]) == pytest.approx(following, rel=1e-4, abs=1e-4)
                checked += 1
    assert checked > 8


def test_sequence_lines_up_actions_ends_and_weights() -> None:
    algorithm = agent()
    batch = batch_for(algorithm, size=2)
    batch["is_first"] = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    batch["is_last"] = torch.tensor([[False, False, False, False, False, True], [False] * 4 + [True, False]])
    batch["mask"][:] = True
    batch["mask"][1, 3] = False
    batch["state"] = algorithm.pack(torch.ones(2, 32), torch.tensor([[1, 0, 3, 2]] * 2), torch.eye(ACTIONS)[[2, 0]])
    rows = algorithm.sequence(batch)
    actions = torch.eye(ACTIONS)[batch["actions"]]
    nothing = torch.zeros(ACTIONS)
    a, b = actions[0], actions[1]
    expected = [[nothing, a[0], a[1], nothing, a[3], a[4]], [torch.eye(ACTIONS)[0], b[0], b[1], b[2], b[3], b[4]]]
    assert torch.equal(rows.actions.transpose(0, 1), torch.stack([torch.stack(row) for row in expected]))
    assert rows.last.T.tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0]]  # also where the next row begins an episode
    assert rows.keep.T.tolist() == [[0, 1, 1, 0, 1, 1], [1] * 6]
    assert torch.equal(rows.weights[:, 0], batch["weights"][0].expand(6))
    assert rows.weights[3, 1] == 0.0
    codes = rows.start.stoch.unflatten(-1, (4, 4)).argmax(-1)
    assert codes.tolist() == [[1, 0, 3, 2]] * 2


def test_refreshed_carry_continues_the_sequence_exactly() -> None:
    """A sequence begun from what an update gives back goes on as the one it came from."""
    algorithm = agent(replay_period=2, batch_length=6)
    state, batch = algorithm.init_state(0), batch_for(algorithm, size=3)
    _, aux = algorithm.train_step(state, batch, KEY)
    assert aux.rows["state"].shape == (3, 2, algorithm.carry_size)  # before the rows 2 and 4
    rows = algorithm.sequence(batch)
    seen = observe(algorithm, state.params, rows, rng.fold(KEY, 0))
    for k, row in ((0, 2), (1, 4)):
        start, action = algorithm.unpack(aux.rows["state"][:, k])
        u = rng.uniform(rng.fold(KEY, 0), (6, 3, algorithm.sizes.stoch))[row:]
        actions = torch.cat([action.unsqueeze(0), rows.actions[row + 1 :]])
        obs = rows.obs[row:]
        rest = algorithm.nets["world"](state.params["world"], "observe", obs, actions, rows.keep[row:], start, u)
        torch.testing.assert_close(rest.latents, tree_map(lambda x, row=row: x[row:], seen.latents))


def test_pack_and_unpack_are_inverse_and_actions_can_be_replaced() -> None:
    algorithm = agent()
    deter, codes = torch.randn(5, 32), torch.randint(0, 4, (5, 4))
    carry = algorithm.pack(deter, codes, torch.eye(ACTIONS)[torch.tensor([0, 1, 2, 0, 1])])
    latents, action = algorithm.unpack(carry)
    assert torch.equal(latents.deter, deter)
    assert torch.equal(latents.stoch.unflatten(-1, (4, 4)).argmax(-1), codes)
    assert action.argmax(-1).tolist() == [0, 1, 2, 0, 1]
    _, other = algorithm.unpack(algorithm.replace_actions(carry, torch.tensor([2, 2, 2, 2, 2])))
    assert other.argmax(-1).tolist() == [2] * 5
    start, nothing = algorithm.unpack(algorithm.init_carry(2))  # at the start of an episode there is no choice at all
    assert not start.features.any()
    assert not nothing.any()


def test_acting_step_by_step_equals_filtering_a_sequence() -> None:
    algorithm = agent("box")
    state, g = algorithm.init_state(0), np.random.default_rng(0)
    obs, first = torch.as_tensor(g.standard_normal((4, 2, 5)), dtype=torch.float32), torch.zeros(4, 2, dtype=torch.bool)
    carry, actions, deters = algorithm.init_carry(2), [], []
    monkey = algorithm.sizes.stoch
    for row in obs:
        carry, action, extras = algorithm.select_action(state, carry, row, KEY, explore=True)
        actions.append(action)
        deters.append(carry[:, : algorithm.sizes.deter])
    assert extras["state"].shape == (2, algorithm.carry_size)
    assert float(torch.stack(actions).abs().max()) <= 1.0
    # `filter` draws its own choices: the first state and its successor given the same choice must agree.
    filtered = algorithm.filter(state, obs, torch.stack(actions), first, rng.fold(KEY, 0))
    torch.testing.assert_close(filtered.deter[0], deters[0])
    assert monkey == filtered.stoch.shape[-1] // algorithm.sizes.classes


def test_open_loop_prediction_has_the_environments_shapes() -> None:
    algorithm = agent()
    state, batch = algorithm.init_state(0), batch_for(algorithm, size=3)
    obs, actions, first = (batch[k].transpose(0, 1) for k in ("obs", "actions", "is_first"))
    latents = algorithm.filter(state, obs, actions, first, KEY)
    assert latents.deter.shape == (T, 3, 32)
    ahead = algorithm.predict(state, tree_map(lambda x: x[2], latents), actions[2:], KEY)
    assert ahead.obs.shape == (T - 2, 3, 5)
    assert ahead.rewards.shape == ahead.continues.shape == (T - 2, 3)
    assert not ahead.rewards.any()  # the head starts at zero
    torch.testing.assert_close(algorithm.decode(state, ahead.latents), ahead.obs)


@pytest.mark.parametrize(("ratio", "envs"), [(32.0, 1), (100.0, 3), (0.7, 2), (1024.0, 1), (5000.0, 4)])
def test_train_ratio_is_exact_over_any_number_of_turns(ratio: float, envs: int) -> None:
    hyper = Dreamer.Hyper(train_ratio=ratio, batch_size=16, batch_length=64)
    phase = ReplayPhase("update", lambda *a: None, times=hyper.rate(envs))  # type: ignore[arg-type, return-value]
    done = 0
    for turn in range(1, 2_000):
        done += phase.calls(turn * envs, turn)
        assert done == turn * envs * Fraction(ratio).limit_denominator(1_000_000) // 1024
    assert done == hyper.planned_updates(1_999, envs)


def test_updates_of_a_run_keep_the_ratio(tmp_path: Any) -> None:
    config = config_for("dreamer", tmp_path, total_timesteps=100, algo_kwargs={"train_ratio": 10.0})
    result = Trainer(config, progress=False).run()
    assert result.summary["gradient_steps"] == 100 * 10 // 24 - 39 * 10 // 24  # from step 40 on


def test_bad_input_is_refused_at_construction() -> None:
    unbounded = ActionSpec("box", (), (1,), (-float("inf"),), (float("inf"),))
    with pytest.raises(UserError, match="bounded action space"):
        Dreamer(EnvSpec("Test-v0", ArraySpec((3,)), unbounded), size="tiny")
    with pytest.raises(UserError, match="discrete or box"):
        Dreamer(EnvSpec("Test-v0", ArraySpec((3,)), ActionSpec("multi_binary", (2, 2), (2,))), size="tiny")
    with pytest.raises(UserError, match="vectors or uint8 images"):
        Dreamer(EnvSpec("Test-v0", ArraySpec((3, 3)), ActionSpec("discrete", (2,))), size="tiny")
    with pytest.raises(UserError, match=r"learning_starts = 40 must be at least 128"):
        OffPolicyLoop.check(agent(batch_length=64).hp, 2)
    with pytest.raises(UserError, match="raise buffer_size"):
        agent(batch_length=64, learning_starts=500, buffer_size=60).sources(1)
