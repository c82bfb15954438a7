"""Encoding of observations and actions as arrays, and back."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from rl_training.envs import ActionDecoder, ArraySpec, EnvSpec, ObsEncoder, make_spec
from rl_training.envs.spaces import use_fast_contains
from rl_training.errors import UserError

IMAGE = spaces.Box(0, 255, (6, 5, 3), np.uint8)
CHANNELS_FIRST = spaces.Box(0, 255, (4, 8, 8), np.uint8)
NESTED = spaces.Dict(
    {"a": spaces.Discrete(3, start=-1), "b": spaces.Tuple((spaces.Box(-1, 1, (2, 2)), spaces.MultiBinary(2)))}
)
OBSERVATIONS = [
    (spaces.Box(-1, 1, (3,)), ArraySpec((3,))),
    (spaces.Box(-1, 1, (2, 3), np.float64), ArraySpec((6,))),
    (spaces.Box(0, 9, (), np.int64), ArraySpec((1,))),
    (spaces.Box(0, 255, (128,), np.uint8), ArraySpec((128,))),
    (spaces.Discrete(4, start=2), ArraySpec((4,))),
    (spaces.MultiDiscrete([2, 3]), ArraySpec((5,))),
    (spaces.MultiDiscrete([[2, 3], [4, 2]]), ArraySpec((11,))),
    (spaces.MultiBinary(3), ArraySpec((3,))),
    (IMAGE, ArraySpec((3, 6, 5), "uint8")),
    (CHANNELS_FIRST, ArraySpec((4, 8, 8), "uint8")),
    (NESTED, ArraySpec((9,))),
    (spaces.Dict({"cam": IMAGE}), ArraySpec((3, 6, 5), "uint8")),
    (
        spaces.Dict({"cam": IMAGE, "x": spaces.Discrete(2), "y": spaces.Box(-1, 1, (2,))}),
        {"cam": ArraySpec((3, 6, 5), "uint8"), "vector": ArraySpec((4,))},
    ),
]


@pytest.mark.parametrize(("space", "expected"), OBSERVATIONS, ids=lambda x: str(x)[:40])
def test_encode_batch_equals_encode_one_by_one(space, expected):
    encoder = ObsEncoder(space)
    assert encoder.spec == expected
    space.seed(0)
    samples = [space.sample() for _ in range(5)]
    batch = concatenate(space, samples, create_empty_array(space, 5))
    encoded = encoder.encode_batch(batch)
    rows, whole = encoder.empty(5), encoder.empty(5)
    encoder.write_rows(samples, whole)
    for i, sample in enumerate(samples):
        encoder.write(sample, rows, i)
        one = encoder.encode(sample)
        for k in encoded if isinstance(encoded, dict) else [None]:
            a, b, c, d = (x[k] if k else x for x in (encoded, one, rows, whole))
            np.testing.assert_array_equal(a[i], b)
            np.testing.assert_array_equal(c[i], b)
            np.testing.assert_array_equal(d[i], b)
            assert a.dtype == b.dtype == (expected[k] if k else expected).dtype
            assert b.shape == (expected[k] if k else expected).shape


def test_encoded_values_match_hand_computed_ones():
    np.testing.assert_array_equal(ObsEncoder(spaces.Discrete(4, start=2)).encode(3), [0, 1, 0, 0])
    np.testing.assert_array_equal(ObsEncoder(spaces.MultiDiscrete([2, 3])).encode([1, 2]), [0, 1, 0, 0, 1])
    obs = {"a": 1, "b": (np.array([[1, 2], [3, 4]], np.float32) / 4, np.array([0, 1], np.int8))}
    np.testing.assert_array_equal(ObsEncoder(NESTED).encode(obs), [0, 0, 1, 0.25, 0.5, 0.75, 1, 0, 1])
    image = np.arange(90, dtype=np.uint8).reshape(6, 5, 3)
    np.testing.assert_array_equal(ObsEncoder(IMAGE).encode(image), image.transpose(2, 0, 1))


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict({"x": spaces.Sequence(spaces.Discrete(2))})])
def test_unsupported_observation_space_is_rejected(space):
    with pytest.raises(UserError, match=r"MyEnv-v0: Observation space (Text|Sequence)"):
        make_spec("MyEnv-v0", space, spaces.Discrete(2), None)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (0,)), spaces.Dict(), spaces.Tuple(())])
def test_an_empty_observation_space_is_refused(space):
    with pytest.raises(UserError, match=r"MyEnv-v0: Observation space .* contains nothing to learn from"):
        make_spec("MyEnv-v0", space, spaces.Discrete(2), None)


def test_unsupported_action_space_is_rejected():
    with pytest.raises(UserError, match="Action space Tuple"):
        make_spec("MyEnv-v0", spaces.Discrete(2), spaces.Tuple((spaces.Discrete(2),)), None)


@pytest.mark.parametrize("obs", [np.zeros(1), np.zeros((2, 3)), 0.0, np.zeros(4)])
def test_wrong_shape_never_broadcasts(obs):
    encoder = ObsEncoder(spaces.Box(-1, 1, (3,)))
    with pytest.raises(ValueError, match="observation has shape"):
        encoder.encode(obs)
    with pytest.raises(ValueError, match="shape"):
        encoder.write_rows([obs, obs], encoder.empty(2))
    with pytest.raises(ValueError, match="shape"):
        encoder.write_rows([np.zeros(3), obs], encoder.empty(2))


ACTIONS = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 3, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 2]]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2,)),
    spaces.Box(np.array([-2.0, 0.0, 3.0]), np.array([2.0, 0.5, 9.0]), dtype=np.float64),
    spaces.Box(-0.4, 0.4, (2, 2), np.float32),
    spaces.Box(-np.inf, np.inf, (2,)),
    spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32)),
    spaces.Box(0, 10, (2,), np.int32),
]


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_action_round_trip(space):
    spec = make_spec("E", spaces.Discrete(2), space, None)
    decoder = ActionDecoder(spec.action, space)
    space.seed(1)
    given = np.stack([space.sample() for _ in range(20)])
    encoded = decoder.encode(given)
    assert encoded.shape == (20, *decoder.row_shape)
    assert encoded.dtype == decoder.dtype
    decoded = decoder.decode(encoded)
    np.testing.assert_allclose(decoded, given, rtol=1e-6, atol=1e-6)
    for i in range(20):
        assert space.contains(decoded[i])


def test_bounded_box_is_clipped_and_rescaled():
    space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
    decoder = ActionDecoder(make_spec("E", spaces.Discrete(2), space, None).action, space)
    np.testing.assert_array_equal(
        decoder.decode(np.array([[0, 0], [1, -1], [7, -7], [-0.5, 0.5]], np.float32)),
        np.array([[0, 0.5], [2, 0], [2, 0], [-1, 0.75]], np.float32),
    )
    half_open = ACTIONS[9]
    decoder = ActionDecoder(make_spec("E", spaces.Discrete(2), half_open, None).action, half_open)
    np.testing.assert_array_equal(decoder.decode(np.array([[-3, 9]], np.float32)), [[0, 1]])


def test_spec_survives_json():
    for space, _ in OBSERVATIONS:
        for action in ACTIONS:
            spec = make_spec("E-v0", space, action, 7)
            assert EnvSpec.from_json(spec.to_json()) == spec


def test_spec_of_a_registered_env():
    env = gym.make("Pendulum-v1")
    spec = make_spec("Pendulum-v1", env.observation_space, env.action_space, 200)
    assert (spec.obs_dim, spec.action.dim, spec.action.bounded, spec.action.high) == (3, 1, True, (2.0,))


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Discrete(4, start=-2)])
def test_fast_contains_gives_the_same_answers(space: spaces.Discrete) -> None:
    asked = copy.deepcopy(space)
    use_fast_contains(space)
    assert isinstance(space, spaces.Discrete)
    assert (space, repr(space)) == (asked, repr(asked))
    numbers = range(-4, 6)
    given = [kind(i) for i in numbers for kind in (np.int64, np.int32, int, float, np.float64, np.asarray, str)]
    given += [np.uint8(1), True, np.bool_(True), None, np.zeros(1, np.int64), np.iinfo(np.int64).max]
    for x in given:
        answer = space.contains(x)
        assert type(answer) is bool
        assert answer == asked.contains(x), repr(x)
    assert np.int64(1) in space
    assert space.sample() in asked
