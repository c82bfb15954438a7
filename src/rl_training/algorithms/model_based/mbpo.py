"""Model-based policy optimisation, MBPO (Janner et al. 2019, Algorithm 2): SAC on short rollouts of a learned model.

It owns a SAC and a `Dynamics`. Each turn collects like SAC; every `model_train_freq` turns the model is fitted until it
stops improving, then `rollout_batch` rollouts branch off real states, all in one batched call a step, and SAC learns
from batches of which `real_ratio` are real.
Deviations: see `Dynamics`; rollouts are refreshed when the model is, for all of the steps until the next fit.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, Phase, TrainState, Tree
from rl_training.algorithms.continuous.sac import SAC, SACFields, SACReplayHyper
from rl_training.algorithms.hyper import Hyper
from rl_training.algorithms.model_based.model_fit import DynamicsFields, DynamicsHyper, ModelBased
from rl_training.data.source import Source
from rl_training.data.storage import Batch
from rl_training.data.synthetic import SyntheticReplay
from rl_training.models.dynamics import Imagined
from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

POLICY = ("actor", "critic")  # SAC's own networks


class RolloutFields(SACFields, DynamicsFields):
    """Rollouts of the model and the batches made of them."""

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
    synthetic_buffer_size: int = Field(400_000, ge=1)
    """Model-made transitions kept for each seed."""

    @model_validator(mode="after")
    def _schedule(self) -> RolloutFields:
        if not 0 <= self.rollout_schedule[0] <= self.rollout_schedule[1]:
            raise ValueError(f"rollout_schedule = {list(self.rollout_schedule)} must be two rising steps of at least 0")
        if self.synthetic_buffer_size < self.rollout_batch:
            raise ValueError(
                f"synthetic_buffer_size = {self.synthetic_buffer_size} cannot hold one step of"
                f" rollout_batch = {self.rollout_batch} rollouts"
            )
        return self

    def length_at(self, env_steps: int) -> int:
        """Rollout length, linear between the two ends of the schedule and rounded down (Janner et al. 2019, C)."""
        last = self.rollout_length_final or self.rollout_length
        begin, end = self.rollout_schedule
        share = min(1.0, max(0.0, (env_steps - begin) / max(1, end - begin)))
        return int(self.rollout_length + share * (last - self.rollout_length) + 1e-9)


class MBPOHyper(RolloutFields, DynamicsHyper, SACReplayHyper):
    learning_starts: int = Field(1_000, ge=0)
    """Environment steps with random actions before the first update."""
    gradient_steps: int = Field(20, ge=-1)
    """Updates in a block; -1: one for each transition collected since the last block."""


R = TypeVar("R", bound=RolloutFields)


class MBPO(ModelBased[R]):
    Hyper: ClassVar[type[Hyper]] = MBPOHyper
    Policy: ClassVar[type[SAC[Any]]] = SAC  # what learns from the rollouts
    name = "mbpo"
    targets = SAC.targets

    @cached_property
    def sac(self) -> SAC[Any]:
        known = type(self.hp).model_fields
        fields = {name: getattr(self.hp, name) for name in self.Policy.Hyper.model_fields if name in known}
        return self.Policy(self.spec, seed=self.seed, device=self.device, num_envs=self.num_envs, **fields)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return {**self.sac.networks(spec), **super().networks(spec)}

    def init_extra(self) -> dict[str, Any]:
        return {**self.sac.init_extra(), **super().init_extra(), "policy_step": torch.zeros((), dtype=torch.int64)}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        policy = self.sac.init_optimizers({name: params[name] for name in POLICY})
        return {**policy, **super().init_optimizers(params)}

    # --- the policy ------------------------------------------------------------------------------------------------

    def policy_state(self, state: TrainState) -> TrainState:
        """The part that SAC knows, with its own step counter."""
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

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        return self.sac.select_action(self.policy_state(state), carry, obs, key, explore=explore)

    def init_carry(self, batch: int) -> Tree:
        return self.sac.init_carry(batch)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        return self.sac.value(self.policy_state(state), obs)

    # --- rollouts of the model ---------------------------------------------------------------------------------------

    def branch(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Start rollouts at real states."""
        alive = torch.ones_like(batch["frontier"]["alive"])
        rows = {"frontier": {"obs": batch["obs"], "alive": alive}}
        return state._replace(step=state.step + 1), Aux({"rollouts": alive.sum().to(torch.float32)}, rows=rows)

    def reward(self, imagined: Imagined) -> Tensor:
        """What the policy is paid for an imagined step."""
        return imagined.rewards

    def imagine(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One step of all rollouts; those that have ended add nothing."""
        obs, alive = batch["frontier"]["obs"], batch["frontier"]["alive"]
        carry = tree_map(lambda x: x.to(obs.device), self.init_carry(obs.shape[0]))
        _, actions, _ = self.select_action(state, carry, obs, rng.fold(key, 0), explore=True)
        imagined = self.dynamics.imagine(state, obs, actions, rng.fold(key, 1))
        # A rollout that left the range of float32 is of no use to anybody.
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

    # --- the runtime's view ------------------------------------------------------------------------------------------

    def sources(self) -> dict[str, Source]:
        hp = self.hp
        return {"synthetic": SyntheticReplay(self.spec, hp.synthetic_buffer_size, hp.rollout_batch, gamma=hp.gamma)}

    @property
    def real_rows(self) -> int:
        """Rows of a batch of the policy that are real; they come first."""
        return round(self.hp.real_ratio * self.hp.batch_size)  # type: ignore[attr-defined, no-any-return]

    def policy_phase(self, **fields: Any) -> Phase:
        """SAC on batches of real and model-made transitions."""
        hp: Any = self.hp
        real = self.real_rows
        made = hp.batch_size - real
        if not real:
            return Phase("policy", self.policy_step, "synthetic", **fields)
        return Phase("policy", self.policy_step, batch_size=real, also=("synthetic", made) if made else None, **fields)

    def rollout_phases(self, every: int) -> tuple[Phase, ...]:
        """Fresh rollouts: start them, then one call for each of their steps."""
        hp = self.hp
        fields: dict[str, Any] = {"every": every, "at_start": True, "sink": "synthetic", "learns": False}
        return (
            Phase("branch", self.branch, batch_size=hp.rollout_batch, **fields),
            Phase("imagine", self.imagine, None, times=hp.length_at, **fields),
        )

    def phases(self) -> tuple[Phase, ...]:
        hp: Any = self.hp
        return (
            *self.fit_phases(),
            *self.rollout_phases(hp.model_train_freq),
            self.policy_phase(every=hp.train_freq, times=hp.updates_per_block(self.num_envs)),
        )

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One step of the model and one of the policy on the same batch: the algorithm used on its own."""
        params, opt, fitted = self.dynamics.gradient_step(state, batch)
        state, aux = self.policy_step(state, batch, key)
        state = state._replace(params={**state.params, "model": params}, opt={**state.opt, "model": opt})
        return state, Aux({**aux.metrics, **fitted}, aux.priority)
