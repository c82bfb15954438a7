"""Natively vectorised environments: one interface over Gymnasium's three autoreset modes and EnvPool."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from rl_training.envs.factory import env_name, find_spec, user_errors
from rl_training.envs.given import VectorSource
from rl_training.envs.masks import mask_components, rows_without_actions
from rl_training.envs.spaces import ActionDecoder, Obs, ObsEncoder, ObservationShapeError, make_spec
from rl_training.envs.sync import Buffers, arrays_by_label, arrays_by_name, copy_rows, select_rows
from rl_training.envs.vector import EnvError, EnvState, Episode, Restored, Step, VectorEnv, episode_seed
from rl_training.errors import UserError
from rl_training.spec import MASK, Array, EnvSource


class NativeVectorEnv(VectorEnv):
    """One or more `gymnasium.vector.VectorEnv`s, concatenated into one batch.

    Such an environment resets itself, so only its first episodes get our seeds. With NEXT_STEP autoreset, the step
    after an episode's end is a reset, not a transition: its row has `valid` False.
    """

    def __init__(self, envs: Any, *, seeds: Sequence[int] = (0,), stream: int = 0, env_id: str | None = None,
                 masks: bool = False, borrowed: int = 0) -> None:  # fmt: skip
        """The first `borrowed` of them belong to the user and are not closed."""
        self._envs: list[Any] = list(envs) if isinstance(envs, list | tuple) else [envs]
        self._borrowed = borrowed
        if len(self._envs) != len(seeds):
            raise UserError(f"{len(self._envs)} vector environments need one seed each; got {len(seeds)} seeds.")
        first = self._envs[0]
        gym_spec = getattr(first, "spec", None)
        name = env_id or (gym_spec.id if gym_spec else type(first).__name__)
        obs_space, action_space = first.single_observation_space, first.single_action_space
        self.spec = make_spec(name, obs_space, action_space, getattr(gym_spec, "max_episode_steps", None), masks)
        self._encoder = ObsEncoder(obs_space, masks)
        self._masks, self._choices = masks, mask_components(self.spec.action) if self.spec.masked else []
        self._decoder = ActionDecoder(self.spec.action, action_space)
        ends = np.cumsum([env.num_envs for env in self._envs]).tolist()
        self._rows = [slice(end - env.num_envs, end) for end, env in zip(ends, self._envs)]
        self._modes = [AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)) for env in self._envs]
        self.num_envs = ends[-1]
        self.compute_reward = getattr(first.unwrapped, "compute_reward", None)
        self.compute_terminated = getattr(first.unwrapped, "compute_terminated", None)
        self._places = [(int(seed), stream, 0) for seed in seeds]
        self._halves = Buffers.allocate(self._encoder, self.num_envs, np.zeros).halves
        self._parity, self._round = 0, -1
        self._resetting = np.zeros(self.num_envs, np.bool_)  # rows whose next step is a reset (NEXT_STEP)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)

    def reset(self, *, episode: int | None = None) -> Obs:
        self._round = self._round + 1 if episode is None else episode
        self._parity ^= 1
        for env, rows, place in zip(self._envs, self._rows, self._places):
            obs, info = self._call(env.reset, seed=episode_seed(*place, self._round))
            if self._masks and not self.spec.masked and MASK in info:
                raise UserError(
                    f"{self.spec.env_id} has its {MASK} in info: use vectorization 'sync' or 'async',"
                    " or move the mask into the observation"
                )
            self._encode(obs, self.current_obs(), rows)
        self._resetting[:] = False
        self._returns[:], self._lengths[:] = 0.0, 0
        self._check(self.current_obs())
        self._check_masks(self.current_obs())
        return self.current_obs()

    def step(self, actions: Array) -> Step:
        self._parity ^= 1
        obs, final_obs, rewards, terminated, truncated = self._halves[self._parity]
        decoded = self._decoder.decode(np.asarray(actions, dtype=self._decoder.dtype))
        resets: list[tuple[slice, Any, Any]] = []  # rows, their new observations if known, the environment
        for env, rows, mode in zip(self._envs, self._rows, self._modes):
            result = self._call(env.step, decoded[rows])
            try:
                raw, reward, ends, cuts, info = result
                for name, array in (("rewards", reward), ("terminations", ends), ("truncations", cuts)):
                    if np.asarray(array).dtype.kind not in "fiub":
                        raise ValueError(f"{name} have the type {np.asarray(array).dtype}")
                rewards[rows], terminated[rows], truncated[rows] = reward, ends, cuts
            except (TypeError, ValueError) as error:
                rule = "step() must return obs, rewards, terminations, truncations, infos"
                raise EnvError(f"{self.spec.env_id}: {rule}, as in Gymnasium's API ({error})") from error
            self._encode(raw, obs, rows)
            ended_here = terminated[rows] | truncated[rows]
            if not ended_here.any():
                continue
            if mode is AutoresetMode.DISABLED:
                resets.append((rows, None, env))
            elif mode is AutoresetMode.SAME_STEP:
                resets.append((rows, raw, env))
                self._write_final(info["final_obs"], obs, rows.start, ended_here)
        valid = ~self._resetting
        terminated &= valid
        truncated &= valid
        rewards[~valid] = 0.0
        done = terminated | truncated
        self._check(obs, rewards)
        self._returns[valid] += rewards[valid]
        self._lengths += valid
        finished = [Episode(i, float(self._returns[i]), int(self._lengths[i])) for i in np.flatnonzero(done).tolist()]
        self._returns[done], self._lengths[done] = 0.0, 0
        for rows, mode in zip(self._rows, self._modes):
            self._resetting[rows] = done[rows] & (mode is AutoresetMode.NEXT_STEP)
        if not resets:
            return Step(obs, obs, rewards, terminated, truncated, valid, finished)
        copy_rows(obs, final_obs, slice(None))
        for rows, raw, env in resets:
            if raw is None:
                raw, _ = env.reset(options={"reset_mask": done[rows].copy()})
            self._encode(raw, obs, rows)
        self._check(obs)
        self._check_masks(obs)
        return Step(obs, final_obs, rewards, terminated, truncated, valid, finished)

    def current_obs(self) -> Obs:
        return self._halves[self._parity].obs

    def get_state(self) -> EnvState:
        """The environments' own states if all of them have `get_state()`; otherwise no state that can be restored."""
        if not all(_has_state(env) for env in self._envs):
            return EnvState({"native": len(self._envs), "round": self._round, "method": "lost"})
        arrays = {f"obs.{k}": a.copy() for k, a in arrays_by_name(self.current_obs()).items()}
        arrays |= {
            "resetting": self._resetting.copy(),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
        }
        for k, env in enumerate(self._envs):
            own = env.unwrapped.get_state()
            own = own if isinstance(own, dict) else {"": own}
            arrays |= {f"{k}.{key}": np.array(value) for key, value in own.items()}
        return EnvState({"native": len(self._envs), "round": self._round, "method": "state"}, arrays)

    def set_state(self, state: EnvState) -> Restored:
        if state.meta.get("native") != len(self._envs):
            raise UserError(f"The saved state does not belong to {len(self._envs)} native vector environments.")
        self._round = int(state.meta["round"])
        self.reset()
        if state.meta["method"] != "state" or not all(_has_state(env) for env in self._envs):
            return "restarted"
        self._round -= 1
        for k, env in enumerate(self._envs):
            own = {key.split(".", 1)[1]: a.copy() for key, a in state.arrays.items() if key.startswith(f"{k}.")}
            env.unwrapped.set_state(own[""] if set(own) == {""} else own)
        for name, a in arrays_by_name(self.current_obs()).items():
            a[...] = state.arrays[f"obs.{name}"]
        self._resetting[:] = state.arrays["resetting"]
        self._returns[:], self._lengths[:] = state.arrays["returns"], state.arrays["lengths"]
        return "exact"

    def close(self) -> None:
        for env in self._envs[self._borrowed :]:
            env.close()

    def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except SystemExit as error:
            if type(error) is not SystemExit:
                raise
            raise EnvError(f"{self.spec.env_id}: the environment called sys.exit({error.code!r})") from error

    def _encode(self, raw: Any, out: Obs, rows: slice) -> None:
        try:
            self._encoder.encode_batch(raw, select_rows(out, rows))
        except (ObservationShapeError, TypeError, KeyError) as error:
            raise EnvError(f"{self.spec.env_id}: {error}") from None

    def _write_final(self, final: Any, obs: Obs, offset: int, done: Array) -> None:
        """SAME_STEP: write the true final observations, given as an object array or batched like observations."""
        rows = np.flatnonzero(done).tolist()
        if isinstance(final, np.ndarray) and final.dtype == object:
            for i in rows:
                self._encoder.write(final[i], obs, offset + i)
            return
        batch = self._encoder.encode_batch(final)
        for k, a in arrays_by_name(batch).items():
            arrays_by_name(obs)[k][offset + np.array(rows)] = a[rows]

    def _check_masks(self, obs: Obs) -> None:
        """Every row must allow an action, unless its next step is a reset."""
        if self._choices:
            rows = rows_without_actions(arrays_by_name(obs)[MASK], self._choices).tolist()
            bad = [i for i in rows if not self._resetting[i]]
            if bad:
                raise EnvError(f"{self.spec.env_id}, sub-environment {bad[0]}: the {MASK} allows no action")

    def _check(self, obs: Obs, rewards: Array | None = None) -> None:
        fields = arrays_by_label(obs)
        if rewards is not None:
            fields["reward"] = rewards
        for name, a in fields.items():
            if a.dtype == np.float32 and not np.isfinite(a).all():
                i = int(np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(axis=1))[0])
                raise EnvError(
                    f"{self.spec.env_id}, sub-environment {i}: {name} contains NaN or infinity: {a[i].tolist()}"
                )


class _EnvPool:
    """An EnvPool pool with the attributes of a Gymnasium vector env. It resets on the step after an episode's end."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    spec = None

    def __init__(self, pool: Any, num_envs: int) -> None:
        self.unwrapped, self.num_envs = pool, num_envs
        self.single_observation_space, self.single_action_space = pool.observation_space, pool.action_space
        self.step, self.close = pool.step, pool.close

    def reset(self, **_: Any) -> Any:
        return self.unwrapped.reset()  # a pool gets its seed when it is made


def make_native(
    env_id: EnvSource,
    mode: str,
    seeds: Sequence[int],
    num_envs: int,
    stream: int,
    env_kwargs: dict[str, Any],
    masks: bool = False,
) -> NativeVectorEnv:
    """One native vector environment per seed, so that a seed's episodes do not depend on the study's other seeds."""
    envs: list[Any]
    if mode == "envpool":
        try:
            envpool = importlib.import_module("envpool")
        except ImportError:
            raise UserError(
                "vectorization 'envpool' needs the envpool extra: pip install 'rl-training[envpool]'"
            ) from None
        keys = [episode_seed(int(seed), stream, 0, 0) for seed in seeds]
        pools = [envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=k, **env_kwargs) for k in keys]
        envs = [_EnvPool(pool, num_envs) for pool in pools]
    elif isinstance(env_id, str):
        spec = find_spec(env_id)
        if spec.vector_entry_point is None:
            raise UserError(f"{env_id} has no native vector implementation: use vectorization 'sync' or 'async'.")
        kwargs: dict[str, Any] = {"vectorization_mode": "vector_entry_point", **env_kwargs}
        with user_errors(spec, env_kwargs):
            if reserved := sorted(
                {"id", "num_envs", "vectorization_mode", "vector_kwargs", "wrappers"} & env_kwargs.keys()
            ):
                raise UserError(f"env_kwargs.{reserved[0]} is an argument of gymnasium.make_vec: remove it")
            envs = [gym.make_vec(spec, num_envs, **kwargs) for _ in seeds]
    else:
        make = env_id if isinstance(env_id, VectorSource) else VectorSource(env_id, num_envs)
        envs = [make(**env_kwargs) for _ in seeds]
    return NativeVectorEnv(envs, seeds=seeds, stream=stream, env_id=env_name(env_id), masks=masks)


def _has_state(env: Any) -> bool:
    return all(callable(getattr(env.unwrapped, name, None)) for name in ("get_state", "set_state"))
