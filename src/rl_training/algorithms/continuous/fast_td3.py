"""FastTD3: TD3 for many simulated environments (Seo et al. 2025, "FastTD3: Simple, Fast, and Capable Reinforcement
Learning for Humanoid Control").

Few updates on large batches replace many on small ones: two updates on 32 768 transitions for each step of 128
environments. The critics are categorical distributions (critics/categorical.py), and their target networks follow after
every update; the actor has no target network. Exploration is mixed: each episode draws the standard deviation of its
noise, so that careful and bold episodes are collected side by side.

The defaults are those of the authors' code for HumanoidBench. Its batch has 256 rows for each of the 128 environments.
A run with fewer environments also takes 256 for each (`batch_per_env`); with one, that is TD3's usual batch.

Deviations: the support of the critics is found in training by default (the authors choose it for each task; their
default is [-250, 250]); observation statistics are computed from replayed observations alone, not also from those acted
on; the actor learns at updates 1, 3, 5, ... instead of 2, 4, 6, ...; noisy actions are clipped to their bounds; there
are no observations that only the critic sees; replay holds `buffer_size` transitions in all, instead of 51 200 of each
environment.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Choice, Obs, TrainState, Tree
from rl_training.algorithms.continuous.base import DeterministicHyper
from rl_training.algorithms.continuous.critics.base import CriticOptions
from rl_training.algorithms.continuous.critics.categorical import CategoricalCritic, CategoricalOptions
from rl_training.algorithms.continuous.td3 import TD3, TD3Fields
from rl_training.algorithms.hyper import Positive, Widths, constant
from rl_training.algorithms.phases import ReplayPhase
from rl_training.algorithms.support import SupportFields
from rl_training.data.storage import Batch
from rl_training.models.control import Actor, EnsembleCritic
from rl_training.ops import rng
from rl_training.spec import EnvSpec

HEAD_DEVIATION = 0.01  # of the actor's initial output weights: the first actions are close to zero
SCALE = 1  # random stream of an episode's noise scale; the noise itself has the key


class FastTD3Hyper(SupportFields, TD3Fields, DeterministicHyper):
    num_envs: ClassVar[int] = 16
    learning_rate: Positive = constant(3e-4)
    hidden_sizes: Widths = (512, 256, 128)
    """Widths of the hidden layers of the actor."""
    critic_hidden_sizes: Widths = (1024, 512, 256)
    """Widths of the hidden layers of the critics."""
    batch_size: int = Field(32_768, ge=1)
    """Transitions in one update, at most: see `batch_per_env`."""
    batch_per_env: int = Field(256, ge=0)
    """An update has at most this many transitions for each environment; 0: no such limit."""
    learning_starts: int = Field(1_280, ge=0)
    gradient_steps: int = Field(2, ge=-1)
    tau: float = Field(0.1, gt=0.0, le=1.0)
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "adamw"
    weight_decay: float = Field(0.1, ge=0.0)
    target_policy_noise: float = Field(0.001, ge=0.0)
    exploration_noise: Positive = constant(0.4)
    """Largest standard deviation of the noise added to the actions, which lie in [-1, 1]; a number or a schedule. Each
    episode draws its own, uniformly."""
    exploration_noise_min: float = Field(0.001, ge=0.0)
    """Smallest standard deviation of the exploration noise."""
    num_atoms: int = Field(101, ge=2)

    @model_validator(mode="after")
    def _noise_has_a_range(self) -> FastTD3Hyper:
        if self.exploration_noise_min > self.exploration_noise.start:
            raise ValueError(
                f"exploration_noise_min = {self.exploration_noise_min:g} must not be above exploration_noise ="
                f" {self.exploration_noise.start:g}"
            )
        return self

    def critic_options(self) -> CriticOptions:
        return CategoricalOptions.of(self)


class FastTD3(TD3[FastTD3Hyper]):
    Hyper = FastTD3Hyper
    name = "fast_td3"
    climbs = "smallest"
    kind_defaults = {"continuous": {"normalize_observations": True}}

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        actor = Actor(spec, spec.action.dim, hp.hidden_sizes, hp.activation, hp.network)
        nn.init.normal_(actor.head.weight, 0.0, HEAD_DEVIATION)
        nn.init.zeros_(actor.head.bias)
        critic = EnsembleCritic(
            spec, hp.num_critics, hp.critic_hidden_sizes, hp.activation, outputs=hp.num_atoms, network=hp.network
        )
        return {"actor": actor, "critic": critic}

    def setup(self) -> None:
        super().setup()
        self.targets = ("critic",)

    def phases(self) -> tuple[ReplayPhase, ...]:
        hp = self.hp
        rows = min(hp.batch_size, hp.batch_per_env * self.num_envs) if hp.batch_per_env else hp.batch_size
        return tuple(phase._replace(batch_size=rows) for phase in super().phases())

    # --- learning ------------------------------------------------------------------------------------------------

    def critic_step(
        self, state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        state, batch, metrics, error = super().critic_step(state, batch, key)
        return super().follow(state), batch, metrics, error  # after every update, not only after those of the policy

    def follow(self, state: TrainState) -> TrainState:
        return state

    def advice(self, metrics: dict[str, float]) -> str | None:
        assert isinstance(self.critic, CategoricalCritic)
        return self.critic.support.warning(self.name, metrics.get("train/target_clipped", 0.0))

    # --- acting --------------------------------------------------------------------------------------------------

    def init_carry(self, batch: int) -> Tree:
        """`scale`: where an episode's noise lies between the smallest and the largest; -1: not drawn yet."""
        return {"process": super().init_carry(batch), "scale": torch.full((batch, 1), -1.0)}

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        mean, largest, features = self.behaviour(state, self.reader.normalised(state.extra, obs))
        if explore:
            drawn = rng.uniform(rng.fold(key, SCALE), (mean.shape[0], 1))
            scale = torch.where(carry["scale"] < 0.0, drawn, carry["scale"])
            process, noise = self.exploration.noise(carry["process"], key, mean.shape[0], features)
            smallest = self.hp.exploration_noise_min
            mean = mean + (smallest + scale * (largest - smallest)) * noise
            carry = {"process": process, "scale": scale}
        return carry, mean.clamp(-1.0, 1.0), {}
