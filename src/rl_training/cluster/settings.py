"""The `cluster:` section of a configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rl_training.errors import UserError, explain


class ClusterSettings(BaseModel):
    """How a run is distributed over rollout actors and the driver, the process that learns."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    address: str = Field("local", min_length=1)
    """`local` starts Ray on this machine; host:port joins a cluster; `auto` finds the one on this machine."""
    actors: int = Field(2, ge=1, le=4096)
    """Rollout actors, each a process with its own environments."""
    envs_per_actor: int | None = Field(None, ge=1, le=4096)
    """Environments of each actor; empty: num_envs shared out among the actors."""
    inference: Literal["actor", "learner"] = "actor"
    """Where actions are chosen: by a copy of the policy in each actor, or for all actors together by the learner."""
    deterministic: bool = False
    """Synchronous and in a fixed order: the same numbers as in one process, bit for bit. Implies inference: learner."""
    replay_shards: int = Field(1, ge=1, le=256)
    """Processes that hold the replay buffer."""
    learners: int = Field(1, ge=1, le=64)
    """Processes that compute gradients and average them, each on a batch of its own."""
    unroll_length: int = Field(20, ge=1, le=4096)
    """Steps of each environment in one message to the replay; on-policy algorithms use n_steps."""
    queue: int = Field(2, ge=1, le=64)
    """Unrolls of an actor that may be in flight or waiting. More of them hide latency; fewer keep the policy fresh."""
    timeout: float = Field(60.0, gt=0.0)
    """Seconds without an answer after which an actor counts as stuck and is replaced."""
    cpus_per_actor: float = Field(1.0, ge=0.0)
    """CPUs that Ray reserves for an actor; fractions are allowed."""
    gpus_per_actor: float = Field(0.0, ge=0.0)
    """GPUs that Ray reserves for an actor, which then runs its policy there; fractions are allowed."""

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSettings:
        if self.synchronous and self.learners > 1:
            raise ValueError("learners > 1 needs inference: actor, without deterministic")
        for name, count in (("learners", self.learners), ("replay shards", self.replay_shards)):
            if count > self.actors:
                raise ValueError(f"{count} {name} need at least as many actors, not {self.actors}")
        return self

    @property
    def synchronous(self) -> bool:
        """Are the environments alone distributed, so that the loop of one process applies unchanged?"""
        return self.deterministic or self.inference == "learner"

    def __str__(self) -> str:
        where = f"{self.actors} actor{'s' * (self.actors > 1)} at {self.address}"
        return f"{where}, {'in a fixed order' if self.synchronous else 'asynchronous: not repeatable bit for bit'}"

    def envs_each(self, num_envs: int) -> int:
        """Environments of each actor in a run that asks for `num_envs` in all."""
        return self.envs_per_actor or max(1, num_envs // self.actors)


def distributed(settings: ClusterSettings, hyper: dict[str, Any]) -> dict[str, Any]:
    """An algorithm's settings in a distributed run. Actors really lag, so a lag must not be simulated as well."""
    if settings.synchronous or "policy_lag" not in hyper:
        return hyper
    return {**hyper, "policy_lag": 0, "store_log_probs": True}


def parse_cluster(values: Any) -> ClusterSettings | None:
    """Validate the section; the error is one sentence with the full name of the key."""
    if values is None or isinstance(values, ClusterSettings):
        return values
    if not isinstance(values, dict):
        raise UserError(f"cluster = {values!r}: must be a mapping such as {{actors: 8, envs_per_actor: 16}}")
    try:
        return ClusterSettings.model_validate(values)
    except ValidationError as error:
        raise UserError(f"cluster: {explain(error, ClusterSettings)}") from None
