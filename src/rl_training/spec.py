"""What an algorithm needs to know about an environment: the shapes after encoding, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from numpy.typing import NDArray

MASK = "action_mask"  # the part of an observation that says which actions are allowed
Array = NDArray[Any]
EnvSource = str | Callable[..., Any]  # the id of an environment, or a function that makes one
ActionKind = Literal["discrete", "multi_discrete", "multi_binary", "box"]


@dataclass(frozen=True)
class ArraySpec:
    """One encoded observation array: a float32 vector `[D]` or a uint8 image `[C, H, W]`."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"

    @property
    def is_image(self) -> bool:
        return self.dtype == "uint8" and len(self.shape) == 3


@dataclass(frozen=True)
class ActionSpec:
    """The action space. Box actions are stored and produced in [-1, 1] when `bounded`; the adapter rescales them."""

    kind: ActionKind
    nvec: tuple[int, ...] = ()  # discrete: (n,); multi_discrete: one entry a component; multi_binary: (2,) * n
    shape: tuple[int, ...] = ()  # shape of one action given to the environment: () for discrete
    low: tuple[float, ...] = ()  # box only, flattened
    high: tuple[float, ...] = ()
    start: int = 0  # discrete only: the first action's number in the environment

    @property
    def discrete(self) -> bool:
        return self.kind == "discrete"

    @property
    def bounded(self) -> bool:
        return self.kind == "box" and all(abs(x) < 1e30 for x in (*self.low, *self.high))

    @property
    def dim(self) -> int:
        """Length of the flat action vector (box), number of components (multi_*), 1 (discrete)."""
        return len(self.low) if self.kind == "box" else len(self.nvec)

    @property
    def n(self) -> int:
        """Number of actions of a discrete space."""
        return self.nvec[0]

    def __str__(self) -> str:
        if self.kind == "box":
            return f"Box{self.shape}"
        return {"discrete": f"Discrete({self.nvec[0]})" if self.nvec else "Discrete"}.get(
            self.kind, f"{self.kind}{self.nvec}"
        )


@dataclass(frozen=True)
class GoalSpec:
    """Where a goal environment's two goals lie in the observation vector: (first number, past the last)."""

    achieved: tuple[int, int]
    desired: tuple[int, int]


@dataclass(frozen=True)
class EnvSpec:
    env_id: str
    observation: ArraySpec | dict[str, ArraySpec]  # a dict only when several arrays come together
    action: ActionSpec
    max_episode_steps: int | None = None
    goal: GoalSpec | None = None  # dict observations with observation, achieved_goal and desired_goal

    @property
    def obs_dim(self) -> int:
        """Length of a vector observation."""
        if isinstance(self.observation, dict) or len(self.observation.shape) != 1:
            raise ValueError(f"{self.env_id} has no plain vector observation: {self.observation}")
        return self.observation.shape[0]

    @property
    def masked(self) -> bool:
        """Does the environment say which actions are allowed?"""
        return isinstance(self.observation, dict) and MASK in self.observation

    @property
    def unmasked(self) -> EnvSpec:
        """The spec without the mask: what networks read."""
        if not isinstance(self.observation, dict) or MASK not in self.observation:
            return self
        rest = {name: array for name, array in self.observation.items() if name != MASK}
        return replace(self, observation=rest if len(rest) > 1 else next(iter(rest.values())))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        def array(d: dict[str, Any]) -> ArraySpec:
            return ArraySpec(tuple(d["shape"]), d["dtype"])

        obs = data["observation"]
        observation = array(obs) if set(obs) == {"shape", "dtype"} else {k: array(v) for k, v in obs.items()}
        action: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["action"].items()}
        goal = GoalSpec(*(tuple(data["goal"][k]) for k in ("achieved", "desired"))) if data.get("goal") else None
        return cls(data["env_id"], observation, ActionSpec(**action), data.get("max_episode_steps"), goal)
