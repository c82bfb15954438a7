"""Sub-environments stepped in a loop: the synchronous vector env, and the code that each async worker runs."""

from __future__ import annotations

import operator
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rl_training.envs.factory import env_name, make_env
from rl_training.envs.given import GivenEnv
from rl_training.envs.masks import InfoMask, info_mask_length, mask_components, rows_without_actions
from rl_training.envs.spaces import ActionDecoder, Obs, ObsEncoder, make_spec, use_fast_contains
from rl_training.envs.state import SubState, has_state, pack, read_own_state, unpack, write_own_state
from rl_training.envs.vector import EnvError, EnvState, Episode, Restored, Step, VectorEnv, episode_seed
from rl_training.errors import describe
from rl_training.spec import MASK, Array, EnvSource, EnvSpec

MAX_RECORDED = 50_000  # actions of a running episode kept for replay; longer episodes restart on resume
Place = tuple[int, int, int]  # (seed, stream, index within the seed): with the episode number, it defines an episode


class Half(NamedTuple):
    """One of two buffers. Steps alternate between them, so that the previous step's arrays stay intact."""

    obs: Obs
    final_obs: Obs
    rewards: Array
    terminated: Array
    truncated: Array


@dataclass
class Buffers:
    halves: tuple[Half, Half]
    episode: Array  # i64[M]: number of the running episode
    ended_return: Array  # f64[M]: return of the episode that ended in this step
    ended_length: Array  # i64[M]
    ended_success: Array  # f64[M]: NaN if the environment does not report it

    @classmethod
    def allocate(cls, encoder: ObsEncoder, m: int, allocate: Callable[[tuple[int, ...], Any], Array]) -> Buffers:
        def half() -> Half:
            obs, final_obs = encoder.empty(m, allocate), encoder.empty(m, allocate)
            return Half(obs, final_obs, allocate((m,), np.float32), allocate((m,), np.bool_), allocate((m,), np.bool_))

        ended = (allocate((m,), np.float64), allocate((m,), np.int64), allocate((m,), np.float64))
        return cls((half(), half()), allocate((m,), np.int64), *ended)

    def rows(self, rows: slice) -> Buffers:
        """A view of the rows that one worker fills."""
        a, b = (Half(select_rows(h[0], rows), select_rows(h[1], rows), *(x[rows] for x in h[2:])) for h in self.halves)
        ended = (self.ended_return[rows], self.ended_length[rows], self.ended_success[rows])
        return Buffers((a, b), self.episode[rows], *ended)


def select_rows(obs: Obs, rows: Any) -> Obs:
    return {k: a[rows] for k, a in obs.items()} if isinstance(obs, dict) else obs[rows]


def copy_rows(source: Obs, target: Obs, rows: Any) -> None:
    if isinstance(source, dict):
        assert isinstance(target, dict)
        for k, a in source.items():
            target[k][rows] = a[rows]
    else:
        target[rows] = source[rows]


def arrays_by_name(obs: Obs) -> dict[str, Array]:
    return obs if isinstance(obs, dict) else {"obs": obs}


def arrays_by_label(obs: Obs) -> dict[str, Array]:
    """The arrays under the names used in messages."""
    return {f"observation {k}": a for k, a in obs.items()} if isinstance(obs, dict) else {"observation": obs}


class SubEnvs:
    """Steps sub-environments in a loop into `buffers`, resets ended episodes, and records actions for resume."""

    def __init__(
        self,
        source: EnvSource | GivenEnv,
        env_kwargs: dict[str, Any] | None,
        places: Sequence[Place],
        allocate: Callable[[ObsEncoder], Buffers] | None = None,
        first: int = 0,
        masks: bool = False,
    ) -> None:
        self._borrowed = int(isinstance(source, GivenEnv))  # the user's own environment comes first and stays open
        if isinstance(source, GivenEnv):
            self.envs = source.instances(len(places))
            source = source.name
        else:
            self.envs = [make_env(source, env_kwargs) for _ in places]
        for env in self.envs:
            use_fast_contains(env.unwrapped.action_space)
        if masks and (length := info_mask_length(self.envs[0])):
            self.envs = [InfoMask(env, length) for env in self.envs]
        env = self.envs[0]
        limit = env.spec.max_episode_steps if env.spec else None
        name = env.spec.id if env.spec and not isinstance(source, str) else env_name(source)
        self.spec: EnvSpec = make_spec(name, env.observation_space, env.action_space, limit, masks)
        self.encoder = ObsEncoder(env.observation_space, masks)
        self._choices = mask_components(self.spec.action) if self.spec.masked else []
        self.decoder = ActionDecoder(self.spec.action, env.action_space)
        self.buffers = allocate(self.encoder) if allocate else Buffers.allocate(self.encoder, len(places), np.zeros)
        self._places, self._first = list(places), first
        self._steps = [env.step for env in self.envs]
        self._returns = [0.0] * len(places)
        self._now = 0  # steps since construction; an episode's length is the difference from its start
        self._starts = [0] * len(places)
        self._own_state = has_state(env)
        self.compute_reward = getattr(env.unwrapped, "compute_reward", None)
        self.compute_terminated = getattr(env.unwrapped, "compute_terminated", None)
        self._log: deque[Array] = deque(maxlen=1 if self._own_state else MAX_RECORDED)
        # The sum of 0 * x is 0 only if all of x is finite: the cheapest test of a whole batch.
        self._zeros = np.zeros(len(places), np.float32)
        self._checks = [
            [(k, a.reshape(-1), np.zeros(a.size, np.float32)) for k, a in fields.items() if a.dtype == np.float32]
            for fields in (arrays_by_label(half.obs) for half in self.buffers.halves)
        ]

    def reset(self, parity: int) -> None:
        """Start the episodes numbered in `buffers.episode`."""
        for i in range(len(self.envs)):
            self._reset_one(i, parity)
        self._check_finite(parity)
        self._check_masks(parity)

    def step(self, actions: Array, parity: int) -> list[int]:
        """Step all sub-environments and return the rows whose episode ended. `actions` must not be modified later."""
        obs_out, final_out, rewards, terminated_out, truncated_out = self.buffers.halves[parity]
        ended: list[tuple[int, bool, bool, Any]] = []
        batch: list[Any] = []
        batch_rewards: list[Any] = []
        try:
            decoded = self.decoder.decode(actions)
            for env_step, action in zip(self._begin(decoded), decoded):
                obs, reward, terminated, truncated, info = env_step(action)
                if terminated or truncated:
                    ended.append((len(batch), *self._check_end(len(batch), terminated, truncated, info)))
                batch.append(obs)
                batch_rewards.append(reward)
            if not self._now:  # later, only flags that are true are looked at
                self._check_end(len(batch) - 1, terminated, truncated, info)
        except (TypeError, ValueError) as error:
            self._explain_bad_data(error, len(batch), "step() must return obs, reward, terminated, truncated, info")
            raise
        except SystemExit as error:
            self._explain_exit(error, len(batch))
            raise
        self._log.append(actions)
        self._now += 1
        try:
            self.encoder.write_rows(batch, obs_out)
            batch_rewards = list(map(float, batch_rewards))
        except (TypeError, ValueError):
            self._find_fault(batch, batch_rewards, parity)
            raise
        rewards[:] = batch_rewards
        self._returns = list(map(operator.add, self._returns, batch_rewards))
        if rewards.dot(self._zeros) != 0.0:
            bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise self._fault(bad, f"reward is {batch_rewards[bad]}")
        self._check_finite(parity)
        terminated_out.fill(False)
        truncated_out.fill(False)
        if not ended:
            self._check_masks(parity)
            return []
        for i, terminated, truncated, success in ended:
            terminated_out[i], truncated_out[i] = terminated, truncated
            copy_rows(obs_out, final_out, i)
            self.buffers.ended_return[i] = self._returns[i]
            self.buffers.ended_length[i] = self._now - self._starts[i]
            self.buffers.ended_success[i] = success
            self.buffers.episode[i] += 1
            self._reset_one(i, parity)
        self._check_finite(parity)
        self._check_masks(parity)  # only now: a final observation may allow no action
        keep = self._now - min(self._starts)
        while len(self._log) > keep:
            self._log.popleft()
        return [i for i, *_ in ended]

    def _begin(self, decoded: Any) -> Sequence[Callable[[Any], Any]]:
        """The functions that step the sub-environments with these actions."""
        return self._steps

    def restart(self, rows: Sequence[int], parity: int) -> None:
        for i in rows:
            self.buffers.episode[i] += 1
            self._reset_one(i, parity)
        self._check_finite(parity)
        self._check_masks(parity)

    def get_states(self, parity: int) -> list[SubState]:
        return [self._get_one(i, parity) for i in range(len(self.envs))]

    def set_states(self, states: Sequence[SubState], parity: int) -> Restored:
        lengths = [int(s.meta["length"]) for s in states]
        self._now = max(lengths)
        self._log.clear()
        exact = [self._set_one(i, s, parity) for i, s in enumerate(states)]
        self._starts = [self._now - n if ok else self._now for n, ok in zip(lengths, exact)]
        if not self._own_state:  # the log has one batch per step, so episodes are aligned at its end
            log = np.zeros((min(self._now, MAX_RECORDED), len(states), *self.decoder.row_shape), self.decoder.dtype)
            for i, (state, ok) in enumerate(zip(states, exact)):
                if ok and lengths[i]:
                    log[-lengths[i] :, i] = state.arrays["actions"]
            self._log.extend(log)
        self._check_finite(parity)
        return "exact" if all(exact) else "restarted"

    def close(self) -> None:
        for env in self.envs[self._borrowed :]:
            env.close()

    def _reset_one(self, i: int, parity: int) -> None:
        try:
            obs, _ = self.envs[i].reset(seed=episode_seed(*self._places[i], int(self.buffers.episode[i])))
        except (TypeError, ValueError) as error:
            self._explain_bad_data(error, i, "reset(seed=...) must return obs, info")
            raise
        except SystemExit as error:
            self._explain_exit(error, i)
            raise
        self._returns[i] = 0.0
        self._starts[i] = self._now
        self._write(obs, i, parity)

    def _write(self, obs: Any, i: int, parity: int) -> None:
        try:
            self.encoder.write(obs, self.buffers.halves[parity].obs, i)
        except (TypeError, ValueError) as error:
            raise self._fault(i, str(error)) from None

    def _explain_bad_data(self, error: Exception, i: int, rule: str) -> None:
        """Explain an error about what the environment returned: its values could not be unpacked (an older API), used
        as flags, or read by a wrapper of ours. Errors raised by the environment's own code are passed on."""
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        name = frame.f_globals.get("__name__", "")
        if "unpack" in str(error) and (name == __name__ or name.startswith("gymnasium.")):
            raise self._fault(i, f"{rule}, as in Gymnasium's API ({error})") from error
        if name in (__name__, InfoMask.__module__):
            what = (
                "terminated and truncated must be true or false, one value each" if "truth value" in str(error) else ""
            )
            raise self._fault(i, what or str(error)) from error

    def _explain_exit(self, error: SystemExit, i: int) -> None:
        if type(error) is SystemExit:
            raise self._fault(i, f"the environment called sys.exit({error.code!r})") from error

    def _check_end(self, i: int, terminated: Any, truncated: Any, info: Any) -> tuple[bool, bool, float]:
        """(terminated, truncated, is_success or NaN) of an ended episode. Any text is true, so types are checked."""
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if np.ndim(flag) or np.asarray(flag).dtype.kind not in "biuf":
                raise self._fault(i, f"{name} must be true or false, not {flag!r}")
        if not isinstance(info, Mapping):
            raise self._fault(i, f"info must be a dict, not {info!r}")
        success = info.get("is_success", np.nan)
        if np.ndim(success) or np.asarray(success).dtype.kind not in "biuf":
            raise self._fault(i, f"is_success in info must be true, false or a number, not {success!r}")
        return bool(terminated), bool(truncated), float(success)

    def _find_fault(self, batch: list[Any], rewards: list[Any], parity: int) -> None:
        """Find the row that could not be written and raise an error that names it. Not on the hot path."""
        for i, (obs, reward) in enumerate(zip(batch, rewards)):
            self._write(obs, i, parity)
            try:
                float(reward)
            except (TypeError, ValueError):
                raise self._fault(i, f"reward is not a number: {reward!r}") from None

    def _check_finite(self, parity: int) -> None:
        for name, x, zeros in self._checks[parity]:
            if x.dot(zeros) != 0.0:
                rows = x.reshape(len(self.envs), -1)
                bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
                raise self._fault(bad, f"{name} contains NaN or infinity: {rows[bad].tolist()[:32]}")

    def _check_masks(self, parity: int) -> None:
        if self._choices:
            bad = rows_without_actions(arrays_by_name(self.buffers.halves[parity].obs)[MASK], self._choices)
            if len(bad):
                raise self._fault(int(bad[0]), f"the {MASK} allows no action, but the episode has not ended")

    def _fault(self, i: int, what: str) -> EnvError:
        where = f"episode {int(self.buffers.episode[i])}, step {self._now - self._starts[i]}"
        return EnvError(f"{self.spec.env_id}, sub-environment {self._first + i} ({where}): {what}")

    def _get_one(self, i: int, parity: int) -> SubState:
        length = self._now - self._starts[i]
        meta: dict[str, Any] = {
            "episode": int(self.buffers.episode[i]),
            "return": float(self._returns[i]),
            "length": length,
            "method": "lost",
        }
        arrays: dict[str, Array] = {}
        row = select_rows(self.buffers.halves[parity].obs, i)
        arrays.update({f"obs.{k}": a.copy() for k, a in arrays_by_name(row).items()})
        if self._own_state:
            own = read_own_state(self.envs[i], self.spec.env_id)
            meta |= {"method": "state", **own.meta}
            arrays |= own.arrays
        elif length <= len(self._log):
            meta["method"] = "replay"
            recorded = [a[i] for a in list(self._log)[len(self._log) - length :]]
            arrays["actions"] = np.array(recorded, self.decoder.dtype).reshape(length, *self.decoder.row_shape)
        return SubState(meta, arrays)

    def _set_one(self, i: int, state: SubState, parity: int) -> bool:
        """Continue one episode. Returns False if the next episode was started instead."""
        meta, env = state.meta, self.envs[i]
        self.buffers.episode[i] = meta["episode"]
        self._reset_one(i, parity)
        problem = ""
        try:
            if meta["method"] == "state" and self._own_state:
                write_own_state(env, state)
                row = select_rows(self.buffers.halves[parity].obs, slice(i, i + 1))
                for k, a in arrays_by_name(row).items():
                    a[0] = state.arrays[f"obs.{k}"]
            elif meta["method"] == "replay":
                problem = self._replay(i, state, parity)
            else:
                problem = "its state was not recorded"
        except Exception as error:  # a user's environment may fail in any way; continue with a new episode
            problem = describe(error)
        if problem:
            where = f"{self.spec.env_id}, sub-environment {self._first + i}"
            warnings.warn(f"{where} starts a new episode: {problem}", stacklevel=2)
            self.buffers.episode[i] += 1
            self._reset_one(i, parity)
            return False
        self._returns[i] = float(meta["return"])
        return True

    def _replay(self, i: int, state: SubState, parity: int) -> str:
        """Repeat the recorded actions after the seeded reset. Returns the problem, or an empty string."""
        actions = state.arrays["actions"]
        obs: Any = None
        for action in self.decoder.decode(actions) if len(actions) else []:
            obs, _, terminated, truncated, _ = self._steps[i](action)
            if terminated or truncated:
                return "the episode ended early when the recorded actions were repeated"
        if obs is not None:
            self._write(obs, i, parity)
        row = arrays_by_name(select_rows(self.buffers.halves[parity].obs, i))
        same = all(a.tobytes() == state.arrays[f"obs.{k}"].tobytes() for k, a in row.items())
        return "" if same else "repeating the recorded actions gave a different observation"


class SyncVectorEnv(VectorEnv):
    """All sub-environments in this process: no copies and no messages, the fastest choice for cheap environments."""

    sub_envs: ClassVar[type[SubEnvs]] = SubEnvs

    def __init__(
        self, source: EnvSource | GivenEnv, places: Sequence[Place], env_kwargs: dict[str, Any] | None = None,
        masks: bool = False,
    ) -> None:  # fmt: skip
        self._sub = self.sub_envs(source, env_kwargs, places, masks=masks)
        self.spec, self.num_envs, self.compute_reward = self._sub.spec, len(places), self._sub.compute_reward
        self.compute_terminated = self._sub.compute_terminated
        self._buffers = self._sub.buffers
        self._parity, self._started = 0, False
        self._valid = np.ones(self.num_envs, np.bool_)
        self._dtype, self._shape = self._sub.decoder.dtype, (self.num_envs, *self._sub.decoder.row_shape)

    def reset(self, *, episode: int | None = None) -> Obs:
        start_episodes(self._buffers.episode, episode, self._started)
        self._started = True
        self._parity ^= 1
        self._sub.reset(self._parity)
        return self.current_obs()

    def step(self, actions: Array) -> Step:
        if not self._started:
            raise RuntimeError(f"{self.spec.env_id}: call reset() before step()")
        given = np.array(actions, dtype=self._dtype)
        if given.shape != self._shape:
            raise ValueError(f"{self.spec.env_id}: actions have shape {given.shape}, expected {self._shape}")
        self._parity = parity = self._parity ^ 1
        done = self._sub.step(given, parity)
        obs, final_obs, rewards, terminated, truncated = self._buffers.halves[parity]
        if not done:
            return Step(obs, obs, rewards, terminated, truncated, self._valid, [], True)
        copy_rows(obs, final_obs, ~(terminated | truncated))
        return Step(obs, final_obs, rewards, terminated, truncated, self._valid, ended_episodes(self._buffers, done))

    def restart(self, rows: Sequence[int]) -> bool:
        self._sub.restart(rows, self._parity)
        return True

    def current_obs(self) -> Obs:
        return self._buffers.halves[self._parity].obs

    def get_state(self) -> EnvState:
        if not self._started:
            raise RuntimeError(f"{self.spec.env_id}: call reset() before get_state()")
        return pack(self._sub.get_states(self._parity))

    def set_state(self, state: EnvState) -> Restored:
        self._started = True
        self._parity ^= 1
        return self._sub.set_states(unpack(state, self.num_envs), self._parity)

    def close(self) -> None:
        self._sub.close()


def start_episodes(numbers: Array, episode: int | None, started: bool) -> None:
    if episode is not None:
        numbers[:] = episode
    elif started:
        numbers += 1


def ended_episodes(buffers: Buffers, done: Sequence[int]) -> list[Episode]:
    def one(i: int) -> Episode:
        success = float(buffers.ended_success[i])
        known = None if np.isnan(success) else success
        return Episode(i, float(buffers.ended_return[i]), int(buffers.ended_length[i]), known)

    return [one(i) for i in done]
