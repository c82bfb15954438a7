"""DrQ-v2 against the same update written plainly with autograd and torch.optim, and the encoder that actor and critics
of sac and td3 can share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import (
    IMAGE,
    assert_near,
    assert_same_bits,
    clone,
    image_batch,
    make_algorithm,
    make_on_images,
    modules_of,
    pictures,
)

from rl_training import make_config
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.images import shift_images
from rl_training.ops.tree import tree_map, tree_stack
from rl_training.spec import ArraySpec

KEY = rng.key_from_seed(2)
SHARED: dict[str, Any] = {"augment": "shift", "shared_encoder": "drq", "feature_dim": 8, "hidden_sizes": [16, 16]}


def at(state: Any, progress: float) -> Any:
    return state._replace(progress=torch.tensor(progress))


def clipped_noise(deviation: float, key: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return (deviation * rng.normal(key, tuple(shape))).clamp(-0.3, 0.3)


def test_update_equals_plain_autograd() -> None:
    """Encoder and critics by the critics' loss, the actor by its own on detached features, one slow copy."""
    rate, tau = 1e-3, 0.1
    algorithm = make_on_images("drq_v2", **SHARED, learning_rate=rate, tau=tau, augment_pad=2)
    state = algorithm.init_state(0)
    assert set(state.params) == {"encoder", "actor", "critic"}
    assert set(state.target) == {"critic"}
    m = modules_of(algorithm, state)
    adams = {n: torch.optim.Adam(m[n].parameters(), lr=rate) for n in ("encoder", "actor", "critic")}
    for i, deviation in enumerate((1.0, 0.55, 0.1)):
        batch, key = image_batch(algorithm, seed=i), rng.fold(KEY, i)
        weights, shift = batch["weights"], rng.fold(key, 11)
        obs = shift_images(batch["obs"], rng.fold(shift, 0), 2)
        next_obs = shift_images(batch["next_obs"], rng.fold(shift, 1), 2)
        with torch.no_grad():
            next_features = m["encoder"](next_obs)
            mean = m["actor"](next_features).tanh()
            next_action = (mean + clipped_noise(deviation, rng.fold(key, 0), mean.shape)).clamp(-1.0, 1.0)
            next_q = m["slow_critic"](next_features, next_action).min(0).values
            goal = batch["rewards"] + batch["discounts"] * next_q
        features = m["encoder"](obs)
        critic_loss = (weights * ((m["critic"](features, batch["actions"]) - goal) ** 2).sum(0)).mean()
        for name in ("encoder", "critic"):
            adams[name].zero_grad()
        critic_loss.backward()
        adams["critic"].step()
        adams["encoder"].step()
        seen = features.detach()
        mean = m["actor"](seen).tanh()
        action = mean + clipped_noise(deviation, rng.fold(key, 1), mean.shape)
        action = action + (action.clamp(-1.0, 1.0) - action).detach()
        adams["actor"].zero_grad()
        actor_loss = -(weights * m["critic"](seen, action).min(0).values).mean()
        actor_loss.backward()
        adams["actor"].step()
        with torch.no_grad():
            for old, new in zip(m["slow_critic"].parameters(), m["critic"].parameters()):
                old.lerp_(new, tau)
        state, aux = algorithm.train_step(at(state, 0.1 * i), batch, key)
        assert float(aux.metrics["critic_loss"]) == pytest.approx(float(critic_loss.detach()), rel=1e-4)
        assert float(aux.metrics["actor_loss"]) == pytest.approx(float(actor_loss.detach()), rel=1e-4)
        for n, net in algorithm.nets.items():
            torch.testing.assert_close(net.flatten(m[n]), state.params[n], rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(
            algorithm.nets["critic"].flatten(m["slow_critic"]), state.target["critic"], rtol=1e-3, atol=2e-5
        )


def test_gradient_norm_is_that_of_encoder_and_critics_together() -> None:
    algorithm = make_on_images("drq_v2", **{**SHARED, "augment": "none"}, learning_rate=0.5, optimizer="sgd")
    state, batch = algorithm.init_state(0), image_batch(algorithm)
    new, aux = algorithm.train_step(state, batch, KEY)
    steps = [(state.params[n] - new.params[n]) / 0.5 for n in ("encoder", "critic")]
    assert float(aux.metrics["grad_norm"]) == pytest.approx(float(torch.cat(steps).norm()), rel=1e-3)


@pytest.mark.parametrize(("progress", "deviation"), [(0.0, 1.0), (0.05, 0.775), (0.1, 0.55), (0.2, 0.1), (0.9, 0.1)])
def test_exploration_falls_from_one_to_a_tenth_and_is_not_clipped_in_acting(progress: float, deviation: float) -> None:
    algorithm = make_algorithm("drq_v2")
    state = at(algorithm.init_state(0), progress)
    obs = torch.zeros(4000, 5)
    clean = algorithm.greedy(state, obs)
    _, action, _ = algorithm.select_action(state, (), obs, KEY, explore=True)
    noise = deviation * rng.normal(KEY, tuple(clean.shape))
    torch.testing.assert_close(action, (clean + noise).clamp(-1.0, 1.0), rtol=1e-5, atol=1e-5)
    assert float((action - clean).abs().max()) > 0.3


def test_noise_of_learning_is_clipped_and_passes_gradients_at_the_bounds() -> None:
    algorithm = make_algorithm("drq_v2", noise_clip=0.25)
    out = torch.tensor([[0.0, 4.0]]).expand(3000, 2).clone().requires_grad_()
    action = algorithm.noisy(out, 1.0, KEY)
    moved = (action - out.tanh()).detach()[:, 0]
    torch.testing.assert_close(moved, rng.normal(KEY, (3000, 2))[:, 0].clamp(-0.25, 0.25), rtol=1e-4, atol=1e-6)
    beyond = out.detach().tanh()[:, 1] + rng.normal(KEY, (3000, 2))[:, 1].clamp(-0.25, 0.25) > 1.0
    assert bool(beyond.any())
    torch.testing.assert_close(action.detach()[beyond, 1], torch.ones(int(beyond.sum())))
    action.sum().backward()
    assert out.grad is not None
    torch.testing.assert_close(out.grad[:, 1], 1.0 - out.detach()[:, 1].tanh() ** 2, rtol=1e-3, atol=1e-6)


def test_settings_are_the_published_ones() -> None:
    hp = make_algorithm("drq_v2").hp.__class__()
    assert (hp.batch_size, hp.buffer_size, hp.n_step, hp.gamma, hp.tau) == (256, 1_000_000, 3, 0.99, 0.01)
    assert (hp.train_freq, hp.gradient_steps, hp.learning_starts) == (2, 1, 2000)
    assert (hp.hidden_sizes, hp.feature_dim, hp.augment_pad, hp.noise_clip) == ((1024, 1024), 50, 4, 0.3)
    assert hp.learning_rate(torch.tensor(0.5)) == 1e-4


def test_runs_on_images_shift_them_and_share_an_encoder(tmp_path: Any) -> None:
    preset = make_config("drq_v2/walker_walk_pixels")
    assert preset.hyper().frame_stack == 3
    algorithm = make_on_images("drq_v2", shared_encoder="drq")
    assert type(algorithm).kind_defaults["images"] == {"augment": "shift", "shared_encoder": "drq"}


# --- the shared encoder in sac and td3 -------------------------------------------------------------------------------

FAMILY = ["drq_v2", "sac", "td3", "tqc", "redq"]


def family(name: str, **fields: Any) -> Any:
    return make_on_images(name, **{**SHARED, **fields})


@pytest.mark.parametrize("name", FAMILY)
def test_only_the_loss_of_the_critics_trains_the_encoder(name: str) -> None:
    """Its step is the same whatever the actor does, and is the gradient of the critics' loss."""
    algorithm = family(name)
    state, batch = algorithm.init_state(0), image_batch(algorithm)
    other = state._replace(params={**state.params, "actor": algorithm.init_state(1).params["actor"]})
    ended = {**batch, "discounts": torch.zeros_like(batch["discounts"])}  # the next action does not count
    one, two = (algorithm.train_step(s, ended, KEY)[0] for s in (state, other))
    assert torch.equal(one.params["encoder"], two.params["encoder"])
    assert not torch.equal(one.params["actor"] - state.params["actor"], two.params["actor"] - other.params["actor"])
    assert not torch.equal(one.params["encoder"], state.params["encoder"])
    assert "encoder" not in state.target


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_encoder_moves_by_the_gradient_of_the_critics_loss(name: str) -> None:
    weight = {"sac": 0.5, "td3": 1.0}[name]
    algorithm = family(name, optimizer="sgd", learning_rate=0.1, augment="none")
    state, batch = algorithm.init_state(0), image_batch(algorithm)
    batch["discounts"] = torch.zeros_like(batch["discounts"])
    m = modules_of(algorithm, state)
    q = m["critic"](m["encoder"](batch["obs"]), batch["actions"])
    (batch["weights"] * weight * ((q - batch["rewards"]) ** 2).sum(0)).mean().backward()
    new, _ = algorithm.train_step(state, batch, KEY)
    for part in ("encoder", "critic"):
        moved = algorithm.nets[part].named((state.params[part] - new.params[part]) / 0.1)
        for key, parameter in m[part].named_parameters():
            torch.testing.assert_close(moved[key], parameter.grad, rtol=2e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", FAMILY)
def test_update_on_images_is_pure_and_equal_under_vmap(name: str) -> None:
    algorithm = family(name)
    states = [algorithm.init_state(seed) for seed in (3, 7)]
    batches = [image_batch(algorithm, seed=seed) for seed in (3, 7)]
    keys = [rng.fold(KEY, seed) for seed in (3, 7)]
    before = clone((states, batches))
    alone = [algorithm.train_step(*given)[0] for given in zip(states, batches, keys)]
    assert_same_bits((states, batches), before)
    assert_same_bits(algorithm.train_step(states[0], batches[0], keys[0])[0], alone[0])

    def step(*given: Any) -> Any:
        return algorithm.train_step(*given)[0]

    together = torch.vmap(step)(tree_stack(states), tree_stack(batches), torch.stack(keys))
    for i, one in enumerate(alone):
        assert_near(tree_map(lambda x, i=i: x[i], together), one, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", FAMILY)
def test_image_of_weight_zero_does_not_contribute(name: str) -> None:
    algorithm = family(name)
    state, batch = algorithm.init_state(0), image_batch(algorithm)
    batch["weights"][2] = 0.0
    garbage = clone(batch)
    for column in ("obs", "next_obs", "rewards", "actions"):
        garbage[column][2] = garbage[column][0]
    assert_same_bits(algorithm.train_step(state, garbage, KEY)[0], algorithm.train_step(state, batch, KEY)[0])
    garbage["weights"][2] = 1.0
    weighted = algorithm.train_step(state, garbage, KEY)[0]
    assert not torch.equal(weighted.params["encoder"], algorithm.train_step(state, batch, KEY)[0].params["encoder"])


@pytest.mark.slow
def test_update_on_images_is_one_graph() -> None:
    algorithm = family("drq_v2")
    state, batch = algorithm.init_state(0), image_batch(algorithm)
    with torch.no_grad():
        graph = torch.compile(algorithm.train_step, fullgraph=True, backend="aot_eager")(state, batch, KEY)[0]
    assert_near(graph, algorithm.train_step(state, batch, KEY)[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", FAMILY)
def test_acting_and_values_read_the_encoder(name: str) -> None:
    algorithm = family(name)
    state, obs = algorithm.init_state(0), pictures(5, *IMAGE.shape)
    features = algorithm.nets["encoder"](state.params["encoder"], obs)
    out = algorithm.nets["actor"](state.params["actor"], features)
    greedy = torch.tanh(out[:, :2])  # of a Gaussian, the mean comes first
    torch.testing.assert_close(algorithm.greedy(state, obs), greedy)
    value = algorithm.critic.value(state.params["critic"], state.extra, features, greedy)
    torch.testing.assert_close(algorithm.value(state, obs), value)


@pytest.mark.parametrize("kind", ["nature", "impala"])
def test_other_convolutions_and_vectors_beside_images(kind: str) -> None:
    mixed = {"image": IMAGE, "vector": ArraySpec((4,))}
    algorithm = make_on_images("td3", mixed, shared_encoder=kind, feature_dim=8)
    state = algorithm.init_state(0)
    obs = {"image": pictures(5, *IMAGE.shape), "vector": torch.randn(5, 4)}
    batch = {**image_batch(algorithm, size=5), "obs": obs, "next_obs": tree_map(lambda x: x.flip(0), obs)}
    new, _ = algorithm.train_step(state, batch, KEY)
    assert not torch.equal(new.params["encoder"], state.params["encoder"])
    assert algorithm.greedy(state, obs).shape == (5, 2)
    other = algorithm.greedy(state, {**obs, "vector": 1.0 + obs["vector"]})
    assert not torch.equal(algorithm.greedy(state, obs), other)


def test_weights_start_orthogonal() -> None:
    algorithm = make_on_images("drq_v2", **SHARED)
    conv = algorithm.modules["encoder"].convs[2].weight.flatten(1)  # [32, 288]
    torch.testing.assert_close(conv @ conv.T, 2.0 * torch.eye(32), rtol=1e-4, atol=1e-4)
    hidden = algorithm.modules["critic"].hidden[2].weight  # [2, 16, 16]
    torch.testing.assert_close(hidden.mT @ hidden, torch.eye(16).expand(2, 16, 16), rtol=1e-4, atol=1e-4)
    last = algorithm.modules["critic"].head.weight.flatten(1)  # [2, 16]
    torch.testing.assert_close(last.norm(dim=-1), torch.ones(2), rtol=1e-4, atol=1e-4)
    head = algorithm.modules["actor"].head.weight
    torch.testing.assert_close(head @ head.T, torch.eye(2), rtol=1e-4, atol=1e-4)
    assert not any(p.any() for n, p in algorithm.modules["critic"].named_parameters() if n.endswith("bias"))


def test_drq_encoder_reads_pixels_around_zero() -> None:
    algorithm = make_on_images("drq_v2", **SHARED)
    encoder, seen = algorithm.modules["encoder"], []
    encoder.convs[0].register_forward_hook(lambda _, given, __: seen.append(given[0]))
    encoder(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, *IMAGE.shape))
    assert seen[0][0].unique().tolist() == [-0.5]
    assert seen[0][1].unique().tolist() == [0.5]
    assert math.prod(encoder(pictures(1, *IMAGE.shape)).shape) == 32 * 1 * 1  # 15 -> 7 -> 5 -> 3 -> 1


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("sac", {"critic": "renorm"}, "sac: shared_encoder cannot be combined with critics of kind renorm"),
        ("crossq", {}, "crossq: shared_encoder cannot be combined with critics of kind renorm"),
        ("td3", {"critic": "conservative"}, "td3: shared_encoder cannot be combined with critics of kind conservative"),
    ],
)
def test_critics_that_cannot_share_are_refused(name: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        family(name, **fields)


def test_encoder_needs_images_of_a_size() -> None:
    with pytest.raises(UserError, match="sac: shared_encoder: drq needs image observations; Pictures-v0 has none"):
        make_on_images("sac", ArraySpec((5,)), shared_encoder="drq")
    with pytest.raises(UserError, match="at least 15 x 15 pixels, not 14 x 20"):
        make_on_images("sac", ArraySpec((3, 14, 20), "uint8"), shared_encoder="drq")
