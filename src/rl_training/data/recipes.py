"""Recipes: descriptions of datasets and agents in the config of a run. A recipe says where transitions come from and
how they are changed; the same recipe always gives the same data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_training.data.levels import Level

Kind = Literal["random", "policy", "replay", "npz", "hdf5", "minari"]
FILES = ("npz", "hdf5", "minari")


class DatasetRecipe(BaseModel):
    """One set of transitions, or a mix of several."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Kind = "random"
    """random (uniform actions), policy (an agent acts), replay (the replay buffer of a run), npz, hdf5 or minari."""
    level: Level | None = None
    """A dataset level as in D4RL (random, medium, ...), instead of kind, path and train."""
    path: str | None = None
    """The file; for policy and replay, the checkpoint or run directory."""
    train: dict[str, Any] | None = None
    """policy, replay: instead of `path`, an agent to train first: a config, or `preset: sac/pendulum` and changes."""
    size: int = Field(0, ge=0, le=2**31 - 1)
    """Number of transitions; 0: all of a file, or 10 000 if they are collected."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the episodes and the random actions."""
    env_id: str | None = None
    """Environment in which data is collected; empty: the environment of the run."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that environment."""
    noise: float = Field(0.0, ge=0.0)
    """policy: standard deviation of noise on box actions in [-1, 1], or probability of a random discrete action."""
    deterministic: bool = False
    """policy: take the agent's best action instead of sampling one."""
    reward_scale: float | Literal["return_range"] = 1.0
    """Factor on the rewards; return_range means 1000 / (best - worst episode return), as in IQL."""
    reward_shift: float = 0.0
    """Added to the scaled rewards."""
    reward_clip: tuple[float, float] | None = None
    """Bounds to which the scaled and shifted rewards are clipped."""
    normalize_actions: bool = True
    """Map box actions from the environment's bounds to [-1, 1]; off: they are already in [-1, 1]."""
    mix: tuple[DatasetRecipe, ...] = ()
    """Several datasets instead of one, joined at the ends of episodes."""
    ratio: tuple[float, ...] = ()
    """Shares of the datasets in `mix`; empty: all of each."""

    @model_validator(mode="after")
    def _consistent(self) -> DatasetRecipe:
        if self.level is not None and (self.mix or self.path or self.train or self.kind != "random"):
            raise ValueError("a level chooses its own agent: remove kind, path, train and mix")
        if self.mix:
            if self.path is not None or self.train is not None:
                raise ValueError("a mix has no path or agent of its own: put them into its parts")
            if self.ratio and len(self.ratio) != len(self.mix):
                raise ValueError(f"ratio needs one share for each of the {len(self.mix)} datasets in mix")
            if self.ratio and (min(self.ratio) <= 0.0):
                raise ValueError("the shares in ratio must be above 0")
        elif self.ratio:
            raise ValueError("ratio can only be used with mix")
        elif self.kind in FILES and self.path is None:
            raise ValueError(f"a dataset of kind {self.kind} needs a path")
        elif self.kind in ("policy", "replay") and (self.path is None) == (self.train is None):
            raise ValueError(f"a dataset of kind {self.kind} needs an agent: set either path or train")
        elif self.kind == "random" and (self.path is not None or self.train is not None):
            raise ValueError("kind random has no path and no agent; set kind to policy, replay, npz, hdf5 or minari")
        if self.train is not None and self.kind in FILES:
            raise ValueError(f"a dataset of kind {self.kind} is read from its path: remove train")
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError("reward_clip needs the lower bound first")
        return self

    @property
    def changes_rewards(self) -> bool:
        return (self.reward_scale, self.reward_shift, self.reward_clip) != (1.0, 0.0, None)


class AgentRecipe(BaseModel):
    """A trained agent: an existing one, or one to train first. Without either there is no agent."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: str | None = None
    """Checkpoint or run directory."""
    train: dict[str, Any] | None = None
    """An agent to train first and cache: a config, or `preset: ppo/cartpole` and changes."""

    @model_validator(mode="after")
    def _one(self) -> AgentRecipe:
        if self.path is not None and self.train is not None:
            raise ValueError("set either path or train, not both")
        return self
