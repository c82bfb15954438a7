"""The world model's networks: block-diagonal layers, images, and sequences with resets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_training.errors import UserError
from rl_training.models.rssm import SIZES, BlockLinear, Latents, Sizes, UpsampleConv, WorldModel, head
from rl_training.ops.tree import tree_map
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

T, B, A = 7, 3, 2
TINY = SIZES["tiny"]


def spec(observation: Any) -> EnvSpec:
    return EnvSpec("Test-v0", observation, ActionSpec("discrete", (A,)))


def world(observation: Any = ArraySpec((5,)), sizes: Sizes = TINY) -> WorldModel:  # noqa: B008
    torch.manual_seed(0)
    return WorldModel(spec(observation), A, sizes, 0.01).requires_grad_(False)


def zeros(batch: int) -> Latents:
    return Latents(torch.zeros(batch, TINY.deter), torch.zeros(batch, TINY.stoch * TINY.classes))


def inputs() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    return (torch.randn(T, B, 5, generator=g), torch.randn(T, B, A, generator=g),
            torch.rand(T, B, TINY.stoch, generator=g))  # fmt: skip


def test_block_linear_equals_a_block_diagonal_matrix() -> None:
    torch.manual_seed(0)
    layer, x = BlockLinear(12, 8, 4), torch.randn(5, 2, 12)
    matrix = torch.block_diag(*layer.weight)
    torch.testing.assert_close(layer(x), x @ matrix + layer.bias)


def test_sequence_with_resets_equals_separate_sequences() -> None:
    model, (obs, actions, u) = world(), inputs()
    keep = torch.ones(T, B)
    keep[3, 1] = keep[0, 0] = keep[5, 2] = 0.0
    g = torch.Generator().manual_seed(2)
    start = Latents(torch.randn(B, TINY.deter, generator=g), torch.randn(B, TINY.stoch * TINY.classes, generator=g))
    whole = model.observe(obs, actions, keep, start, u)

    def part(row: int, times: slice, before: Latents, first_action: bool) -> Any:
        acts = actions[times, row : row + 1].clone()
        acts[0] *= first_action
        ones = torch.ones(acts.shape[:2])
        return model.observe(obs[times, row : row + 1], acts, ones, before, u[times, row : row + 1])

    def of(row: int, times: slice) -> Any:
        return tree_map(lambda x: x[times, row : row + 1], whole)

    own = [tree_map(lambda x, b=b: x[b : b + 1], start) for b in range(B)]
    pieces = [
        (0, slice(0, T), zeros(1), False),  # starts an episode: the state before it is dropped
        (1, slice(0, 3), own[1], True), (1, slice(3, T), zeros(1), False),
        (2, slice(0, 5), own[2], True), (2, slice(5, T), zeros(1), False),
    ]  # fmt: skip
    for row, times, before, acted in pieces:
        torch.testing.assert_close(part(row, times, before, acted), of(row, times))


def test_observing_step_by_step_equals_the_whole_sequence() -> None:
    model, (obs, actions, u) = world(), inputs()
    whole, latents = model.observe(obs, actions, torch.ones(T, B), zeros(B), u), zeros(B)
    for t in range(T):
        seen = model.observe(obs[t : t + 1], actions[t : t + 1], torch.ones(1, B), latents, u[t : t + 1])
        latents = tree_map(lambda x: x[0], seen.latents)
        torch.testing.assert_close(latents, tree_map(lambda x, t=t: x[t], whole.latents))


def test_imagined_step_samples_from_the_prior() -> None:
    """The same cell as in `observe`; the sample is from the prior, not the posterior."""
    model, (obs, actions, u) = world(), inputs()
    seen = model.observe(obs, actions, torch.ones(T, B), zeros(B), u)
    before = tree_map(lambda x: x[:-1], seen.latents)
    ahead = model.imagine(before, actions[1:], u[1:])
    torch.testing.assert_close(ahead.deter, seen.latents.deter[1:])
    prior = model.prior(ahead.deter)
    assert prior.shape == (T - 1, B, TINY.stoch, TINY.classes)
    torch.testing.assert_close(prior.exp().sum(-1), torch.ones(T - 1, B, TINY.stoch))
    codes = ahead.stoch.unflatten(-1, (TINY.stoch, TINY.classes)).argmax(-1)
    expected = (u[1:].unsqueeze(-1) >= prior.exp().cumsum(-1)[..., :-1]).sum(-1)
    assert torch.equal(codes, expected)


def test_gru_gates_match_the_formula() -> None:
    """deter' = u tanh(r c) + (1 - u) deter with u = sigmoid(x - 1), block by block."""
    rssm, g = world().rssm, torch.Generator().manual_seed(3)
    deter, stoch = torch.randn(B, TINY.deter, generator=g), torch.randn(B, TINY.stoch * TINY.classes, generator=g)
    action = torch.randn(B, A, generator=g)
    parts = [rssm.from_deter(deter), rssm.from_stoch(stoch), rssm.from_action(action)]
    weight = torch.cat([rssm.join_state.weight, rssm.join_action.weight], -1)  # one layer on all three inputs
    blocks = rssm.join_blocks
    joined = torch.cat(parts, -1) @ weight.T + deter @ torch.block_diag(*blocks.weight) + blocks.bias
    hidden = torch.nn.functional.silu(joined / (joined.square().mean(-1, keepdim=True) + 1e-4).sqrt() * rssm.norm.scale)
    width = TINY.deter // TINY.blocks
    for block in range(TINY.blocks):
        here = slice(block * width, (block + 1) * width)
        bias = rssm.gates.bias[3 * block * width : 3 * (block + 1) * width]
        gates = hidden[:, here] @ rssm.gates.weight[block] + bias
        reset, candidate, update = gates.chunk(3, -1)
        share = torch.sigmoid(update - 1.0)
        expected = share * torch.tanh(torch.sigmoid(reset) * candidate) + (1.0 - share) * deter[:, here]
        torch.testing.assert_close(rssm.advance(deter, stoch, rssm.action_term(action))[:, here], expected)


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 84, 84), (4, 8, 13), (3, 64, 64)])
def test_decoded_images_keep_their_shape(shape: tuple[int, ...]) -> None:
    model = world(ArraySpec(shape, "uint8"))
    images = torch.randint(0, 256, (2, 1, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    u = torch.full((2, 1, TINY.stoch), 0.5)
    seen = model.observe(images, torch.zeros(2, 1, A), torch.ones(2, 1), zeros(1), u)
    decoded = model.observation(seen.latents)
    assert decoded.shape == images.shape
    assert 0.0 <= float(decoded.min()) <= float(decoded.max()) <= 255.0
    errors = ((decoded - images.float()) / 255.0).square().flatten(-3).sum(-1)
    torch.testing.assert_close(model.reconstruction(images, seen.latents), errors)


def test_doubling_equals_upsampling_and_convolution() -> None:
    torch.manual_seed(0)
    layer, x = UpsampleConv(3, 4), torch.randn(2, 3, 5, 7)
    layer.conv.bias.data.normal_()  # type: ignore[union-attr]
    twice = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
    torch.testing.assert_close(layer(x), layer.conv(twice), rtol=1e-5, atol=1e-5)
    seeds = torch.stack([layer.conv.weight, 2.0 * layer.conv.weight])
    bias = torch.stack([layer.conv.bias, layer.conv.bias])  # type: ignore[list-item]

    def call(weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return torch.func.functional_call(layer, {"conv.weight": weight, "conv.bias": bias}, (x,))

    both = torch.vmap(call)(seeds, bias)
    torch.testing.assert_close(both[0], layer(x))
    torch.testing.assert_close(both[1], call(seeds[1], bias[1]))


def test_untrained_encoder_tells_mostly_black_images_apart() -> None:
    """The background must not hide the differences between images: otherwise the latents would not encode them for
    hundreds of updates."""
    model = world(ArraySpec((3, 14, 14), "uint8"), SIZES["200k"])
    images = torch.zeros(8, 1, 3, 14, 14, dtype=torch.uint8)
    for i in range(1, 8):
        images[i, 0, 0, :4, 2 * i - 2 : 2 * i] = 255
    seen = model.inputs(images, torch.zeros(8, 1, A), torch.ones(8, 1)).obs_term[:, 0]
    assert float(seen[1:].std(0).mean()) > 0.15 * float(seen[1:].square().mean().sqrt())


def test_images_and_vectors_together() -> None:
    model = world({"camera": ArraySpec((3, 16, 16), "uint8"), "joints": ArraySpec((4,)), "speed": ArraySpec((2,))})
    obs = {"camera": torch.zeros(1, B, 3, 16, 16, dtype=torch.uint8), "joints": torch.randn(1, B, 4),
           "speed": torch.randn(1, B, 2)}  # fmt: skip
    u = torch.full((1, B, TINY.stoch), 0.5)
    seen = model.observe(obs, torch.zeros(1, B, A), torch.ones(1, B), zeros(B), u)
    decoded = model.observation(seen.latents)
    assert {k: x.shape for k, x in decoded.items()} == {k: x.shape for k, x in obs.items()}
    other = model.observe({**obs, "speed": obs["speed"] + 5.0}, torch.zeros(1, B, A), torch.ones(1, B), zeros(B), u)
    assert not torch.equal(other.posterior, seen.posterior)


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (ArraySpec((4, 4)), "vectors or uint8 images"),
        (ArraySpec((3, 16, 16)), "vectors or uint8 images"),
        (ArraySpec((3, 6, 20), "uint8"), "at least 8x8"),
    ],
)
def test_observations_other_than_images_and_vectors_are_rejected(observation: ArraySpec, words: str) -> None:
    with pytest.raises(UserError, match=words):
        world(observation)


def test_zero_scale_head_is_zero_and_sizes_match_their_names() -> None:
    assert not head(8, 4, 1, 3, scale=0.0)[-1].weight.any()
    for name, millions in {"12m": 12, "25m": 25, "50m": 50, "100m": 100, "200m": 200}.items():
        sizes = SIZES[name]
        with torch.device("meta"):
            features = sizes.deter + sizes.stoch * sizes.classes
            parts = [WorldModel(spec(ArraySpec((3, 64, 64), "uint8")), 18, sizes, 0.01),
                     head(features, sizes.units, 3, 18), head(features, sizes.units, 3, sizes.bins)]  # fmt: skip
        total = sum(p.numel() for part in parts for p in part.parameters())
        assert 0.8 * millions < total / 1e6 < 1.25 * millions, (name, total)


def test_initial_weights_are_those_of_the_published_code() -> None:
    """dreamerv3, embodied/jax/nets.py: truncated normal, 1 / sqrt(fan-in); the fan-in of a block-diagonal matrix counts
    the blocks. At 12m: deter 2048, units 256, 8 blocks, and a decoder that starts at 4 x 4 with 64 channels."""
    model = world(ArraySpec((3, 64, 64), "uint8"), SIZES["12m"])
    rssm, image = model.rssm, model.decoder.images["obs"]
    join = 1.0 / math.sqrt(8 * (2048 // 8 + 3 * 256))
    assert join == pytest.approx(0.0110, abs=1e-4)
    expected = {
        "gates": (rssm.gates.weight, 0.0221), "join_blocks": (rssm.join_blocks.weight, join),
        "join_state": (rssm.join_state.weight, join), "join_action": (rssm.join_action.weight, join),
        "decoder input": (image.from_deter.weight, 0.0221),
        "decoder, from stoch": (image.from_stoch[-1].weight, 512**-0.5),
        "posterior, from tokens": (rssm.see_tokens.weight, (2048 + 1024) ** -0.5),
        "first convolution": (model.encoder.images["obs"].convs[0].weight, 75**-0.5),
    }  # fmt: skip
    for name, (weight, std) in expected.items():
        assert float(weight.std()) == pytest.approx(std, rel=0.03), name
        assert float(weight.abs().max()) <= 2.0 * std / 0.8796 + 1e-6, name


def test_images_are_shifted_to_have_their_middle_at_zero() -> None:
    encoder = world(ArraySpec((3, 64, 64), "uint8")).encoder.images["obs"]
    seen = []
    encoder.convs[0].register_forward_hook(lambda _, args, __: seen.append(args[0]))
    encoder(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 64, 64))
    assert seen[0][0].unique().tolist() == [-0.5]
    assert seen[0][1].unique().tolist() == [0.5]
