"""Which environments are simulators, and a simulator that the user gave to a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym

from rl_training.envs.given import GivenEnv, Spaces
from rl_training.envs.simulators.base import Simulator, SimulatorVectorEnv
from rl_training.envs.simulators.torch_simulator import TorchSimulator, attribute, torch_spaces
from rl_training.errors import UserError

Convention = Literal["torch", "gymnax", "brax"]


def convention(env: Any) -> Convention | None:
    """The convention that an environment follows; None for one that is no simulator."""
    if isinstance(env, str | type) or not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        return None
    if hasattr(env, "default_params"):
        return "gymnax"
    if hasattr(env, "observation_size") and hasattr(env, "action_size"):
        return "brax"
    spaces = (attribute(env, f"single_{name}_space") for name in ("observation", "action"))
    batched = attribute(env, "num_envs") and attribute(env, "device") is not None
    return "torch" if batched and all(isinstance(space, gym.Space) for space in spaces) else None


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
