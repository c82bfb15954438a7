"""Model-based policy optimisation, MBPO (Janner et al. 2019, Algorithm 2): SAC on short rollouts of a learned model.
`ModelPolicy` is what MBPO and MOPO share.

A `ModelPolicy` owns a `Dynamics` and a SAC. When the model has been fitted, `rollout_batch` rollouts branch off real
states; each of their steps is one batched call. SAC then learns from batches with a share `real_ratio` of real rows.
MBPO collects like SAC; every `model_train_freq` turns it fits the model until it stops improving and makes rollouts.
The rollouts of the last `model_retain_epochs` epochs are kept: length x rollouts x fits transitions, which is more as
the rollouts grow longer.

Deviations: those of `Dynamics` (model_fit.py); rollouts are made when the model is fitted, for all steps until the next
fit.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.acting import start_carry
from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.continuous.sac import SAC, SACFields
from rl_training.algorithms.model_based.model_fit import Dynamics, DynamicsFields, DynamicsHyper, with_model
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.storage import Batch
from rl_training.data.synthetic import SyntheticReplay
from rl_training.models.dynamics import Imagined
from rl_training.ops import rng
from rl_training.spec import EnvSpec

POLICY = ("actor", "critic")  # SAC's own networks
EPOCH = 1_000  # environment steps


class RolloutFields(SACFields, DynamicsFields):
    """Settings of the model's rollouts and of the batches made of them."""

    batch_size: int = Field(256, ge=1)
    """Transitions in one update."""

    real_ratio: float = Field(0.05, ge=0.0, le=1.0)
    """Share of real transitions in the batches of the policy."""
    rollout_batch: int = Field(10_000, ge=1)
    """Rollouts that branch off real states after each fit of the model."""
    rollout_length: int = Field(1, ge=1)
    """Steps of each rollout, at first."""
    rollout_length_final: int | None = Field(None, ge=1)
    """Steps of each rollout at the end of the schedule; none: as at first."""
    rollout_schedule: tuple[int, int] = (20_000, 150_000)
    """Environment steps between which the length moves from the first to the final one."""
    model_retain_epochs: float = Field(1.0, gt=0.0)
    """Rollouts of this many epochs are kept. An epoch has 1,000 environment steps; offline, 1,000 updates."""

    @model_validator(mode="after")
    def _schedule(self) -> RolloutFields:
        if not 0 <= self.rollout_schedule[0] <= self.rollout_schedule[1]:
            raise ValueError(f"rollout_schedule = {list(self.rollout_schedule)} must be two rising steps of at least 0")
        return self

    def rollouts_every(self, num_envs: int) -> int:
        """Environment steps (offline: updates) between two sets of rollouts."""
        raise NotImplementedError

    def retained_sets(self, num_envs: int) -> int:
        """Sets of rollouts that are kept, at least one (the authors' `model_retain_epochs`)."""
        return max(1, round(self.model_retain_epochs * EPOCH / self.rollouts_every(num_envs)))

    @property
    def longest_rollout(self) -> int:
        return max(self.rollout_length, self.rollout_length_final or 1)

    def length_at(self, env_steps: int) -> int:
        """Rollout length, linear between the two ends of the schedule and rounded down (Janner et al. 2019, C)."""
        last = self.rollout_length_final or self.rollout_length
        begin, end = self.rollout_schedule
        share = min(1.0, max(0.0, (env_steps - begin) / max(1, end - begin)))
        return int(self.rollout_length + share * (last - self.rollout_length) + 1e-9)


M = TypeVar("M", bound=RolloutFields)


class ModelPolicy(Algorithm[M]):
    """Subclasses define `phases`: when the model is fitted, and when it makes rollouts."""

    Policy: ClassVar[type[SAC[Any]]] = SAC  # the class of the policy that learns from the rollouts
    actions = ("box",)
    bounded_actions = vector_observations = True
    targets = SAC.targets

    @cached_property
    def sac(self) -> SAC[Any]:
        return self.make_part(self.Policy)

    @cached_property
    def dynamics(self) -> Dynamics:
        return Dynamics(self.spec, self.hp).to(self.device)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return {**self.sac.networks(spec), "model": self.dynamics.network()}

    def init_extra(self) -> dict[str, Any]:
        own = {"dynamics": self.dynamics.init_extra(), "policy_step": torch.zeros((), dtype=torch.int64)}
        return {**self.sac.init_extra(), **own}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        policy = self.sac.init_optimizers({name: params[name] for name in POLICY})
        return {**policy, "model": self.dynamics.adam.init(params["model"])}

    # --- the policy ------------------------------------------------------------------------------------------------

    def policy_state(self, state: TrainState) -> TrainState:
        """The part of the state that belongs to SAC, with its own step counter."""
        return state._replace(
            params={name: state.params[name] for name in POLICY},
            opt={name: value for name, value in state.opt.items() if name != "model"},
            step=state.extra["policy_step"],
        )

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        new, aux = self.sac.train_step(self.policy_state(state), batch, key)
        state = new._replace(
            params={**new.params, "model": state.params["model"]},
            opt={**new.opt, "model": state.opt["model"]},
            extra={**new.extra, "policy_step": new.step},
            step=state.step + 1,
        )
        return state, Aux(aux.metrics)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        return self.sac.select_action(self.policy_state(state), carry, obs, key, explore=explore)

    def init_carry(self, batch: int) -> Tree:
        return self.sac.init_carry(batch)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        return self.sac.value(self.policy_state(state), obs)

    # --- rollouts of the model ---------------------------------------------------------------------------------------

    def branch(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Start new rollouts at real states."""
        alive = torch.ones_like(batch["frontier"]["alive"])
        rows = {"frontier": {"obs": batch["obs"], "alive": alive}}
        return state._replace(step=state.step + 1), Aux({"rollouts": alive.sum().to(torch.float32)}, rows=rows)

    def reward(self, imagined: Imagined) -> Tensor:
        """The reward of the policy for an imagined step."""
        return imagined.rewards

    def imagine(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One step of all rollouts; those that have ended add no rows."""
        obs, alive = batch["frontier"]["obs"], batch["frontier"]["alive"]
        carry = start_carry(self, obs.shape[0])
        _, actions, _ = self.select_action(state, carry, obs, rng.fold(key, 0), explore=True)
        imagined = self.dynamics.imagine(state, obs, actions, rng.fold(key, 1))
        # A rollout that left the range of float32 is dropped.
        finite = torch.isfinite(imagined.next_obs).all(-1) & torch.isfinite(imagined.rewards)
        keep = alive & finite
        rewards = self.reward(imagined)
        goes_on = keep & ~imagined.terminated
        next_obs = torch.where(keep.unsqueeze(-1), imagined.next_obs, obs)
        rows = {
            "obs": obs, "actions": actions, "rewards": rewards, "next_obs": next_obs,
            "terminated": imagined.terminated, "keep": keep, "frontier": {"obs": next_obs, "alive": goes_on},
        }  # fmt: skip
        count = keep.sum().clamp(min=1)

        def mean(x: Tensor) -> Tensor:
            kept: Tensor = torch.where(keep, x, 0.0).sum() / count
            return kept

        metrics = {
            "reward": mean(rewards), "uncertainty": mean(imagined.uncertainty),
            "disagreement": mean(imagined.disagreement), "alive": goes_on.to(torch.float32).mean(),
        }  # fmt: skip
        return state._replace(step=state.step + 1), Aux(metrics, rows=rows)

    # --- what the runtime calls --------------------------------------------------------------------------------------

    def sources(self, num_envs: int) -> dict[str, Any]:
        hp = self.hp
        sets = hp.retained_sets(num_envs)
        return {"synthetic": SyntheticReplay(self.spec, hp.rollout_batch, sets, hp.longest_rollout, gamma=hp.gamma)}

    @property
    def real_rows(self) -> int:
        """Rows of the policy's batches that are real; they come first."""
        return round(self.hp.real_ratio * self.hp.batch_size)

    def policy_phase(self, **fields: Any) -> ReplayPhase:
        """SAC on batches of real and model-made transitions."""
        real = self.real_rows
        made = self.hp.batch_size - real
        if not real:
            return ReplayPhase("policy", self.policy_step, "synthetic", **fields)
        also = ("synthetic", made) if made else None
        return ReplayPhase("policy", self.policy_step, batch_size=real, also=also, **fields)

    def imagination_phases(self, every: int) -> tuple[ReplayPhase, ...]:
        """New rollouts of the model: start them, then one call for each of their steps."""
        hp = self.hp
        fields: dict[str, Any] = {"every": every, "at_start": True, "sink": "synthetic", "learns": False}
        return (
            ReplayPhase("branch", self.branch, batch_size=hp.rollout_batch, **fields),
            ReplayPhase("imagine", self.imagine, None, times=hp.length_at, **fields),
        )

    def model_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One gradient step of the model alone."""
        params, opt, metrics = self.dynamics.gradient_step(state, batch)
        return with_model(state, params, opt), Aux(metrics)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One step of the model and one of the policy on the same batch: the algorithm used on its own."""
        params, opt, fitted = self.dynamics.gradient_step(state, batch)
        state, aux = self.policy_step(state, batch, key)
        state = state._replace(params={**state.params, "model": params}, opt={**state.opt, "model": opt})
        return state, Aux({**aux.metrics, **fitted}, aux.priority)


class MBPOHyper(RolloutFields, DynamicsHyper):
    learning_starts: int = Field(1_000, ge=0)
    gradient_steps: int = Field(20, ge=-1)

    def rollouts_every(self, num_envs: int) -> int:
        return self.model_train_freq * num_envs


class MBPO(ModelPolicy[MBPOHyper]):
    Hyper = MBPOHyper
    name = "mbpo"

    def phases(self) -> tuple[ReplayPhase, ...]:
        hp = self.hp
        return (
            *self.dynamics.online_phases(hp),
            *self.imagination_phases(hp.model_train_freq),
            self.policy_phase(every=hp.train_freq, times=hp.updates_per_block(self.num_envs)),
        )
