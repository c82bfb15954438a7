"""What an algorithm needs to know about an environment: the shapes of encoded observations and actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from numpy.typing import NDArray

MASK = "action_mask"  # name of the observation array that marks the allowed actions
Array = NDArray[Any]
EnvSource = str | Callable[..., Any]  # an environment id, or a function that makes an environment
ActionKind = Literal["discrete", "multi_discrete", "multi_binary", "box"]
Kind = Literal["images", "continuous", "other"]  # of environments, as far as defaults differ between them


@dataclass(frozen=True)
class ArraySpec:
    """One encoded observation array: a float32 vector `[D]` or a uint8 image `[C, H, W]`."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"

    @property
    def is_image(self) -> bool:
        return self.dtype == "uint8" and len(self.shape) == 3

    def __str__(self) -> str:
        return f"Box{self.shape}" if self.dtype == "float32" else f"Box{self.shape} of bytes"


@dataclass(frozen=True)
class ActionSpec:
    """The action space. If `bounded`, Box actions are produced and stored in [-1, 1], and the adapter rescales them."""

    kind: ActionKind
    nvec: tuple[int, ...] = ()  # discrete: (n,); multi_discrete: one entry per component; multi_binary: (2,) * n
    shape: tuple[int, ...] = ()  # shape of one action in the environment: () for discrete
    low: tuple[float, ...] = ()  # box only, flattened
    high: tuple[float, ...] = ()
    start: int = 0  # discrete only: number of the environment's first action

    @property
    def discrete(self) -> bool:
        return self.kind == "discrete"

    @property
    def bounded(self) -> bool:
        return self.kind == "box" and all(abs(x) < 1e30 for x in (*self.low, *self.high))

    @property
    def dim(self) -> int:
        """Length of the flat action vector (box), number of components (multi_*), or 1 (discrete)."""
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
    """Slices of the observation vector that hold a goal environment's two goals, as (start, stop)."""

    achieved: tuple[int, int]
    desired: tuple[int, int]


@dataclass(frozen=True)
class EnvSpec:
    env_id: str
    observation: ArraySpec | dict[str, ArraySpec]  # a dict if an observation has several arrays
    action: ActionSpec
    max_episode_steps: int | None = None
    goal: GoalSpec | None = None  # for dict observations with observation, achieved_goal and desired_goal
    features: Any = field(default=None, compare=False)
    """The user's own network for observations (a module, or a function of the spec that makes one); not saved."""

    @property
    def obs_dim(self) -> int:
        """Length of a vector observation."""
        if isinstance(self.observation, dict) or len(self.observation.shape) != 1:
            raise ValueError(f"{self.env_id} does not have a single vector as observation: {self.observation}")
        return self.observation.shape[0]

    @property
    def has_images(self) -> bool:
        """Whether the observation is an image, or has one among its parts."""
        parts = self.observation.values() if isinstance(self.observation, dict) else (self.observation,)
        return any(part.is_image for part in parts)

    @property
    def kind(self) -> Kind:
        """images: observations have images; continuous: one vector is seen, and actions are a Box."""
        if self.has_images:
            return "images"
        vector = isinstance(self.unmasked.observation, ArraySpec)
        return "continuous" if vector and self.action.kind == "box" else "other"

    @property
    def masked(self) -> bool:
        """Whether the environment provides an action mask."""
        return isinstance(self.observation, dict) and MASK in self.observation

    @property
    def unmasked(self) -> EnvSpec:
        """The spec without the action mask, as networks see it."""
        if not isinstance(self.observation, dict) or MASK not in self.observation:
            return self
        rest = {name: array for name, array in self.observation.items() if name != MASK}
        return replace(self, observation=rest if len(rest) > 1 else next(iter(rest.values())))

    def to_json(self) -> dict[str, Any]:
        own = self.features
        name = {} if own is None else {"features": getattr(own, "__name__", type(own).__name__)}
        plain = asdict(replace(self, features=None))
        del plain["features"]
        return {**plain, **name}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        def array(d: dict[str, Any]) -> ArraySpec:
            return ArraySpec(tuple(d["shape"]), d["dtype"])

        obs = data["observation"]
        observation = array(obs) if set(obs) == {"shape", "dtype"} else {k: array(v) for k, v in obs.items()}
        action: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["action"].items()}
        goal = GoalSpec(*(tuple(data["goal"][k]) for k in ("achieved", "desired"))) if data.get("goal") else None
        return cls(data["env_id"], observation, ActionSpec(**action), data.get("max_episode_steps"), goal)
