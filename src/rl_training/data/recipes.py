"""A dataset as data: where its transitions come from and what is done to them. The recipe stands in the config of a
run, so that training, resume and the command line need no file, and the same recipe gives the same content hash."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_training.data.levels import Level

Kind = Literal["random", "policy", "replay", "npz", "hdf5", "minari"]
FILES = ("npz", "hdf5", "minari")


class DatasetRecipe(BaseModel):
    """One set of transitions, or a mix of several."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Kind = "random"
    """random (uniform actions), policy (rolled out by an agent), replay (the buffer of a run), npz, hdf5 or minari."""
    level: Level | None = None
    """Data of a named quality by our own agents, as D4RL has them, instead of kind, path and train."""
    path: str | None = None
    """The file; for policy and replay the checkpoint or run directory."""
    train: dict[str, Any] | None = None
    """policy, replay: train this agent first (a config, or `preset: sac/pendulum` and changes) instead of `path`."""
    size: int = Field(0, ge=0, le=2**31 - 1)
    """Transitions; 0: 10 000 where they are made, all where they are read."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of the episodes and the random actions."""
    env_id: Annotated[str, Field(pattern=r"^[^:]*$")] | None = None
    """Environment to act in; empty: the one that is trained for."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that environment."""
    noise: float = Field(0.0, ge=0.0)
    """policy: deviation of noise on box actions in [-1, 1], or probability of a random discrete action."""
    deterministic: bool = False
    """policy: take the agent's best action instead of a sample."""
    reward_scale: float | Literal["return_range"] = 1.0
    """Rewards are multiplied by this; return_range is 1000 / (best - worst episode return), as IQL does."""
    reward_shift: float = 0.0
    """Added to the scaled rewards."""
    reward_clip: tuple[float, float] | None = None
    """Bounds of the rewards after that."""
    normalize_actions: bool = True
    """Map box actions from the environment's bounds to [-1, 1]; off: they are in [-1, 1] already."""
    mix: tuple[DatasetRecipe, ...] = ()
    """Several sets instead of one, joined at episode ends."""
    ratio: tuple[float, ...] = ()
    """Shares of the sets in `mix`; empty: all of each."""

    @model_validator(mode="after")
    def _consistent(self) -> DatasetRecipe:
        if self.level is not None and (self.mix or self.path or self.train or self.kind != "random"):
            raise ValueError("a level chooses the agent itself: leave kind, path, train and mix out")
        if self.mix:
            if self.path is not None or self.train is not None:
                raise ValueError("a mix has no path and no agent of its own: put them into its parts")
            if self.ratio and len(self.ratio) != len(self.mix):
                raise ValueError(f"ratio needs one share for each of the {len(self.mix)} sets in mix")
            if self.ratio and (min(self.ratio) <= 0.0):
                raise ValueError("the shares in ratio must be above 0")
        elif self.ratio:
            raise ValueError("ratio belongs to mix")
        elif self.kind in FILES and self.path is None:
            raise ValueError(f"a dataset of kind {self.kind} needs a path")
        elif self.kind in ("policy", "replay") and (self.path is None) == (self.train is None):
            raise ValueError(f"a dataset of kind {self.kind} needs an agent: give either path or train")
        elif self.kind == "random" and (self.path is not None or self.train is not None):
            raise ValueError("kind random has no path and no agent; set kind to policy, replay, npz, hdf5 or minari")
        if self.train is not None and self.kind in FILES:
            raise ValueError(f"a dataset of kind {self.kind} is read from its path: leave train out")
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError("reward_clip needs its lower bound first")
        return self

    @property
    def changes_rewards(self) -> bool:
        return (self.reward_scale, self.reward_shift, self.reward_clip) != (1.0, 0.0, None)


class AgentRecipe(BaseModel):
    """A trained agent: one that exists, or one that is trained first. Neither: there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: str | None = None
    """Checkpoint or run directory."""
    train: dict[str, Any] | None = None
    """Train this agent first, and keep it: a config, or `preset: ppo/cartpole` and changes."""

    @model_validator(mode="after")
    def _one(self) -> AgentRecipe:
        if self.path is not None and self.train is not None:
            raise ValueError("give either path or train, not both")
        return self
