"""Random shifts of images: the pixels that come out, and that updates learn from them while acting does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import IMAGE, assert_near, assert_same_bits, image_batch, is_quick, make_on_images, pictures, slow_unless

from rl_training import registry
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.images import shift_images
from rl_training.spec import ArraySpec

KEY = rng.key_from_seed(5)
PAD = 4
AUGMENTED = sorted(n for n, e in registry.entries().items() if "augment" in e.load().Hyper.model_fields)
AUGMENTED.remove("bbf")  # it learns from more observations: tests/test_algorithms_bbf.py
AUGMENTED.remove("dac")  # it takes vectors only


def padded_and_cropped(images: torch.Tensor, moved: torch.Tensor, pad: int) -> torch.Tensor:
    """By its definition, one image after the other: repeat the edge `pad` times, then cut out a window."""
    height, width = images.shape[-2:]
    out = []
    for image, (down, right) in zip(images, (moved + pad).tolist()):
        edge = torch.nn.functional.pad(image.float(), (pad, pad, pad, pad), mode="replicate")
        out.append(edge[..., down : down + height, right : right + width].to(image.dtype))
    return torch.stack(out)


def drawn(rows: int, pad: int) -> torch.Tensor:
    return rng.randint(KEY, (rows, 2), 2 * pad + 1) - pad


@pytest.mark.parametrize(("shape", "pad"), [((3, 10, 10), 4), ((1, 6, 11), 2), ((9, 20, 20), 1), ((2, 5, 4), 4)])
def test_shift_is_an_explicit_pad_and_crop_of_each_sample(shape: tuple[int, ...], pad: int) -> None:
    images = pictures(64, *shape)
    shifted = shift_images(images, KEY, pad)
    assert shifted.dtype == torch.uint8
    assert torch.equal(shifted, padded_and_cropped(images, drawn(64, pad), pad))
    assert not torch.equal(shifted, images)


def test_shift_equals_the_bilinear_interpolation_of_drq_v2() -> None:
    """A grid sample of the padded image at a whole number of pixels: nothing is left to interpolate."""
    size, rows = 12, 16
    images, moved = pictures(rows, 3, size, size).float(), drawn(rows, PAD)
    edge = torch.nn.functional.pad(images, (PAD,) * 4, mode="replicate")
    whole = size + 2 * PAD
    centres = (2 * torch.arange(size, dtype=torch.float32) + 1) / whole - 1  # of the first pixels, in [-1, 1]
    step = 2.0 / whole * (moved + PAD).float()
    grid = torch.stack(
        [
            (centres + step[:, 1:]).unsqueeze(1).expand(rows, size, size),  # x first
            (centres + step[:, :1]).unsqueeze(2).expand(rows, size, size),
        ],
        -1,
    )
    sampled = torch.nn.functional.grid_sample(edge, grid, mode="bilinear", align_corners=False)
    torch.testing.assert_close(shift_images(images, KEY, PAD), sampled, rtol=1e-4, atol=5e-3)


def test_every_shift_is_equally_likely() -> None:
    """A single bright pixel in the middle: where it goes to is the shift. 81 places, 40 500 draws: 500 each."""
    dot = torch.zeros(40_500, 1, 9, 9, dtype=torch.uint8)
    dot[:, :, 4, 4] = 255
    counts = (shift_images(dot, KEY, PAD) > 0).sum((0, 1))
    assert int(counts.sum()) == 40_500
    chi_squared = float(((counts - 500.0) ** 2 / 500.0).sum())
    assert chi_squared < 124.0, "80 degrees of freedom: 0.1 % of draws are above"


def test_images_of_a_row_move_alike_and_keys_decide() -> None:
    images = pictures(5, 1, 3, 8, 8).expand(5, 6, 3, 8, 8)  # a sequence of six equal images in each row
    shifted = shift_images(images, KEY, PAD)
    assert torch.equal(shifted, shifted[:, :1].expand(shifted.shape))
    assert torch.equal(shifted, shift_images(images, KEY, PAD))
    assert not torch.equal(shifted, shift_images(images, rng.fold(KEY, 1), PAD))


def test_shift_is_the_same_under_vmap_and_compiled() -> None:
    images, keys = pictures(3, 7, 2, 10, 10), torch.stack([rng.fold(KEY, i) for i in range(3)])
    one_by_one = torch.stack([shift_images(x, key, PAD) for x, key in zip(images, keys)])
    assert torch.equal(torch.vmap(lambda x, key: shift_images(x, key, PAD))(images, keys), one_by_one)
    compiled = torch.compile(shift_images, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(images[0], keys[0], PAD), one_by_one[0])


# --- in an update ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_unless(is_quick, AUGMENTED))
def test_update_learns_from_shifted_images(name: str) -> None:
    """It is the plain update on a batch whose images were shifted by hand, each side with its own draw."""
    algorithm, plain = make_on_images(name, augment="shift", augment_pad=2), make_on_images(name)
    state, batch = algorithm.init_state(0), image_batch(algorithm)
    key = rng.fold(KEY, 11)
    by_hand = {
        **batch,
        "obs": shift_images(batch["obs"], rng.fold(key, 0), 2),
        "next_obs": shift_images(batch["next_obs"], rng.fold(key, 1), 2),
    }
    before = {k: v.clone() for k, v in batch.items()}
    updated = algorithm.train_step(state, batch, KEY)
    assert_same_bits(batch, before)
    assert_same_bits(updated, plain.train_step(state, by_hand, KEY))
    unchanged, _ = plain.train_step(state, batch, KEY)
    assert any(not torch.equal(x, updated[0].params[n]) for n, x in unchanged.params.items())


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_seeds_of_a_study_shift_on_their_own(name: str) -> None:
    algorithm = make_on_images(name, augment="shift")
    batch, keys = image_batch(algorithm), [rng.fold(KEY, i) for i in range(2)]
    states = [algorithm.init_state(i) for i in range(2)]
    alone = [algorithm.train_step(state, batch, key)[0] for state, key in zip(states, keys)]

    def stacked(trees: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *trees)

    def step(state: Any, key: torch.Tensor) -> Any:
        return algorithm.train_step(state, batch, key)[0]

    assert_near(torch.vmap(step)(stacked(states), torch.stack(keys)), stacked(alone), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_acting_sees_the_images_as_they_are(name: str) -> None:
    algorithm, plain = make_on_images(name, augment="shift"), make_on_images(name)
    state, obs = plain.init_state(0), pictures(6, *IMAGE.shape)
    _, action, _ = algorithm.select_action(state, (), obs, KEY, explore=False)
    assert torch.equal(action, plain.select_action(state, (), obs, KEY, explore=False)[1])
    assert torch.equal(algorithm.value(state, obs), plain.value(state, obs))


def test_only_the_images_of_a_mixed_observation_are_shifted() -> None:
    mixed = {"image": IMAGE, "other": IMAGE, "vector": ArraySpec((3,))}
    algorithm = make_on_images("sac", mixed, augment="shift")
    obs = {"image": pictures(6, *IMAGE.shape), "other": pictures(6, *IMAGE.shape), "vector": torch.randn(6, 3)}
    changed = algorithm.reader.augment.changed(obs, KEY)
    assert torch.equal(changed["vector"], obs["vector"])
    assert not torch.equal(changed["image"], changed["other"]), "each image has its own shift"


@pytest.mark.parametrize("name", ["dqn", "sac", "td3", "discrete_sac"])
def test_vectors_cannot_be_shifted(name: str) -> None:
    words = r"augment: shift needs image observations; Pictures-v0 has Box\(5,\): set it to none"
    with pytest.raises(UserError, match=words):
        make_on_images(name, ArraySpec((5,)), augment="shift")
