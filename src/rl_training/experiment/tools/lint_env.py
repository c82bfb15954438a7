"""Check that an environment behaves as training expects. Each finding says what is wrong and how to fix it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from rl_training.envs.factory import env_name, make_env
from rl_training.envs.masks import flat_mask, mask_components
from rl_training.envs.spaces import ActionDecoder, check_mask_length, dropped_texts, make_spec
from rl_training.envs.state import has_state
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.spec import MASK, Array, EnvSource

EPISODES, MAX_STEPS = 5, 20_000
_LARGE = 100.0  # larger values make the first updates of a network unstable


@dataclass(frozen=True)
class Finding:
    check: str
    level: Literal["problem", "note"]
    what: str
    do: str


@dataclass
class Episode:
    start: Any
    observations: list[Any]
    rewards: list[float]
    terminated: bool = False
    truncated: bool = False

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


class Linter:
    def __init__(self, source: EnvSource, env_kwargs: dict[str, Any] | None = None, seed: int = 0) -> None:
        self.source, self.kwargs, self.seed = source, env_kwargs or {}, seed
        self.findings: list[Finding] = []
        self.masked: Literal["", "info", "observation"] = ""  # where the action mask is

    def problem(self, check: str, what: str, do: str) -> None:
        self._add(Finding(check, "problem", what, do))

    def note(self, check: str, what: str, do: str) -> None:
        self._add(Finding(check, "note", what, do))

    def _add(self, finding: Finding) -> None:
        if all((f.check, f.do) != (finding.check, finding.do) for f in self.findings):
            self.findings.append(finding)

    def run(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"env_id": env_name(self.source)}
        with closing(make_env(self.source, self.kwargs)) as env:
            facts |= {"observation": str(env.observation_space), "action": str(env.action_space)}
            if self._supported(env):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    facts |= self._probe(env)
        problems = sum(f.level == "problem" for f in self.findings)
        return {**facts, "problems": problems, "findings": [asdict(f) for f in self.findings]}

    def _supported(self, env: gym.Env[Any, Any]) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # dropped texts are a finding
                self.action = make_spec("env", env.observation_space, env.action_space).action
        except UserError as error:
            self.problem("spaces", str(error), "use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of them")
            return False
        if texts := dropped_texts(env.observation_space):
            do = "encode it as numbers if the agent needs it to choose actions"
            self.note("spaces", f"text in the observation is not used: {', '.join(texts)}", do)
        wrapper: Any = env
        while isinstance(wrapper, gym.Wrapper):
            if type(wrapper).__name__ in ("Autoreset", "AutoResetWrapper"):
                self.problem("autoreset", "it has an Autoreset wrapper", "remove it: training resets by itself")
            wrapper = wrapper.env
        return True

    def _probe(self, env: gym.Env[Any, Any]) -> dict[str, Any]:
        try:
            episodes = self._play(env)
        except Exception as error:  # a user's environment may raise anything
            self.problem(
                "runs", f"it raised {type(error).__name__}: {error}"[:300],
                "make reset(seed=...) and step(action) work for every action of the space",
            )  # fmt: skip
            return {}
        if not episodes:
            return {}
        self._endings(env, episodes)
        seeded = self._seeding(env, episodes[0])
        self._scales(env, episodes)
        facts: dict[str, Any] = {
            "episodes": sum(e.ended for e in episodes),
            "mean_length": float(np.mean([len(e.rewards) for e in episodes])),
            "random_return": {
                "mean": float(np.mean([sum(e.rewards) for e in episodes])),
                "std": float(np.std([sum(e.rewards) for e in episodes])),
            },
            "endings": {
                "terminated": sum(e.terminated for e in episodes), "truncated": sum(e.truncated for e in episodes),
            },
            "max_episode_steps": env.spec.max_episode_steps if env.spec else None,
            "seeding": "repeatable" if seeded else "not repeatable",
        }  # fmt: skip
        if not any(f.level == "problem" and f.check in ("values", "types") for f in self.findings):
            facts["resume"] = self._resume(env, seeded)
        return facts

    # --- checks ----------------------------------------------------------------------------------------------------

    def _play(self, env: gym.Env[Any, Any]) -> list[Episode]:
        """Play random episodes and check every value. Empty if the environment does not follow the interface."""
        generator = np.random.default_rng(self.seed)
        episodes, left = [], MAX_STEPS
        for number in range(EPISODES):
            made: Any = env.reset(seed=self.seed + number)
            if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
                self.problem("types", "reset() does not return (observation, info)", "return obs, {} from reset()")
                return []
            self._observation(env, made[0], "reset()")
            episode = Episode(_copy(made[0]), [], [])
            last, info = made
            if not number and (mask := self._mask(last, info)) is not None:
                self.masked = "info" if MASK in info else "observation"
                try:
                    check_mask_length(len(mask), self.action)
                except UserError as error:
                    self.problem("mask", str(error), "return one entry for each action")
                    return []
            while not episode.ended and left:
                left -= 1
                action = self._choose(self._mask(last, info), generator)
                if action is None:
                    return []
                result: Any = env.step(self._decoded(env, action))
                if not isinstance(result, tuple) or len(result) != 5:
                    self.problem(
                        "types", f"step() returns {len(result) if isinstance(result, tuple) else 'no'} values",
                        "return observation, reward, terminated, truncated, info (five values)",
                    )  # fmt: skip
                    return []
                self._step(env, episode, last, result)
                last, info = result[0], result[4] if isinstance(result[4], dict) else {}
            episodes.append(episode)
            if not left:
                break
        return episodes

    def _mask(self, obs: Any, info: dict[str, Any]) -> Array | None:
        """The mask of allowed actions as one vector, if the environment has one."""
        mask = info.get(MASK) if MASK in info else obs.get(MASK) if isinstance(obs, dict) else None
        return None if mask is None or self.action.kind == "box" else flat_mask(mask)

    def _choose(self, mask: Array | None, generator: np.random.Generator) -> Array | None:
        """A random allowed action in the algorithms' form; None (and a finding) if there is none."""
        action = self.action
        if action.kind == "box":
            return generator.uniform(-1, 1, action.dim).astype(np.float32)
        if mask is None and self.masked:
            self.problem("mask", f"the {MASK} is missing after a step", f"return the {MASK} from every step as well")
            return None
        if action.kind == "multi_binary":
            return generator.integers(2, size=action.dim) * (1 if mask is None else mask)
        allowed = [np.ones(n) if mask is None else mask[part] for n, part in zip(action.nvec, mask_components(action))]
        if not all(part.any() for part in allowed):
            self.problem("mask", f"the {MASK} allows no action although the episode goes on", "allow at least one")
            return None
        return np.array([generator.choice(np.flatnonzero(part)) for part in allowed])

    def _decoded(self, env: gym.Env[Any, Any], action: Array) -> Any:
        """The action as the environment takes it."""
        row = action[None] if self.action.kind != "discrete" else action
        return ActionDecoder(self.action, env.action_space).decode(row)[0]

    def _step(self, env: gym.Env[Any, Any], episode: Episode, last: Any, result: tuple[Any, ...]) -> None:
        obs, reward, terminated, truncated, info = result
        self._observation(env, obs, "step()")
        try:
            value = float(reward)
        except (TypeError, ValueError):
            self.problem("types", f"the reward is not a number: {type(reward).__name__}", "return float(reward)")
            value = 0.0
        if not np.isfinite(value):
            self.problem("values", f"the reward is {value}", "find where it divides by zero or overflows")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self.problem("types", f"{name} is {type(flag).__name__}, not bool", "return True or False")
        if obs is last and isinstance(obs, np.ndarray):
            self.note("aliasing", "step() returns the same array object every time", "return a copy of it")
        if not isinstance(info, dict):
            self.problem("types", f"info is {type(info).__name__}, not a dict", "return {} if there is no information")
            info = {}
        if {"final_observation", "final_obs"} & set(info):
            self.problem(
                "autoreset", "it resets itself: info has the final observation", "return it from step(), do not reset"
            )
        if info.get("TimeLimit.truncated") and terminated and not truncated:
            self.problem(
                "truncation", "a time limit is reported as terminated", "return terminated=False, truncated=True there"
            )
        episode.observations.append(_copy(obs))
        episode.rewards.append(value)
        episode.terminated, episode.truncated = bool(terminated), bool(truncated)

    def _observation(self, env: gym.Env[Any, Any], obs: Any, where: str) -> None:
        space = env.observation_space
        arrays = obs.values() if isinstance(obs, dict) else obs if isinstance(obs, tuple) else [obs]
        for array in arrays:
            values = np.asarray(array)
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                self.problem("values", f"{where} gives NaN or infinity", "find where it divides by zero or overflows")
                return
        if space.contains(obs):
            return
        if isinstance(space, gym.spaces.Box):
            array = np.asarray(obs)
            if array.shape != space.shape:
                self.problem(
                    "shape", f"{where} gives shape {array.shape}, the space has {space.shape}", "make them equal"
                )
            elif not np.can_cast(array.dtype, space.dtype):
                self.problem(
                    "dtype", f"{where} gives {array.dtype}, the space has {space.dtype}",
                    f"return obs.astype(np.{space.dtype})",
                )  # fmt: skip
            else:
                low, high = float(array.min()), float(array.max())
                self.problem(
                    "bounds", f"{where} gives values from {low:.4g} to {high:.4g}, outside the bounds of {space}",
                    "widen the bounds of observation_space, or clip the values",
                )  # fmt: skip
            return
        self.problem("space", f"{where} gives an observation that is not in {space}", "correct one of the two")

    def _endings(self, env: gym.Env[Any, Any], episodes: list[Episode]) -> None:
        ended = [e for e in episodes if e.ended]
        if not ended:
            self.problem(
                "ending", f"no episode ended in {MAX_STEPS:,} random steps",
                "register it with max_episode_steps, or wrap it in gymnasium.wrappers.TimeLimit",
            )  # fmt: skip
            return
        limit = env.spec.max_episode_steps if env.spec else None
        lengths = {len(e.rewards) for e in ended}
        at_limit = [e.terminated and not e.truncated and len(e.rewards) == limit for e in ended]
        if limit and any(at_limit) and len(ended) > 1:
            self.problem(
                "truncation", f"episodes end as terminated at the time limit of {limit}",
                "return truncated=True instead: the value after a time limit must be bootstrapped",
            )  # fmt: skip
        elif len(ended) > 2 and len(lengths) == 1 and max(lengths) > 1 and all(e.terminated for e in ended):
            self.note(
                "truncation", f"every episode is terminated after exactly {lengths.pop()} steps",
                "if that is a time limit and not part of the task, return truncated=True instead",
            )  # fmt: skip
        for episode in ended:
            if len(episode.rewards) > 2 and _equal(episode.observations[-1], episode.start):
                before = episode.observations[-2]
                if not _equal(before, episode.start):
                    self.problem(
                        "autoreset", "the last observation of an episode is the first one of the next",
                        "return the true final observation from step(); training resets environments itself",
                    )  # fmt: skip

    def _seeding(self, env: gym.Env[Any, Any], first: Episode) -> bool:
        """The same seed and actions must give the same episode, in this environment and in a new one."""
        reference = self._rollout(env)
        again = self._rollout(env)
        with closing(make_env(self.source, self.kwargs)) as other:
            fresh = self._rollout(other)
        advice = "draw every random number from self.np_random, and call super().reset(seed=seed) in reset()"
        if not _equal(reference[0], again[0]) or not _equal(reference[0], fresh[0]):
            self.problem("seeding", "reset(seed=...) gives different first observations for one seed", advice)
            return False
        if not _same(reference, again) or not _same(reference, fresh):
            self.problem("seeding", "the same seed and actions lead to different episodes", advice)
            return False
        starts = [env.reset(seed=self.seed + k)[0] for k in range(4)]
        if all(_equal(starts[0], start) for start in starts[1:]):
            self.note("seeding", "every episode starts with the same observation", "ignore this if it is intended")
        return True

    def _rollout(self, env: gym.Env[Any, Any], steps: int = 200) -> list[Any]:
        generator = np.random.default_rng(self.seed)
        obs, info = env.reset(seed=self.seed)
        out = [_copy(obs)]
        for _ in range(steps):
            action = self._choose(self._mask(obs, info), generator)
            if action is None:
                break
            obs, reward, terminated, truncated, info = env.step(self._decoded(env, action))
            out += [_copy(obs), np.asarray(reward)]
            if terminated or truncated:
                break
        return out

    def _scales(self, env: gym.Env[Any, Any], episodes: list[Episode]) -> None:
        seen = [obs for e in episodes for obs in e.observations]
        space = env.observation_space
        if isinstance(space, gym.spaces.Box) and np.dtype(space.dtype).kind == "f" and seen:
            rows = [np.asarray(obs, np.float64).reshape(-1) for obs in seen if np.shape(obs) == space.shape]
            values = np.stack(rows) if rows else np.zeros((1, 1))
            if np.abs(values).max() > _LARGE:
                self.note(
                    "observation scale", f"observations reach {np.abs(values).max():.4g}",
                    "scale them to about 1 (ppo: normalize_observations=true)",
                )  # fmt: skip
            constant = int((values.std(0) == 0).sum()) if len(values) > 10 else 0
            if constant:
                self.note("observation scale", f"{constant} numbers of the observation never change", "remove them")
        rewards = np.array([r for e in episodes for r in e.rewards])
        if np.abs(rewards).max() > _LARGE:
            self.note(
                "reward scale", f"rewards reach {np.abs(rewards).max():.4g}",
                "divide them by a constant (ppo: normalize_rewards=true)",
            )  # fmt: skip
        elif not rewards.any():
            self.note("reward scale", "random actions were never rewarded", "exploration is hard: shape the reward")
        action = env.action_space
        if isinstance(action, gym.spaces.Box) and not action.is_bounded():
            self.note("action", f"the action space {action} has no bounds", "set bounds: most algorithms need them")

    def _resume(self, env: gym.Env[Any, Any], seeded: bool) -> str:
        """Save in the middle of an episode, continue in a new environment, and compare with the original."""
        do = "add get_state() and set_state(state), with arrays and JSON values, or make its seeding repeatable"
        source: Any = self.source
        options: dict[str, Any] = {"seeds": [self.seed], "num_envs": 1, "env_kwargs": self.kwargs}
        options["masks"] = bool(self.masked)
        whole, cut = make_vector_env(source, **options), make_vector_env(source, **options)
        generator = np.random.default_rng(self.seed)

        def action(obs: Any) -> Any:
            drawn = self._choose(obs[MASK][0] if self.masked else None, generator)
            assert drawn is not None  # the environment would have raised
            return drawn if self.action.discrete else drawn[None]

        try:
            obs = whole.reset()
            for _ in range(7):
                obs = whole.step(action(obs)).obs
            restored = cut.set_state(whole.get_state())
            for _ in range(20):
                chosen = action(obs)
                a, b = whole.step(chosen), cut.step(chosen.copy())
                obs, same = a.obs, _equal(a.obs, b.obs) and np.array_equal(a.rewards, b.rewards)
                if restored == "exact" and not same:
                    self.problem("resume", "a restored episode continues differently", do)
                    return "wrong"
        except Exception as error:
            self.problem("resume", f"saving its state failed: {type(error).__name__}: {error}"[:300], do)
            return "failed"
        finally:
            whole.close()
            cut.close()
        if restored == "restarted":
            self.problem("resume", "its state cannot be restored: a resumed run restarts its episodes", do)
            return "restarted"
        return "exact, by its own state" if has_state(env) else "exact, by repeating the episode's actions"


def lint(source: str | Callable[..., Any], env_kwargs: dict[str, Any] | None = None, seed: int = 0) -> dict[str, Any]:
    """Check an environment; `problems` counts the findings that must be fixed."""
    return Linter(source, env_kwargs, seed).run()


def _copy(obs: Any) -> Any:
    if isinstance(obs, dict):
        return {k: _copy(v) for k, v in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_copy(v) for v in obs)
    return np.array(obs, copy=True)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(np.array_equal(a, b))


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b))
