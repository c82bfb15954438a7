"""Fixed datasets of transitions, and how batches of them are read on the training device.

Observations and actions of a dataset are as the environment defines them. `encoded` gives the same transitions as
algorithms read them: float32 vectors or uint8 images, box actions in [-1, 1], discrete actions from 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.data.storage import Data, require_memory
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import Array, EnvSpec

Obs = Any  # an array, or a dict of arrays
REQUIRED = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
OPTIONAL = ("returns", "next_actions", "has_next")
BLOCK = 1 << 16  # rows that are checked together, so that a mapped file is never completely in memory


class RewardRule(NamedTuple):
    """How the rewards of the environment were changed: clip(scale x r + shift)."""

    scale: float = 1.0
    shift: float = 0.0
    clip: tuple[float, float] | None = None


UNCHANGED = RewardRule()


@dataclass(frozen=True)
class TransitionDataset:
    """Transitions in order of time, episode after episode; the last row of an episode is terminated or truncated.

    `next_obs` is the true next observation, also at the end of an episode. The optional columns are part of the data,
    or computed from the others by `with_returns` and `with_next_actions`.
    """

    obs: Obs
    actions: Array
    rewards: Array
    next_obs: Obs
    terminated: Array
    truncated: Array
    returns: Array | None = None  # discounted sum of the rewards from here to the end of the episode
    next_actions: Array | None = None  # the action taken in next_obs
    has_next: Array | None = None  # is that action known? False in the last row of an episode
    reward_rule: RewardRule = UNCHANGED  # how `with_rewards` changed the rewards; not part of the content hash

    def __post_init__(self) -> None:
        self.check()

    # --- shape -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rewards)

    def columns(self) -> dict[str, Any]:
        """The existing columns by name."""
        return {name: value for name in (*REQUIRED, *OPTIONAL) if (value := getattr(self, name)) is not None}

    def arrays(self) -> dict[str, Array]:
        """The columns as a flat dictionary; parts of a dict observation are called `obs/part`."""
        out: dict[str, Array] = {}
        for name, value in self.columns().items():
            if isinstance(value, dict):
                out.update({f"{name}/{part}": array for part, array in value.items()})
            else:
                out[name] = value
        return out

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def map_rows(self, fn: Callable[[Array], Array]) -> TransitionDataset:
        """Apply a function to every column, for example to select rows."""
        return replace(self, **{k: tree_map(fn, v) for k, v in self.columns().items()})

    def check(self) -> None:
        """Find errors before training does: unequal lengths, NaN, flags that are not boolean."""
        lengths = {name: len(array) for name, array in self.arrays().items()}
        if len(set(lengths.values())) != 1:
            described = ", ".join(f"{name} has {n:,}" for name, n in lengths.items())
            raise UserError(f"the arrays of a dataset must have the same length: {described} rows")
        if not len(self):
            raise UserError("the dataset has no transitions")
        for name, array in self.arrays().items():
            if array.dtype.kind not in "fiub":
                raise UserError(f"the dataset's {name} must be numbers; they are {array.dtype}")
            if array.dtype.kind == "f" and not all(np.isfinite(part).all() for part in _blocks(array)):
                raise UserError(f"the dataset's {name} contain NaN or infinity; clean the data before training on it")
        for name in ("rewards", "terminated", "truncated"):
            if getattr(self, name).ndim != 1:
                raise UserError(
                    f"the dataset's {name} must be one number per row; their shape is {getattr(self, name).shape}"
                )
        for name in ("terminated", "truncated"):
            if getattr(self, name).dtype != np.bool_:
                raise UserError(f"the dataset's {name} must be true or false in each row")
        arrays = self.arrays()
        for name, array in arrays.items():
            column, _, part = name.partition("/")
            other = arrays.get(f"next_{name}" if part else "next_obs") if column == "obs" else array
            if other is None or other.shape != array.shape:
                found = "nothing" if other is None else other.shape
                raise UserError(f"obs {array.shape} and next_obs {found} of the dataset must have the same shape")

    # --- episodes --------------------------------------------------------------------------------------------------

    @property
    def ends(self) -> Array:
        """Is a row the last one of its episode? bool[N]"""
        ends = self.terminated | self.truncated
        ends[-1] = True
        return ends

    def episodes(self) -> list[slice]:
        stops = np.flatnonzero(self.ends) + 1
        return [slice(int(a), int(b)) for a, b in zip([0, *stops[:-1]], stops)]

    def episode_returns(self) -> Array:
        """Undiscounted return of each episode."""
        starts = [part.start for part in self.episodes()]
        return np.add.reduceat(self.rewards.astype(np.float64), starts)

    def with_returns(self, gamma: float) -> TransitionDataset:
        """Add the Monte-Carlo return of each row. The sum ends at a truncation, where the later rewards are unknown, so
        these returns are too small in magnitude shortly before one."""
        rewards, ends = self.rewards.astype(np.float64), self.ends
        out, rest = np.empty(len(self)), 0.0
        for i in range(len(self) - 1, -1, -1):
            rest = rewards[i] + (0.0 if ends[i] else gamma * rest)
            out[i] = rest
        return replace(self, returns=out.astype(np.float32))

    def with_next_actions(self) -> TransitionDataset:
        """Add the action of the next row; the last row of an episode has none (`has_next` is False)."""
        following = np.concatenate([self.actions[1:], self.actions[-1:]])
        ends = self.ends
        following[ends] = self.actions[ends]
        return replace(self, next_actions=following, has_next=~ends)

    # --- changes ---------------------------------------------------------------------------------------------------

    def with_rewards(
        self, *, scale: float = 1.0, shift: float = 0.0, clip: Sequence[float] | None = None
    ) -> TransitionDataset:
        """Replace the rewards by clip(scale x r + shift)."""
        rule = RewardRule(scale, shift, None if clip is None else (float(clip[0]), float(clip[1])))
        if rule == UNCHANGED:
            return self
        rewards = scale * self.rewards.astype(np.float64) + shift
        if clip is not None:
            rewards = np.clip(rewards, clip[0], clip[1])
        return replace(self, rewards=rewards.astype(np.float32), returns=None, reward_rule=rule)

    def first(self, size: int) -> TransitionDataset:
        """The first `size` rows; the last of them is truncated if its episode continued."""
        return self if size >= len(self) else self.map_rows(lambda x: x[:size]).closed()

    def closed(self) -> TransitionDataset:
        """The same rows with the last one ending its episode, so that another dataset can follow."""
        if self.terminated[-1] or self.truncated[-1]:
            return self
        truncated = self.truncated.copy()
        truncated[-1] = True
        return replace(self, truncated=truncated)

    @staticmethod
    def concatenate(parts: Sequence[TransitionDataset]) -> TransitionDataset:
        """Join datasets; no episode extends from one to the next."""
        if len(parts) == 1:
            return parts[0]
        closed = [part.closed() for part in parts]
        names = [name for name in closed[0].columns() if all(name in part.columns() for part in closed)]
        shapes = [
            [(k, a.shape[1:], a.dtype) for k, a in part.arrays().items() if k.split("/")[0] in names] for part in closed
        ]
        if any(shape != shapes[0] for shape in shapes[1:]):
            raise UserError("datasets with different observations or actions cannot be mixed")
        joined = [part.columns() for part in closed]
        return TransitionDataset(
            **{n: tree_map(lambda *xs: np.concatenate(xs), *(part[n] for part in joined)) for n in names}
        )

    # --- identity --------------------------------------------------------------------------------------------------

    def content_hash(self) -> str:
        """SHA-256 of the names, types, shapes and bytes of all columns."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays().items()):
            digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
            for part in _blocks(array):
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    # --- in the algorithm's terms ----------------------------------------------------------------------------------

    def encoded(
        self, spec: EnvSpec, observation_space: Any, action_space: Any, *, normalize_actions: bool = True
    ) -> TransitionDataset:
        """The dataset as an algorithm for `spec` reads it; a UserError says what does not fit."""
        from rl_training.envs.spaces import ActionDecoder, ObsEncoder

        def observations(value: Obs) -> Obs:
            wanted = spec.observation
            if isinstance(wanted, dict):  # data that was collected by this library is already encoded
                if isinstance(value, dict) and {k: v.shape[1:] for k, v in value.items()} == {
                    k: part.shape for k, part in wanted.items()
                }:
                    return {k: value[k].astype(part.dtype, copy=False) for k, part in wanted.items()}
            elif isinstance(value, np.ndarray) and value.shape[1:] == wanted.shape:
                return value.astype(wanted.dtype, copy=False)
            try:
                return ObsEncoder(observation_space).encode_batch(value)
            except (ValueError, TypeError, KeyError, IndexError):
                found = f"shape {value.shape[1:]}" if isinstance(value, np.ndarray) else f"the parts {sorted(value)}"
                needed = observation_space.shape or observation_space
                raise UserError(f"the dataset's observations have {found}; {spec.env_id} needs {needed}") from None

        decoder = ActionDecoder(spec.action, action_space)

        def actions(value: Array) -> Array:
            if value.shape[1:] not in (spec.action.shape, decoder.row_shape):
                raise UserError(
                    f"the dataset's actions have shape {value.shape[1:]}; {spec.env_id} needs {spec.action}"
                )
            if spec.action.kind == "box" and value.dtype.kind not in "fiu":
                raise UserError(f"the dataset's actions are {value.dtype}; {spec.env_id} needs numbers")
            if spec.action.kind != "box" and value.dtype.kind not in "iub":
                raise UserError(f"the dataset's actions are {value.dtype}; {spec.env_id} needs whole numbers")
            if spec.action.kind == "box" and not normalize_actions:
                code = value.reshape(len(value), -1).astype(np.float32)
                _inside(code, -1.0, 1.0, "[-1, 1] (normalize_actions is off)")
                return code
            if spec.action.bounded:
                flat = value.reshape(len(value), -1)
                _inside(flat, np.array(spec.action.low), np.array(spec.action.high), f"the bounds of {spec.env_id}")
            code = decoder.encode(value)
            if spec.action.kind != "box":
                _inside(code.reshape(len(code), -1), 0, np.array(spec.action.nvec) - 1, f"the actions of {spec.env_id}")
            return code

        return replace(
            self,
            obs=observations(self.obs),
            next_obs=observations(self.next_obs),
            actions=actions(self.actions),
            rewards=self.rewards.astype(np.float32, copy=False),
            next_actions=None if self.next_actions is None else actions(self.next_actions),
        )

    def moments(self, eps: float = 1e-3) -> tuple[Array, Array]:
        """Mean and standard deviation (plus eps) of vector observations, in float64: [D] each."""
        if isinstance(self.obs, dict) or self.obs.ndim != 2:
            raise UserError("normalize_observations needs plain vector observations; these are images")
        obs = self.obs.astype(np.float64)
        return obs.mean(0), obs.std(0) + eps


def _blocks(array: Array) -> Iterator[Array]:
    return (array[i : i + BLOCK] for i in range(0, len(array), BLOCK))


def _inside(values: Array, low: Any, high: Any, bounds: str) -> None:
    """Refuse values outside the bounds, except by rounding: those are clipped later."""
    slack = 1e-4 * (np.abs(low) + np.abs(high))
    if (values < low - slack).any() or (values > high + slack).any():
        raise UserError(
            f"the dataset's actions range from {values.min():g} to {values.max():g}, which is outside {bounds}"
        )


class DatasetSource:
    """Uniform batches of an encoded dataset: the `Source` and the storage of the offline loop.

    All seeds share the rows in memory: the seed axis of the tensors is a view.
    """

    num_envs = 1

    def __init__(self, dataset: TransitionDataset, gamma: float, optional: Sequence[str] = ()) -> None:
        if "returns" in optional:
            dataset = dataset.with_returns(gamma)
        if "next_actions" in optional:
            dataset = dataset.with_next_actions()
        names = ["obs", "actions", "rewards", "next_obs", "terminated", *optional]
        names += ["has_next"] if "next_actions" in optional else []
        self.size, self.gamma = len(dataset), gamma
        self.tensors: Data = {
            name: tree_map(lambda x: torch.from_numpy(np.require(x, requirements=["C", "W"])), value)
            for name, value in dataset.columns().items()
            if name in names
        }
        self.columns = self.tensors

    def init(self, seeds: int, device: torch.device) -> Data:
        if device.type != "cpu":
            needed = sum(x.numel() * x.element_size() for _, x in tree_items(self.tensors))
            require_memory(needed, device, f"a dataset of {self.size:,} transitions")
        return tree_map(lambda x: x.to(device).unsqueeze(0).expand(seeds, *x.shape), self.tensors)

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Data:
        rows = rng.randint(key, (batch_size,), self.size)
        batch: Data = {name: tree_map(lambda column: column[rows], data[name]) for name in data}
        batch["discounts"] = torch.where(batch.pop("terminated"), 0.0, self.gamma)
        batch["weights"] = torch.ones_like(batch["rewards"])
        batch["indices"] = rows
        return batch

    def feedback(self, data: Data, rows: Tensor, priority: Tensor | None) -> None:
        """Does nothing: sampling is uniform."""
