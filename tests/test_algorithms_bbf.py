"""BBF: its cycle of horizons, the replay of what follows a transition, self-prediction, resets, and one update against
the same written plainly with autograd and torch.optim."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    IMAGE,
    assert_near,
    assert_same_bits,
    batch_for,
    clone,
    config_for,
    make_algorithm,
    make_on_images,
    modules_of,
    pictures,
)
from torch import Tensor, nn

from rl_training.algorithms.value.bbf import spr_loss
from rl_training.data.frames import Frames
from rl_training.data.storage import transition_columns
from rl_training.data.subsequence import PrioritizedSubsequenceReplay, SubsequenceReplay, in_episode
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.categorical import project
from rl_training.ops.images import scale_intensity, shift_images
from rl_training.ops.tree import tree_map, tree_stack
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(4)
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"cnn": "nature", "cnn_width": 1, "hidden_sizes": [12], "num_atoms": 7}


# --- horizons --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cycle", "steps", "gamma"),
    [
        (0, 10.0, 0.97),
        (5_000, 5.0, 1.0 - math.sqrt(0.03 * 0.003)),  # the geometric means: sqrt(10 x 3) = 5.48
        (10_000, 3.0, 0.997),
        (35_000, 3.0, 0.997),
    ],
)
def test_horizon_falls_and_gamma_rises_with_equal_ratios(cycle: int, steps: float, gamma: float) -> None:
    algorithm = make_algorithm("bbf", n_step_start=10, n_step=3, cycle_steps=10_000)
    found = algorithm.horizon(torch.tensor(cycle))
    assert float(found[0]) == steps
    assert float(found[1]) == pytest.approx(gamma, abs=1e-6)


@pytest.mark.parametrize(("steps", "gamma"), [(1, 0.5), (3, 0.9), (4, 0.97)])
def test_returns_of_the_annealed_length_equal_a_walk(steps: int, gamma: float) -> None:
    algorithm = make_algorithm("bbf")
    batch = batch_for(algorithm)
    found = algorithm.transitions(batch, torch.tensor(float(steps)), torch.tensor(gamma))
    for b in range(len(batch["actions"])):
        total, scale = 0.0, 1.0
        for t in range(steps):
            total, scale = total + scale * float(batch["following_rewards"][b, t]), scale * gamma
            ended = bool(batch["following_terminated"][b, t])
            last = ended or bool(batch["following_truncated"][b, t]) or t + 1 == steps
            if last or not batch["following_available"][b, t + 1]:
                break
        assert float(found["rewards"][b]) == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert float(found["discounts"][b]) == pytest.approx(0.0 if ended else scale, rel=1e-5)
        assert torch.equal(found["next_obs"][b], batch["following_obs"][b, t])


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SubsequenceReplay, PrioritizedSubsequenceReplay])
@pytest.mark.parametrize("stack", [1, 2])
def test_replay_returns_the_steps_that_follow(kind: Any, stack: int) -> None:
    """Episodes of three to six steps whose observations are numbered; the rows of a sample against a plain list."""
    n, spec = 4, EnvSpec("Numbers-v0", ArraySpec((stack, 1, 1), "uint8"), ActionSpec("discrete", (3,)))
    frames = {"frames": Frames(spec, stack, "test")} if stack > 1 else {}
    replay = kind(transition_columns(spec), 40, 1, gamma=0.9, n_step=n, **frames)
    data, history, g, stamp = replay.init(1, CPU), [], np.random.default_rng(0), 0
    for length in g.integers(3, 7, 9):  # about 40 steps: the first ones are overwritten or about to be
        seen = [stamp] * stack
        for step in range(length):
            stamp += 1
            after = [*seen[1:], stamp]
            end = step + 1 == length
            truncated = bool(end and length % 2)
            row = {
                "obs": seen, "next_obs": after, "actions": stamp % 3, "rewards": float(stamp),
                "terminated": end and not truncated, "truncated": truncated,
            }  # fmt: skip
            history.append(row)
            written = {
                k: torch.tensor(v).to(dtype).view(1, 1, *shape)
                for (k, (shape, dtype)), v in ((item, row[item[0]]) for item in transition_columns(spec).items())
            }
            replay.write(data, written, torch.ones(1, 1, dtype=torch.bool))
            seen = after
        stamp += 1
    flat = tree_map(lambda x: x[0], data)
    batch = replay.sample(flat, KEY, 64, torch.tensor(0.0))
    starts = {tuple(row["obs"]): t for t, row in enumerate(history)}
    times = [starts[tuple(obs.flatten().tolist())] for obs in batch["obs"]]
    assert len(set(times)) > 20
    for b, t in enumerate(times):
        assert int(batch["actions"][b]) == history[t]["actions"]
        mask = in_episode(*(batch[f"following_{k}"][b : b + 1] for k in ("terminated", "truncated", "available")))[0]
        for k in range(n):
            stored = t + k < len(history)
            assert bool(batch["following_available"][b, k]) == stored
            same = stored and not any(history[t + j]["terminated"] or history[t + j]["truncated"] for j in range(k))
            assert bool(mask[k]) == same
            if same:
                assert batch["following_obs"][b, k].flatten().tolist() == history[t + k]["next_obs"]
                for name in ("actions", "rewards", "terminated", "truncated"):
                    assert batch[f"following_{name}"][b, k].item() == history[t + k][name]


# --- self-prediction -------------------------------------------------------------------------------------------------


def test_spr_loss_by_hand() -> None:
    """Unit vectors (0.6, 0.8) and (0.8, 0.6) are 0.08 apart, opposite ones 4; a masked step counts as 0."""
    predictions = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [5.0, 5.0]]])
    targets = torch.tensor([[[8.0, 6.0], [-7.0, 0.0]], [[0.0, 1.0], [1.0, -1.0]]])
    mask = torch.tensor([[True, True], [True, False]])
    torch.testing.assert_close(spr_loss(predictions, targets, mask), torch.tensor([(0.08 + 4.0) / 2, 0.0]))


def test_predictions_unroll_the_transition_model() -> None:
    """Latents are scaled to [0, 1], each action is a plane of ones, and predictor and projection follow."""
    algorithm = make_on_images("bbf", **SMALL)
    net, obs = algorithm.modules["q"], pictures(5, *IMAGE.shape)
    actions = torch.randint(0, 3, (5, 2), generator=torch.Generator().manual_seed(0))
    encoder, projection = net.torso[0], net.torso[2]

    def scaled(x: Tensor) -> Tensor:
        low, high = (f(x.flatten(1), -1).values.view(-1, 1, 1, 1) for f in (torch.min, torch.max))
        return (x - low) / (high - low + 1e-5)

    latent = scaled(encoder.image.convs(obs.float() / 255.0).relu())
    expected = []
    for k in range(2):
        planes = nn.functional.one_hot(actions[:, k], 3).float()[:, :, None, None].expand(-1, -1, *latent.shape[2:])
        hidden = net.transition.first(torch.cat([latent, planes], 1)).relu()
        latent = scaled(net.transition.second(hidden).relu())
        expected.append(net.predictor(projection(latent.flatten(1))))
    logits, predictions = net(obs, actions=actions)
    torch.testing.assert_close(predictions, torch.stack(expected, 1))
    torch.testing.assert_close(logits, net(obs))
    torch.testing.assert_close(net(obs, project=True), projection(encoder(obs).flatten(1)))


# --- the update ------------------------------------------------------------------------------------------------------


def image_batch(algorithm: Any, seed: int = 0, size: int = 6) -> dict[str, Tensor]:
    batch = batch_for(algorithm_on_vectors(algorithm), seed, size)
    shape = batch["following_obs"].shape[:2]
    return {
        **batch, "obs": pictures(size, *IMAGE.shape, seed=2 * seed),
        "following_obs": pictures(*shape, *IMAGE.shape, seed=2 * seed + 1),
    }  # fmt: skip


def algorithm_on_vectors(algorithm: Any) -> Any:
    return make_algorithm("bbf", n_step_start=algorithm.hp.n_step_start, jumps=algorithm.hp.jumps)


def test_update_equals_plain_autograd() -> None:
    """Double C51 on annealed returns, self-prediction of augmented images by the slow network, AdamW, and the slow
    copy after each update."""
    rate, decay, tau = 1e-3, 0.1, 0.05
    algorithm = make_on_images("bbf", **SMALL, learning_rate=rate, tau=tau, augment="shift_intensity", cycle_steps=3)
    state = algorithm.init_state(0)
    m = modules_of(algorithm, state)
    adam = torch.optim.AdamW(m["q"].parameters(), lr=rate, weight_decay=decay, eps=1.5e-4)
    atoms = torch.linspace(-10.0, 10.0, 7)

    def changed(images: Tensor, key: Tensor) -> Tensor:
        return scale_intensity(shift_images(images, key, 4), rng.fold(key, 11))

    for i in range(4):
        batch, key = image_batch(algorithm, seed=i), rng.fold(KEY, i)
        returns = algorithm.transitions(batch, *algorithm.horizon(torch.tensor(i)))
        obs, next_obs = (changed(returns[k], rng.fold(rng.fold(key, 11), n)) for n, k in enumerate(("obs", "next_obs")))
        later = changed(batch["following_obs"][:, :3].flatten(0, 1), rng.fold(key, 12))
        with torch.no_grad():
            best = (m["q"](next_obs).softmax(-1) @ atoms).argmax(-1)
            next_probs = m["slow_q"](next_obs).softmax(-1)[torch.arange(6), best]
            goal = project(next_probs, returns["rewards"], returns["discounts"], atoms)
            targets = m["slow_q"](later, project=True).view(6, 3, -1)
        logits, predictions = m["q"](obs, actions=batch["following_actions"][:, :3])
        entropy = -(goal * logits[torch.arange(6), batch["actions"]].log_softmax(-1)).sum(-1)
        flags = (batch[f"following_{k}"][:, :3] for k in ("terminated", "truncated", "available"))
        cosine = nn.functional.cosine_similarity(predictions, targets, dim=-1)
        spr = ((2.0 - 2.0 * cosine) * in_episode(*flags)).mean(-1)
        loss = (batch["weights"] * (entropy + 5.0 * spr)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            for old, new in zip(m["slow_q"].parameters(), m["q"].parameters()):
                old.lerp_(new, tau)
        state, aux = algorithm.train_step(state, batch, key)
        assert float(aux.metrics["loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
        torch.testing.assert_close(aux.priority, entropy.detach(), rtol=1e-3, atol=1e-4)
        net = algorithm.nets["q"]
        torch.testing.assert_close(net.flatten(m["q"]), state.params["q"], rtol=1e-3, atol=5e-5)
        torch.testing.assert_close(net.flatten(m["slow_q"]), state.target["q"], rtol=1e-3, atol=5e-5)
    assert int(state.extra["cycle"]) == 4


@pytest.mark.slow
def test_update_on_images_is_pure_one_graph_and_equal_under_vmap() -> None:
    algorithm = make_on_images("bbf", **SMALL, augment="shift_intensity")
    states, batches = [algorithm.init_state(s) for s in (3, 7)], [image_batch(algorithm, s) for s in (3, 7)]
    keys, before = [rng.fold(KEY, s) for s in (3, 7)], clone((states, batches))
    with torch.no_grad():
        alone = [algorithm.train_step(*given)[0] for given in zip(states, batches, keys)]
        assert_same_bits((states, batches), before)

        def step(*given: Any) -> Any:
            return algorithm.train_step(*given)[0]

        together = torch.vmap(step)(tree_stack(states), tree_stack(batches), torch.stack(keys))
        for i, one in enumerate(alone):
            assert_near(tree_map(lambda x, i=i: x[i], together), one, rtol=1e-4, atol=5e-5)
        again = make_on_images("bbf", **SMALL, augment="shift_intensity")
        compiled = torch.compile(again.train_step, fullgraph=True, backend="aot_eager")
        graph = compiled(again.init_state(3), batches[0], keys[0])
        assert_near(graph[0], alone[0], rtol=1e-4, atol=5e-5)


def test_slow_network_acts() -> None:
    algorithm = make_algorithm("bbf")
    state, obs = algorithm.init_state(0), torch.randn(200, 5)
    other = algorithm.init_state(1)
    mixed = state._replace(target=other.params)
    net, atoms = algorithm.nets["q"], torch.linspace(-10.0, 10.0, 51)
    q = net(other.params["q"], obs).softmax(-1) @ atoms
    torch.testing.assert_close(algorithm.action_values(mixed, obs), q)
    assert torch.equal(algorithm.select_action(mixed, (), obs, KEY, explore=False)[1], q.argmax(-1))


# --- resets ----------------------------------------------------------------------------------------------------------


def test_reset_renews_heads_and_shrinks_and_perturbs_the_encoder() -> None:
    algorithm = make_on_images("bbf", **SMALL, shrink_factor=0.25)
    state = algorithm.init_state(0)
    state, _ = algorithm.train_step(state, image_batch(algorithm), KEY)
    new, aux = algorithm.reset_step(state, {}, KEY)
    zeros = state._replace(params={"q": 0.0 * state.params["q"]}, target={"q": 0.0 * state.target["q"]})
    fresh, _ = algorithm.reset_step(zeros, {}, KEY)  # with old weights of 0, kept parts are 0.75 x the fresh ones
    net = algorithm.nets["q"]
    for old, after, drawn in (
        (state.params, new.params, fresh.params),
        (state.target, new.target, fresh.target),
    ):
        before, now, part = (net.named(x["q"]) for x in (old, after, drawn))
        for name, value in now.items():
            kept = 0.25 if name.startswith(("torso.0", "transition")) else 0.0
            torch.testing.assert_close(value, kept * before[name] + part[name], msg=name)
    shapes = {name: parameter.shape for name, parameter in algorithm.modules["q"].named_parameters()}
    assert shapes["torso.0.image.convs.0.weight"] == (16, 3, 3, 3)
    for name, bound in {
        "torso.0.image.convs.0.weight": 0.75 * math.sqrt(6.0 / (9 * (3 + 16))),  # Xavier's, times the new share
        "predictor.weight": math.sqrt(6.0 / (12 + 12)),
        "advantage.weight": math.sqrt(6.0 / (12 + 3 * 7)),
    }.items():
        largest = float(net.named(fresh.params["q"])[name].abs().max())
        assert 0.9 * bound < largest <= bound, name
    assert not net.named(new.params["q"])["predictor.bias"].any()
    assert not torch.equal(new.params["q"], new.target["q"])
    assert_same_bits(new.opt["q"], algorithm.optim.init(state.params["q"]))
    assert int(new.extra["cycle"]) == 0
    assert int(state.extra["cycle"]) == 1
    assert int(new.step) == int(state.step)
    assert float(aux.metrics["resets"]) == 1.0
    assert not (new.params["q"] * (1.0 - net.parameter_mask)).any(), "the padding stays 0"


def test_fresh_weights_have_the_range_of_initial_ones() -> None:
    algorithm = make_on_images("bbf", **SMALL, shrink_factor=0.0)
    state = algorithm.init_state(0)
    drawn, _ = algorithm.reset_step(state, {}, KEY)
    net = algorithm.nets["q"]
    first, again = (net.named(x.params["q"]) for x in (state, drawn))
    for name, value in first.items():
        if not value.any():
            assert not again[name].any(), name
        elif value.numel() > 100:
            assert float(again[name].std()) == pytest.approx(float(value.std()), rel=0.25), name
            assert float(again[name].abs().max()) == pytest.approx(float(value.abs().max()), rel=0.1), name


def test_nothing_is_reset_near_the_end_of_training() -> None:
    algorithm = make_algorithm("bbf", reset_until=0.8)
    state = algorithm.init_state(0)._replace(progress=torch.tensor(0.81))
    after, aux = algorithm.reset_step(state, {}, KEY)
    assert_same_bits(after, state)
    assert float(aux.metrics["resets"]) == 0.0


def test_resets_come_every_so_many_environment_steps(tmp_path: Path) -> None:
    algorithm = make_algorithm("bbf", reset_every=100)  # two environments
    assert [(phase.name, phase.every, phase.learns) for phase in algorithm.phases()] == [
        ("update", 1, True), ("reset", 50, False)
    ]  # fmt: skip
    assert [phase.name for phase in make_algorithm("bbf", reset_every=0).phases()] == ["update"]
    config = config_for("bbf", tmp_path, algo_kwargs={"reset_every": 60, "reset_until": 0.8, "gradient_steps": 1})
    trainer = Trainer(config)
    trainer.run()
    state = trainer.loop.learner.train
    assert int(state.extra["cycle"]) == 160 - 120, "resets at steps 60 and 120"
    assert int(state.step) > 100, "a reset is no update and does not set back the count of updates"


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"noisy": True}, "the network of bbf has no noisy layers: set noisy to false"),
        ({"layer_norm": True}, "the network of bbf has no layer norm layers: set layer_norm to false"),
        ({"n_step": 5, "n_step_start": 4}, "n_step_start = 4 must be at least n_step = 5"),
        ({"gamma": 1.0}, "gamma = 1 has no horizon that could grow: it must be below 1"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_algorithm("bbf", **fields)


def test_intensity_scales_each_image_by_at_most_a_tenth() -> None:
    images = pictures(500, 2, 3, 3)
    scaled = scale_intensity(images, KEY)
    factor = (1.0 + 0.05 * rng.normal(KEY, (500,)).clamp(-2.0, 2.0)).view(-1, 1, 1, 1)
    torch.testing.assert_close(scaled, images.float() * factor)
    assert pytest.approx(float(factor.min())) == 0.9
    assert pytest.approx(float(factor.max())) == 1.1
