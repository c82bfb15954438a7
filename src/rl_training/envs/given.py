"""Environments that the user made: training uses the instance itself, everything else gets fresh ones like it.

Evaluation needs environments of its own (and so do more seeds or a larger `num_envs`), so an instance is accepted only
if more of its kind can be made: from its Gymnasium spec, from the functions of a vector environment, or as deep copies.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import PassiveEnvChecker

from rl_training.envs.factory import env_name, make_env
from rl_training.envs.masks import InfoMask, info_mask_length
from rl_training.envs.simulators.base import Simulator, SimulatorVectorEnv
from rl_training.envs.simulators.conventions import attribute, convention, torch_spaces
from rl_training.envs.simulators.torch_simulator import TorchSimulator
from rl_training.errors import UserError, describe
from rl_training.spec import EnvSource

EnvInput = EnvSource | gym.Env[Any, Any] | VectorEnv[Any, Any, Any]  # what a user may give as the environment

_ONLY_OF_VECTORS = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")  # what make_vec adds to a spec


class VectorSource:
    """A function that makes vector environments, and how many environments each of them has."""

    def __init__(self, make: Callable[..., Any], num_envs: int) -> None:
        self.make, self.num_envs = make, num_envs
        self.__name__ = env_name(make)

    def __call__(self, **arguments: Any) -> Any:
        env = self.make(**arguments)
        if not isinstance(env, VectorEnv) or env.num_envs != self.num_envs:
            found = f"one of {env.num_envs}" if isinstance(env, VectorEnv) else type(env).__name__
            raise UserError(
                f"With vectorization 'vector', {self.__name__} must return a VectorEnv of {self.num_envs} environments"
                f" (num_envs); it returned {found}."
            )
        return env


class Spaces(NamedTuple):
    """The spaces of an environment, as Gymnasium describes them."""

    observation: gym.Space[Any]
    action: gym.Space[Any]


class GivenEnv:
    """An environment or vector environment that exists, and how fresh ones like it are made."""

    def __init__(self, env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> None:
        self.env = env
        self.num_envs: int | None = env.num_envs if isinstance(env, VectorEnv) else None
        make, made = self._working()
        spec = env.spec or next((sub.spec for sub in _parts(made)), None)
        made.close()
        self.name = spec.id if spec is not None else type(env.unwrapped).__name__
        self.arguments = _arguments(spec) if spec is not None else {}
        self.fresh: EnvSource = make if self.num_envs is None else VectorSource(make, self.num_envs)

    def instances(self, count: int) -> list[Any]:
        """The instance itself, then fresh ones."""
        assert callable(self.fresh)
        return [self.env, *(self.fresh() for _ in range(count - 1))]

    def spaces(self) -> Spaces:
        """The spaces of one of its environments."""
        return Spaces(self.env.observation_space, self.env.action_space)

    def check(self, vectorization: str) -> None:
        """Raise UserError for a setting that does not fit an environment that exists already."""
        own = ("auto", "sync", "threads") if self.num_envs is None else ("auto", "vector")
        if vectorization not in own:
            raise UserError(
                f"vectorization '{vectorization}' makes the environments itself: leave it out, or give an id or a"
                f" function instead of an instance of {self.name}"
            )

    def _working(self) -> tuple[Callable[..., Any], Any]:
        """The first way to make fresh environments that works for this one, and what it made."""
        reason = "nothing that can be made from it is like it"
        for make in self._ways():
            try:
                made = make()
            except Exception as error:  # a user's environment may fail in any way
                reason = describe(error)
                continue
            if _is_like(made, self.env):
                return make, made
            if _is_separate(made, self.env):  # else closing it would close the user's
                made.close()
        raise UserError(
            f"this {type(self.env.unwrapped).__name__} cannot be copied ({reason}), and evaluation needs environments"
            " of its own: give a function that makes one instead, such as lambda: MyEnv()"
        )

    def _ways(self) -> Iterator[Callable[..., Any]]:
        """Ways that may work, best first. They ignore arguments: the instance was made with its own."""
        env, spec = self.env, self.env.spec
        if isinstance(env, SyncVectorEnv | AsyncVectorEnv):
            functions, mode = env.env_fns, env.metadata["autoreset_mode"]
            yield lambda **_: SyncVectorEnv(functions, autoreset_mode=mode)
        elif spec is not None:
            if isinstance(env, VectorEnv):
                yield lambda **_: gym.make_vec(spec)
            else:
                yield partial(_like_spec, spec)
        original: list[Any] = []  # copied once, before training: it must not show in later copies

        def duplicate(**_: Any) -> Any:
            if not original:
                original.append(copy.deepcopy(env))
            return copy.deepcopy(original[0])

        if not isinstance(env.unwrapped, AsyncVectorEnv):  # half a copy of its pipes would close the pipes themselves
            yield duplicate


class GivenSimulator(GivenEnv):
    """A simulator that exists. One of JAX is a set of functions, so it has as many environments as a run asks for, and
    evaluation has its own. One of PyTorch has a fixed number and one state: evaluation borrows it, which ends the
    running episodes."""

    def __init__(self, env: Any) -> None:
        kind = convention(env)
        assert kind is not None
        self.env, self.convention = env, kind
        self.num_envs = int(attribute(env, "num_envs")) if kind == "torch" else None
        spec = attribute(env, "spec")
        named = getattr(spec, "id", None) or getattr(env, "name", None)
        self.name = named if isinstance(named, str) else type(getattr(env, "unwrapped", env)).__name__
        self.arguments: dict[str, Any] = {}
        self.fresh: Any = self

    def check(self, vectorization: str) -> None:
        if vectorization not in ("auto", "device"):
            raise UserError(
                f"vectorization '{vectorization}' steps environments on the host, and {self.name} is a simulator on a"
                " device: leave vectorization out"
            )

    def vector_env(self, seeds: Sequence[int], num_envs: int, stream: int, masks: bool) -> SimulatorVectorEnv:
        """The environments of a run, or of an evaluation."""
        return SimulatorVectorEnv(self._simulator(seeds, num_envs, stream, masks))

    def _simulator(self, seeds: Sequence[int], num_envs: int, stream: int, masks: bool) -> Simulator:
        if self.convention != "torch":
            from rl_training.envs.simulators.jax_simulator import JaxSimulator

            return JaxSimulator(self.env, self.convention, self.name, seeds, num_envs, stream, masks)
        if len(seeds) > 1:
            raise UserError(f"{self.name} is one simulator, which trains one seed at a time; got {len(seeds)} seeds")
        if masks not in self._made:
            self._made[masks] = TorchSimulator(self.env, self.name, masks)
        return self._made[masks]

    @property
    def _made(self) -> dict[bool, Simulator]:
        """The simulator, which training and evaluation share: it counts its resets."""
        made: dict[bool, Simulator] = self.__dict__.setdefault("made", {})
        return made

    def spaces(self) -> Spaces:
        if self.convention == "torch":
            return Spaces(*torch_spaces(self.env))
        from rl_training.envs.simulators.jax_simulator import jax_spaces

        return Spaces(*jax_spaces(self.env, self.convention))


def made_simulator(make: Callable[..., Any], env_kwargs: dict[str, Any]) -> GivenSimulator:
    """The simulator that a function makes."""
    made = make(**env_kwargs)
    if convention(made) is None:
        raise UserError(
            "vectorization: device needs the id of a tensor environment, a simulator, or a function that makes one; the"
            f" function returned {type(made).__name__}, which has none of the conventions of Isaac Lab, ManiSkill,"
            " gymnax and brax"
        )
    return GivenSimulator(made)


def given(
    env: EnvInput | GivenEnv, vectorization: str = "auto", env_kwargs: dict[str, Any] | None = None
) -> EnvSource | GivenEnv:
    """An instance with the way to more of them; an id or a function as it is.

    With vectorization 'vector', a function is called once, to see how many environments its vector environment has.
    With 'device', a function is called once: it makes a simulator.
    """
    if convention(env) is not None:
        return GivenSimulator(env)
    if isinstance(env, gym.Env | VectorEnv):
        return GivenEnv(env)
    if vectorization == "device" and callable(env):
        return made_simulator(env, env_kwargs or {})
    if vectorization == "vector" and callable(env) and not isinstance(env, VectorSource):
        made = env(**(env_kwargs or {}))
        made.close()
        return VectorSource(env, made.num_envs) if isinstance(made, VectorEnv) else env
    return env


def fresh(source: EnvSource | GivenEnv) -> EnvSource:
    """What makes environments like this one."""
    return source.fresh if isinstance(source, GivenEnv) else source


def read_spaces(
    source: EnvSource | GivenEnv, env_kwargs: dict[str, Any] | None = None, *, masks: bool = False
) -> Spaces:
    """The spaces of an environment, which is made for that purpose and closed again.

    With `masks`, a mask that the environment gives in info counts as part of the observation.
    """
    if isinstance(source, GivenEnv):
        return source.spaces()
    if isinstance(source, VectorSource):
        with closing(source(**(env_kwargs or {}))) as vector:
            return Spaces(vector.single_observation_space, vector.single_action_space)
    with closing(make_env(source, env_kwargs)) as env:
        if masks and (length := info_mask_length(env)):
            env = InfoMask(env, length)
        return Spaces(env.observation_space, env.action_space)


def _like_spec(spec: GymSpec, render_mode: str | None = None, **_: Any) -> gym.Env[Any, Any]:
    """An environment as the spec says, with another render mode if one is given."""
    mode: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    return gym.make(spec, disable_env_checker=True, **mode)


def _is_like(made: Any, env: Any) -> bool:
    """The same wrappers around the same kind of environment with the same spaces, and no part of it shared?"""
    names = ["observation_space", "action_space"]
    if isinstance(env, VectorEnv):
        names += ["single_observation_space", "single_action_space"]
    same = _stack(made) == _stack(env) and all(getattr(made, n) == getattr(env, n) for n in names)
    return same and _is_separate(made, env)


def _is_separate(made: Any, env: Any) -> bool:
    """Do the two share no environment, and is each of its own there only once?"""
    parts, others = ({id(part.unwrapped) for part in _parts(x)} for x in (made, env))
    return len(parts) == len(_parts(made)) and not parts & others


def _stack(env: Any) -> list[type]:
    """The classes of an environment and its wrappers; one that only checks does not count."""
    found = []
    while isinstance(env, gym.Wrapper | VectorWrapper):
        found += [type(env)] * (not isinstance(env, PassiveEnvChecker))
        env = env.env
    return [*found, SyncVectorEnv if isinstance(env, AsyncVectorEnv) else type(env)]


def _parts(env: Any) -> list[Any]:
    """The single environments that this one consists of, as far as they can be seen from here."""
    base = env.unwrapped
    return list(base.envs) if isinstance(base, SyncVectorEnv) else [env]


def _arguments(spec: GymSpec) -> dict[str, Any]:
    """The arguments that made an environment, as far as a file can hold them: with them its id makes the same one."""
    kept = {k: v for k, v in spec.kwargs.items() if k not in (*_ONLY_OF_VECTORS, "render_mode")}
    known = gym.registry.get(spec.id)
    if known is not None and known.max_episode_steps != spec.max_episode_steps:
        kept["max_episode_steps"] = spec.max_episode_steps or -1  # -1: no limit
    try:
        plain: dict[str, Any] = json.loads(json.dumps(kept))
    except (TypeError, ValueError):
        return {}
    return plain
