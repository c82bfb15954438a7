"""Conversion between Gymnasium spaces and the arrays that networks use: float32 vectors, uint8 images, and actions in
[-1, 1]."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from rl_training.errors import UserError
from rl_training.spec import MASK, ActionSpec, Array, ArraySpec, EnvSpec, GoalSpec

Obs: TypeAlias = "Array | dict[str, Array]"  # encoded: one array, or named arrays if there are images and vectors


class ObservationShapeError(ValueError):
    """An observation does not have the shape of its space. NumPy would silently broadcast some of these."""


def _check_numbers(value: Array, where: str = "") -> None:
    """NumPy would silently drop the imaginary part of a complex number, and read numbers from texts."""
    if value.dtype.kind not in "fiub":
        raise ObservationShapeError(f"observation{where} has the type {value.dtype}; it must hold real numbers")


class _Leaf:
    """One basic space within the observation space, and the position of its encoding."""

    def __init__(self, space: spaces.Space[Any], path: tuple[Any, ...]) -> None:
        self.path = path
        self.image = ""  # name of the output array; empty if part of the vector
        self.channels_last = self.flags = False
        self.offset = 0
        if isinstance(space, spaces.Box):
            self.shape: tuple[int, ...] = tuple(space.shape)
            self.flags = space.dtype == np.bool_  # true is 255 in an image
            if (self.flags or space.dtype == np.uint8) and len(self.shape) == 3:
                self.image = ".".join(map(str, path)) or "image"
                self.image = "vector.image" if self.image == "vector" else self.image
                square = self.shape[0] == self.shape[1] != self.shape[2]  # planes of flags come in any number
                self.channels_last = (self.flags and square) or (
                    self.shape[2] in (1, 3, 4) and self.shape[0] > self.shape[2]
                )
            self.one_hot: Array | None = None
        elif isinstance(space, spaces.Discrete):
            self.shape, self.one_hot = (), np.array([space.n])
            self.start = np.array([space.start])
        elif isinstance(space, spaces.MultiDiscrete):
            self.shape, self.one_hot = tuple(space.shape), space.nvec.reshape(-1)
            self.start = space.start.reshape(-1)
        elif isinstance(space, spaces.MultiBinary):
            self.shape, self.one_hot = tuple(space.shape), None
        else:
            raise UserError(
                f"Observation space {space} is not supported: use Box, Discrete, MultiDiscrete, MultiBinary, "
                "or a Dict or Tuple of these."
            )
        self.size = int(np.prod(self.shape)) if self.one_hot is None else int(self.one_hot.sum())
        self.part = not self.image  # shares its array with others, starting at `offset`
        self.mask = False

    def to_mask(self, offset: int) -> None:
        """Encode this space's values as part of the action mask."""
        self.image, self.mask, self.part, self.offset = MASK, True, True, offset
        self.one_hot, self.size = None, int(np.prod(self.shape))

    @property
    def image_shape(self) -> tuple[int, ...]:
        return (self.shape[2], *self.shape[:2]) if self.channels_last else self.shape

    def fill(self, value: Any, out: Array) -> None:
        """Encode a batch of this space's values into `out`: `[B, C, H, W]` or `[B, size]`."""
        value, where = np.asarray(value), f" {'.'.join(map(str, self.path))}" if self.path else ""
        _check_numbers(value, where)
        if value.shape != (len(out), *self.shape):
            raise ObservationShapeError(f"observation{where} has shape {value.shape[1:]}; its space has {self.shape}")
        if self.mask:
            out[...] = value.reshape(len(out), self.size) != 0
        elif self.image:
            out[...] = value.transpose(0, 3, 1, 2) if self.channels_last else value
            if self.flags:
                out *= 255
        elif self.one_hot is None:
            out[...] = value.reshape(len(out), self.size)
        else:
            index = value.reshape(len(out), -1).astype(np.int64) - self.start
            if ((index < 0) | (index >= self.one_hot)).any():
                low, high = (" ".join(map(str, x)) for x in (self.start, self.start + self.one_hot - 1))
                raise ObservationShapeError(f"observation {value.tolist()} is outside its space, {low} to {high}")
            out[...] = 0.0
            np.put_along_axis(out, index + np.concatenate(([0], np.cumsum(self.one_hot)[:-1])), 1.0, axis=1)


def _leaves(space: spaces.Space[Any], path: tuple[Any, ...] = ()) -> list[_Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in _leaves(sub, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for key, sub in enumerate(space.spaces) for leaf in _leaves(sub, (*path, key))]
    return [] if is_text(space) else [_Leaf(space, path)]


def is_text(space: spaces.Space[Any]) -> bool:
    """Is it a space of texts? Gymnasium has one, and packages define others, such as MiniGrid's missions."""
    return isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind == "U")


def dropped_texts(space: spaces.Space[Any], name: str = "") -> list[str]:
    """Names of the texts in an observation space, which networks do not read."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts: Any = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [found for key, sub in parts for found in dropped_texts(sub, f"{name}.{key}" if name else str(key))]
    return [name or "observation"] if is_text(space) else []


class ObsEncoder:
    """Encodes observations of `space` into arrays described by `spec`.

    `write(obs, out, i)` writes one observation to row `i` of a batch buffer, `write_rows(list, out)` a whole batch.
    Both are chosen at construction: for a plain Box, the common case, a batch costs one assignment.
    """

    spec: ArraySpec | dict[str, ArraySpec]
    write: Callable[[Any, Any, int], None]
    write_rows: Callable[[list[Any], Any], None]

    def __init__(self, space: spaces.Space[Any], masks: bool = False) -> None:
        self.leaves = _leaves(space)
        mask = [leaf for leaf in self.leaves if masks and leaf.path[:1] == (MASK,)]
        vectors = [leaf for leaf in self.leaves if not leaf.image and leaf not in mask]
        images = [leaf for leaf in self.leaves if leaf.image and leaf not in mask]
        size = 0
        for leaf in vectors:
            leaf.offset, size = size, size + leaf.size
        if not images and not size:
            raise UserError(f"Observation space {space} contains nothing to learn from.")
        if not images:
            self.spec = ArraySpec((size,))
        elif len(images) == 1 and not vectors:
            self.spec = ArraySpec(images[0].image_shape, "uint8")
        else:
            self.spec = {leaf.image: ArraySpec(leaf.image_shape, "uint8") for leaf in images}
            if vectors:
                self.spec["vector"] = ArraySpec((size,))
        if mask:
            self._split_mask(mask)
        self.write, self.write_rows = self._write, self._write_rows
        only = self.leaves[0] if self.leaves else None
        if len(self.leaves) == 1 and only is not None and not only.path and only.one_hot is None:
            if only.image:
                if not only.flags:
                    self.write = _image_writer(only.shape, only.channels_last)
            else:
                self.write, self.write_rows = _box_writer(only.shape), _box_rows_writer(only.shape)

    def _split_mask(self, leaves: list[_Leaf]) -> None:
        """Encode the action mask as a separate array, which networks do not read."""
        size = 0
        for leaf in leaves:
            leaf.to_mask(size)
            size += leaf.size
        if not isinstance(self.spec, dict):
            image = next((leaf.image for leaf in self.leaves if leaf.image and leaf.image != MASK), "")
            self.spec = {image or "vector": self.spec}
        self.spec = {**self.spec, MASK: ArraySpec((size,), "uint8")}

    def goal_spec(self) -> GoalSpec | None:
        """Position of the goals, if observations follow Gymnasium's goal API and goals are vectors."""

        def place(key: str) -> tuple[int, int] | None:
            leaves = [leaf for leaf in self.leaves if leaf.path[:1] == (key,)]
            if not leaves or any(leaf.image for leaf in leaves):
                return None
            return leaves[0].offset, leaves[-1].offset + leaves[-1].size

        achieved, desired = place("achieved_goal"), place("desired_goal")
        if not achieved or not desired or not any(leaf.path[:1] == ("observation",) for leaf in self.leaves):
            return None
        return GoalSpec(achieved, desired) if achieved[1] - achieved[0] == desired[1] - desired[0] else None

    def empty(self, n: int, allocate: Callable[[tuple[int, ...], str], Array] = np.zeros) -> Obs:
        """A buffer for `n` encoded observations."""
        if isinstance(self.spec, dict):
            return {name: allocate((n, *a.shape), a.dtype) for name, a in self.spec.items()}
        return allocate((n, *self.spec.shape), self.spec.dtype)

    def encode(self, obs: Any) -> Obs:
        """Encode one observation, without a batch axis."""
        out = self.empty(1)
        self.write(obs, out, 0)
        return {name: a[0] for name, a in out.items()} if isinstance(out, dict) else out[0]

    def encode_batch(self, obs: Any, out: Obs | None = None) -> Obs:
        """Encode a batch in the layout of Gymnasium's vector environments: the leaves have a leading batch axis."""
        if out is None:
            first = obs
            for key in self.leaves[0].path:
                first = first[key]
            out = self.empty(len(first))
        self._fill(obs, out)
        return out

    def _fill(self, obs: Any, out: Obs, single: bool = False) -> None:
        for leaf in self.leaves:
            value = obs
            for key in leaf.path:
                value = value[key]
            target = (out[leaf.image or "vector"]) if isinstance(out, dict) else out
            if leaf.part:
                target = target[:, leaf.offset : leaf.offset + leaf.size]
            leaf.fill(np.asarray(value)[None] if single else value, target)

    def _write(self, obs: Any, out: Obs, i: int) -> None:
        row = {name: a[i : i + 1] for name, a in out.items()} if isinstance(out, dict) else out[i : i + 1]
        self._fill(obs, row, single=True)

    def _write_rows(self, rows: list[Any], out: Obs) -> None:
        for i, obs in enumerate(rows):
            self.write(obs, out, i)


def _box_rows_writer(shape: tuple[int, ...]) -> Callable[[list[Any], Any], None]:
    flat = len(shape) == 1

    def write_rows(rows: list[Any], out: Array) -> None:
        # NumPy rejects rows of different shapes, so it is enough to check the first.
        first = rows[0] if type(rows[0]) is np.ndarray else np.asarray(rows[0])
        if first.dtype.kind != "f":
            _check_numbers(first)
        if first.shape != shape:
            raise ObservationShapeError(f"observation has shape {first.shape}; its space has {shape}")
        (out if flat else out.reshape(len(rows), *shape))[...] = rows

    return write_rows


def _box_writer(shape: tuple[int, ...]) -> Callable[[Any, Any, int], None]:
    flat = len(shape) == 1

    def write(obs: Any, out: Array, i: int) -> None:
        if type(obs) is not np.ndarray:
            obs = np.asarray(obs)
        _check_numbers(obs)
        if obs.shape != shape:
            raise ObservationShapeError(f"observation has shape {obs.shape}; its space has {shape}")
        out[i] = obs if flat else obs.reshape(-1)

    return write


def _image_writer(shape: tuple[int, ...], channels_last: bool) -> Callable[[Any, Any, int], None]:
    def write(obs: Any, out: Array, i: int) -> None:
        obs = np.asarray(obs)
        _check_numbers(obs)
        if obs.shape != shape:
            raise ObservationShapeError(f"observation has shape {obs.shape}; its space has {shape}")
        out[i] = obs.transpose(2, 0, 1) if channels_last else obs

    return write


class ActionDecoder:
    """Converts the algorithm's actions to the environment's and back.

    For the algorithm, bounded Box actions are in [-1, 1], so that noise scales and squashing mean the same everywhere.
    `decode` and `encode` work on batches; `dtype` is the type of the algorithm's action array.
    """

    def __init__(self, spec: ActionSpec, space: spaces.Space[Any]) -> None:
        self.spec = spec
        self.dtype = np.dtype(np.float32 if spec.kind == "box" else np.int64)
        self.row_shape: tuple[int, ...] = () if spec.kind == "discrete" else (spec.dim,)
        if isinstance(space, spaces.Box):
            self._integer = np.issubdtype(space.dtype, np.integer)
            self._flat = len(spec.shape) == 1
            dtype = np.float64 if self._integer else space.dtype
            self._low, self._high = (b.reshape(-1).astype(dtype) for b in (space.low, space.high))
            self._mid = (self._high + self._low) / 2 if spec.bounded else np.zeros_like(self._low)
            self._half = (self._high - self._low) / 2 if spec.bounded else np.ones_like(self._low)
            self._shift = bool((self._mid != 0).any())
            self._scale = self._shift or bool((self._half != 1).any())
        self._start = space.start if isinstance(space, spaces.MultiDiscrete) else np.zeros(())
        self._env_dtype = space.dtype

    def decode(self, actions: Array) -> Any:
        """A batch of actions whose rows are passed to `env.step`. The environment may modify the rows of a Box."""
        if self.spec.kind == "discrete":
            # NumPy scalars, as from `space.sample`: Gymnasium checks them faster than Python ints.
            return actions + self.spec.start if self.spec.start else actions
        rows = (len(actions), *self.spec.shape)
        if self.spec.kind != "box":
            return (actions.reshape(rows) + self._start).astype(self._env_dtype)
        if self._scale:
            actions = actions * self._half
            if self._shift:
                actions += self._mid
        # Clipping after the affine map equals clipping before it, and also removes the rounding error of the map.
        decoded = np.minimum(np.maximum(actions, self._low), self._high)
        if self._integer:
            decoded = np.rint(decoded).astype(self._env_dtype)
        return decoded if self._flat else decoded.reshape(rows)

    def encode(self, actions: Array) -> Array:
        """Convert a batch of environment actions, as stored in datasets, to the algorithm's actions."""
        actions = np.asarray(actions)
        kind = self.spec.kind
        if kind == "discrete":
            return np.asarray(actions - self.spec.start, np.int64)
        flat: Array = (actions if kind == "box" else actions - self._start).reshape(len(actions), -1)
        if kind != "box":
            return np.asarray(flat, np.int64)
        if self._scale:
            half = np.where(self._half == 0, 1, self._half)
            flat = (flat - self._mid) / half
        if self.spec.bounded:
            flat = np.clip(flat, -1.0, 1.0)
        return np.asarray(flat, np.float32)


class _FastDiscrete(spaces.Discrete):
    """A Discrete space with a fast path in `contains` for NumPy integers, the type of our actions. Gymnasium's
    `contains` takes a fifth of a CartPole step."""

    def contains(self, x: Any) -> bool:
        if type(x) is np.int64:
            return bool(self.start <= x < self.start + self.n)
        return super().contains(x)


def use_fast_contains(space: spaces.Space[Any]) -> None:
    """Speed up `contains` of a Discrete action space, in place; other spaces are left as they are."""
    if type(space) is spaces.Discrete and space.dtype == np.int64:
        space.__class__ = _FastDiscrete


def make_action_spec(space: spaces.Space[Any]) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", nvec=(int(space.n),), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return ActionSpec("multi_discrete", nvec=tuple(space.nvec.reshape(-1).tolist()), shape=tuple(space.shape))
    if isinstance(space, spaces.MultiBinary):
        return ActionSpec("multi_binary", nvec=(2,) * int(np.prod(space.shape)), shape=tuple(space.shape))
    if isinstance(space, spaces.Box):
        low, high = (tuple(b.astype(np.float64).reshape(-1).tolist()) for b in (space.low, space.high))
        return ActionSpec("box", shape=tuple(space.shape), low=low, high=high)
    raise UserError(f"Action space {space} is not supported: use Discrete, MultiDiscrete, MultiBinary or Box.")


def check_mask_length(length: int, action: ActionSpec) -> None:
    """Raise UserError if a mask of this length does not fit the action space."""
    if action.kind == "box":
        raise UserError(f"an {MASK} needs a discrete action space, not {action}")
    needed = action.dim if action.kind == "multi_binary" else sum(action.nvec)
    if length != needed:
        raise UserError(f"the {MASK} has {length} entries, but {action} needs {needed}")


def make_spec(
    env_id: str,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    max_episode_steps: int | None = None,
    masks: bool = False,
) -> EnvSpec:
    """The spec of the encoded spaces. Unsupported spaces raise UserError here, before any training."""
    try:
        encoder, action = ObsEncoder(observation_space, masks), make_action_spec(action_space)
        if texts := dropped_texts(observation_space):
            warnings.warn(f"{env_id}: text in the observation is not used: {', '.join(texts)}", stacklevel=2)
        observation = encoder.spec
        if masks and isinstance(observation, dict) and MASK in observation:
            check_mask_length(observation[MASK].shape[0], action)
        return EnvSpec(env_id, observation, action, max_episode_steps, encoder.goal_spec())
    except UserError as error:
        raise UserError(f"{env_id}: {error}") from None
