"""Control from pixels by DrQ-v2 (Yarats et al. 2021): DDPG with twin critics, n-step returns, random shifts of images,
and one encoder that the critics' loss trains.

Exploration, the target's next action and the action that improves the policy share one deviation, which falls in
training; the noise of the last two is clipped (section 3.1). There is no target network of the actor or the encoder.
For images, runs shift them and share the drq encoder by default; vectors have neither. The presets stack three frames
and repeat actions, as in the paper.

Deviations: the deviation falls over a share of the run (`exploration_noise`; the paper's 100 000 steps are 20 % of a
run of a million frames); n-step returns that the end of an episode cuts short are used as well; transitions are
sampled uniformly, instead of first an episode and then a transition in it.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import ContinuousControl, DeterministicHyper
from rl_training.algorithms.continuous.critics.base import Owner
from rl_training.algorithms.continuous.critics.ensemble import TwinCritic
from rl_training.algorithms.continuous.shared import SharedEncoderFields, make_networks
from rl_training.algorithms.hyper import Positive, Widths, constant
from rl_training.data.storage import Batch
from rl_training.models.control import TD3Model
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import polyak
from rl_training.ops.schedules import Schedule
from rl_training.spec import EnvSpec


def _falling() -> Schedule:
    return Schedule(kind="linear", start=1.0, end=0.1, fraction=0.2)


class DrQV2Hyper(SharedEncoderFields, DeterministicHyper):
    learning_rate: Positive = constant(1e-4)
    hidden_sizes: Widths = (1024, 1024)
    tau: float = Field(0.01, gt=0.0, le=1.0)
    n_step: int = Field(3, ge=1)
    train_freq: int = Field(2, ge=1)
    learning_starts: int = Field(2_000, ge=0)
    exploration_noise: Positive = Field(default_factory=_falling)
    """Standard deviation of the noise added to actions, which lie in [-1, 1], in acting and in learning; a number or a
    schedule."""
    noise_clip: float = Field(0.3, gt=0.0)
    """In learning, the exploration noise is clipped to this size."""


class DrQV2(ContinuousControl[DrQV2Hyper]):
    Hyper = DrQV2Hyper
    name = "drq_v2"
    targets = ("critic",)
    kind_defaults = {"images": {"augment": "shift", "shared_encoder": "drq"}}

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp

        def model(seen: EnvSpec) -> nn.Module:
            return TD3Model(seen, hp.hidden_sizes, activation=hp.activation)

        return self.named_networks(make_networks(hp, spec, self.name, model, "twin", can_share=True))

    def setup(self) -> None:
        super().setup()
        self.critic = TwinCritic(Owner(self, None, 1.0, "smallest", self.encoder))

    def noisy(self, out: Tensor, deviation: Tensor | float, key: Tensor) -> Tensor:
        """Actions [B, A] with clipped noise, for the actor's outputs. Gradients pass the bounds (straight through)."""
        noise = deviation * rng.normal(key, tuple(out.shape))
        action = torch.tanh(out) + noise.clamp(-self.hp.noise_clip, self.hp.noise_clip)
        return action + (action.clamp(-1.0, 1.0) - action).detach()

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, weights, deviation = self.hp, batch["weights"], self.hp.exploration_noise(state.progress)
        state, batch = self.reader.learn(state, batch, weights, key)
        batch = self.read_next(state, batch)
        next_out = self.actor_net(state.params["actor"], state.extra, batch["next_obs"])
        next_action = self.noisy(next_out, deviation, rng.fold(key, 0))
        state, batch, metrics, error = self.critic.update(state, batch, next_action, None, key)
        obs, critic = batch["obs"], state.params["critic"]

        def actor_loss(params: Tensor) -> tuple[Tensor, Any]:
            out = self.actor_net(params, state.extra, obs)
            action = self.noisy(out, deviation, rng.fold(key, 1))
            return -weighted_mean(self.critic.policy_value(critic, state.extra, obs, action, None), weights), ()

        state, loss, _ = self.descend(state, "actor", actor_loss)
        slow = {"critic": polyak(state.target["critic"], critic, hp.tau)}
        return state._replace(target=slow, step=state.step + 1), Aux({**metrics, "actor_loss": loss}, error)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The smaller critic's value of the deterministic action."""
        return self.critic.value(state.params["critic"], state.extra, self.read(state, obs), self.greedy(state, obs))
