"""Environments of JAX, with the conventions of gymnax (`reset(key, params)`, `step(key, state, action, params)`) and of
brax (`reset(key)`, `step(state, action)`). They are vmapped and jitted here; their arrays become tensors, and actions
become arrays, through DLPack, without a copy.

Where a gymnax environment has `step_env` and `reset_env`, as all of gymnax do, those are called, so that the final
observation of an episode is known, and the time limit of its parameters truncates instead of terminating. A brax
environment has no time limit unless it is wrapped in brax's EpisodeWrapper, so it gets brax's 1 000 steps. Its finished
episodes restart from the first state of their row, as in brax's AutoResetWrapper.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rl_training.envs.simulators.base import SimStep, Simulator, sim_step
from rl_training.envs.simulators.encoding import TensorDecoder, TensorEncoder
from rl_training.envs.spaces import make_spec
from rl_training.envs.tensor.base import Obs
from rl_training.envs.vector import episode_seed
from rl_training.errors import UserError
from rl_training.ops.tree import tree_map
from rl_training.spec import Array

BRAX_LIMIT = 1_000  # steps of an episode of brax, where no wrapper counts them
NO_LIMIT = 2**30
STATE = "state"  # the part of a dict of observations that policies read, in MuJoCo Playground


def _jax() -> Any:
    try:
        importlib.import_module("jax.dlpack")
        return importlib.import_module("jax")
    except ImportError:
        raise UserError("environments of JAX need JAX: pip install jax") from None


def _flag(value: Any) -> Any:
    """A condition, which may be a plain number, as a JAX array."""
    return _jax().numpy.asarray(value) > 0.5


class GymnaxRow:
    """One environment of gymnax, as functions of its state."""

    def __init__(self, env: Any) -> None:
        self.env, self.params = env, env.default_params
        self.first = False  # does a finished episode begin from its row's first state?
        self.resets_itself = not (hasattr(env, "step_env") and hasattr(env, "reset_env"))
        limit = getattr(self.params, "max_steps_in_episode", None)
        self.limit = None if limit is None or self.resets_itself else int(limit)
        if self.limit is not None:  # counted here: its own limit would count as a termination
            self.params = self.params.replace(max_steps_in_episode=NO_LIMIT)

    def begin(self, key: Any) -> tuple[Any, Any]:
        reset = self.env.reset if self.resets_itself else self.env.reset_env
        obs, state = reset(key, self.params)
        return state, obs

    def advance(self, state: Any, key: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        step = self.env.step if self.resets_itself else self.env.step_env
        obs, state, reward, done, info = step(key, state, action, self.params)
        done = _flag(done)
        truncated = _flag(info.get("truncated", False)) if isinstance(info, dict) else _flag(False)
        return state, obs, reward, done & ~truncated, done & truncated

    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return _space(self.env.observation_space(self.params)), _space(self.env.action_space(self.params))


class BraxRow:
    """One environment of brax or MuJoCo Playground."""

    first, resets_itself = True, False

    def __init__(self, env: Any) -> None:
        self.env, inner, names = env, env, []
        while inner is not None:
            names.append(type(inner).__name__)
            inner = getattr(inner, "env", None)
        if unfit := {"AutoResetWrapper", "VmapWrapper"} & set(names):
            raise UserError(
                f"{names[-1]}: give the environment without brax's {min(unfit)}: episodes are reset, and rows are"
                " batched, by the run"
            )
        self.limit = None if "EpisodeWrapper" in names else BRAX_LIMIT

    def begin(self, key: Any) -> tuple[Any, Any]:
        state = self.env.reset(key)
        return state, self._seen(state.obs)

    def advance(self, state: Any, key: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        state = self.env.step(state, action)
        done, truncated = _flag(state.done), _flag(state.info.get("truncation", False))
        return state, self._seen(state.obs), state.reward, done & ~truncated, truncated

    def _seen(self, obs: Any) -> Any:
        return obs[STATE] if isinstance(obs, dict) else obs

    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        size = self._seen(self.env.observation_size)
        shape = (size,) if isinstance(size, int) else tuple(size)
        return spaces.Box(-np.inf, np.inf, shape), spaces.Box(-1.0, 1.0, (int(self.env.action_size),))


def _row(env: Any, convention: str) -> Any:
    return GymnaxRow(env) if convention == "gymnax" else BraxRow(env)


def jax_spaces(env: Any, convention: str) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    found: tuple[spaces.Space[Any], spaces.Space[Any]] = _row(env, convention).spaces()
    return found


def _space(space: Any) -> spaces.Space[Any]:
    """A space of gymnax as Gymnasium's."""
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "low"):
        dtype = np.uint8 if np.dtype(space.dtype) == np.uint8 else np.float32
        low, high = (np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high))
        return spaces.Box(low, high, tuple(space.shape), dtype)
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _space(part) for name, part in space.spaces.items()})
    raise UserError(f"the space {space} of gymnax is not supported: use Box, Discrete, or a Dict of these")


class JaxSimulator(Simulator):
    """Every row has its own key, which depends only on the seed, the stream and the row's number."""

    def __init__(
        self, env: Any, convention: str, name: str, seeds: Sequence[int], num_envs: int, stream: int, masks: bool
    ) -> None:
        self.jax, self.num_envs, self.row = _jax(), len(seeds) * num_envs, _row(env, convention)
        observation_space, action_space = self.row.spaces()
        self.spec = make_spec(name, observation_space, action_space, self.row.limit, masks)
        self._encode = TensorEncoder(observation_space, name, masks)
        self._decode = TensorDecoder(self.spec.action, action_space)
        self.final_known = not self.row.resets_itself
        random = self.jax.random
        keys = [random.split(random.PRNGKey(episode_seed(int(seed), stream, 0, 0)), num_envs) for seed in seeds]
        self._keys = self.jax.numpy.concatenate(keys)
        self._begin = self.jax.jit(self.jax.vmap(self._begin_row))
        self._step = self.jax.jit(self.jax.vmap(self._step_row))
        self._state: Any = None
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    # --- one row, in JAX -------------------------------------------------------------------------------------------

    def _begin_row(self, key: Any) -> Any:
        key, own = self.jax.random.split(key)
        inner, obs = self.row.begin(own)
        state = {"key": key, "inner": inner, "steps": self.jax.numpy.zeros((), "int32")}
        return {**state, **({"first": (inner, obs)} if self.row.first else {})}, self._plain(obs)

    def _step_row(self, state: Any, action: Any) -> Any:
        np_, tree = self.jax.numpy, self.jax.tree_util
        key, own, fresh_key = self.jax.random.split(state["key"], 3)
        inner, obs, reward, terminated, truncated = self.row.advance(state["inner"], own, action)
        steps = state["steps"] + 1
        if self.row.limit is not None:
            truncated = truncated | (steps >= self.row.limit)
        ended = terminated | truncated
        following = obs
        if not self.row.resets_itself:
            fresh = state["first"] if self.row.first else self.row.begin(fresh_key)
            inner, following = tree.tree_map(lambda new, old: np_.where(ended, new, old), fresh, (inner, obs))
        after = {**state, "key": key, "inner": inner, "steps": np_.where(ended, 0, steps)}
        flags = tuple(x.astype("uint8") for x in (terminated, truncated))
        return after, (self._plain(following), self._plain(obs), np_.asarray(reward, "float32"), *flags)

    def _plain(self, obs: Any) -> Any:
        """Observations of a type that DLPack can pass on."""
        return self.jax.tree_util.tree_map(lambda x: x.astype("uint8") if x.dtype == bool else x, obs)

    # --- all rows, as tensors --------------------------------------------------------------------------------------

    def reset(self) -> Obs:
        self.resets += 1
        self._state, obs = self._begin(self._keys)
        tensors = self._tensors(obs)
        encoded = self._encode(tensors, self.num_envs)
        tree_map(self._note_device, encoded)
        return encoded

    def step(self, actions: Tensor, seen: Obs) -> SimStep:
        chosen = self._decode(actions).contiguous()
        self._state, out = self._step(self._state, self.jax.dlpack.from_dlpack(chosen))
        obs, final, *columns = self._tensors(out)
        encoded = self._encode(obs, self.num_envs)
        return sim_step(encoded, self._encode(final, self.num_envs) if self.final_known else seen, *columns)

    def _tensors(self, tree: Any) -> Any:
        return self.jax.tree_util.tree_map(from_dlpack, tree)

    def _note_device(self, x: Tensor) -> Tensor:
        self._device = x.device
        return x

    def get_arrays(self) -> dict[str, Array] | None:
        arrays = [np.array(leaf) for leaf in self.jax.tree_util.tree_leaves(self._state)]
        return {f"leaf.{i}": x.view(np.int32) if x.dtype == np.uint32 else x for i, x in enumerate(arrays)}

    def set_arrays(self, arrays: dict[str, Array]) -> None:
        leaves, structure = self.jax.tree_util.tree_flatten(self._state)
        saved = [arrays[f"leaf.{i}"] for i in range(len(leaves))]
        same = [np.ascontiguousarray(x).view(np.asarray(old).dtype) for x, old in zip(saved, leaves)]
        self._state = self.jax.tree_util.tree_unflatten(structure, [self.jax.numpy.asarray(x) for x in same])
