"""Model-based policy optimisation, MBPO (Janner et al. 2019, Algorithm 2): SAC on short rollouts of a learned model.

Each turn collects like SAC. Every `model_train_freq` turns the model is fitted until it stops improving, and new
rollouts are made.
Deviations: see `Dynamics`; rollouts are made when the model is fitted, for all steps until the next fit.
"""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.model_based.model_fit import DynamicsHyper
from rl_training.algorithms.model_based.model_policy import ModelPolicy, RolloutFields
from rl_training.algorithms.phases import ReplayPhase


class MBPOHyper(RolloutFields, DynamicsHyper):
    learning_starts: int = Field(1_000, ge=0)
    """Environment steps with random actions before the first update."""
    gradient_steps: int = Field(20, ge=-1)
    """Updates in a block; -1: one for each transition collected since the last block."""


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
