"""Discriminator-actor-critic, DAC (Kostrikov et al. 2019): adversarial imitation off-policy. A discriminator tells the
expert's (state, action) pairs from those in the replay buffer; TD3 learns from the replay buffer with the reward
log D - log(1 - D), which is recomputed for every batch.

A gradient penalty keeps the discriminator smooth. Absorbing states are those of gail.py: each side contains the
absorbing state in proportion to the time that its discounted episodes spend there, and rewards are relative to the
absorbing state's, so that terminal states need no special treatment. The shares of terminations are moving averages.

Deviations: the policy learns before the discriminator, one update each in turn (the paper learns after each episode,
for as many updates as it had steps); absorbing states enter by their expected share, not as rows; no importance
weights, as in the paper's own experiments; TD3's step size is constant and its gradients are not clipped (paper: halved
every 100k steps, actor's gradients clipped at 40).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.continuous.critics.base import Extra
from rl_training.algorithms.continuous.td3 import TD3, TD3Hyper
from rl_training.algorithms.hyper import Positive, Widths, constant
from rl_training.algorithms.imitation.discriminator import (
    DiscriminatorFields,
    Inputs,
    cross_entropy,
    penalised,
    with_absorbing,
)
from rl_training.algorithms.phases import ReplayPhase
from rl_training.algorithms.prior_data import ExpertDataFields
from rl_training.data.dataset import DatasetSource
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.imitation import MLPGAILDiscriminator, action_code
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer
from rl_training.spec import EnvSpec

RATE = 0.01  # of the moving averages of the terminations


class DACHyper(TD3Hyper, DiscriminatorFields, ExpertDataFields):
    learning_starts: int = Field(1_000, ge=0)
    discriminator_hidden_sizes: Widths = (256, 256)
    discriminator_learning_rate: Positive = constant(1e-3)
    discriminator_batch_size: int = Field(256, ge=1)
    """Transitions of the policy, and as many of the expert, in one update of the discriminator."""
    gradient_penalty: float = Field(10.0, ge=0.0)

    @model_validator(mode="after")
    def _single_steps(self) -> DACHyper:
        if self.n_step != 1 or self.prioritized or self.her is not None:
            raise ValueError("the reward is learned from single transitions: leave n_step, prioritized and her")
        return self


class DAC(TD3[DACHyper]):
    Hyper = DACHyper
    name = "dac"
    vector_observations = True

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        sizes = self.hp.discriminator_hidden_sizes
        discriminator = MLPGAILDiscriminator(spec.obs_dim, spec.action.dim, sizes, "tanh")
        return {**super().networks(spec), "discriminator": discriminator}

    def setup(self) -> None:
        super().setup()
        self.adam = Optimizer(kind=self.hp.optimizer)

    def init_extra(self) -> Extra:
        return {
            **super().init_extra(),
            "endings": torch.zeros(2),  # share of terminations: the policy's, the expert's
            "fits": torch.zeros((), dtype=torch.int64),
        }

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {**super().init_optimizers(params), "discriminator": self.adam.init(params["discriminator"])}

    # --- the discriminator -------------------------------------------------------------------------------------------

    def inputs(self, obs: Tensor, actions: Tensor) -> Inputs:
        """Inputs of the network: each row, then the absorbing state."""
        return with_absorbing(obs, action_code(self.spec.action, actions))

    def judge(self, params: Tensor, *inputs: Tensor) -> Tensor:
        """log D / (1 - D) of its inputs."""
        logits: Tensor = self.nets["discriminator"](params, *inputs)
        return logits

    def rewards(self, state: TrainState, obs: Tensor, actions: Tensor) -> Tensor:
        """log D - log(1 - D) of each row; with absorbing states, relative to theirs."""
        logits = self.judge(state.params["discriminator"], *self.inputs(obs, actions))
        return logits[:-1] - logits[-1] if self.hp.absorbing_states else logits[:-1]

    def fit(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor]]:
        """(the state, metrics) after one step of the discriminator on labelled rows."""
        hp, labels, weights, extra = self.hp, batch["labels"], batch["weights"], state.extra
        ended = (batch["discounts"] == 0.0).to(torch.float32)
        seen = torch.stack([weighted_mean(ended, weights * (1.0 - labels)), weighted_mean(ended, weights * labels)])
        rate = (1.0 / (extra["fits"] + 1)).clamp(min=RATE)
        endings = torch.lerp(extra["endings"], seen, rate)
        mass = hp.absorbing_steps * torch.where(labels > 0.5, endings[1], endings[0])
        inputs = self.inputs(self.reader.normalised(extra, batch["obs"]), batch["actions"])

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits = self.judge(params, *inputs)
            error = weighted_mean(cross_entropy(logits[:-1], logits[-1], labels, mass), weights)
            correct = ((logits[:-1] > 0) == (labels > 0.5)).to(torch.float32)
            metrics = {
                "discriminator_loss": error,
                "discriminator_accuracy": weighted_mean(correct, weights),
                "absorbing_logit": logits[-1],
            }
            judge = partial(self.judge, params)
            value, penalty = penalised(error, hp.gradient_penalty, judge, inputs, labels, weights, mass, key)
            return value, metrics | penalty

        step_size = hp.discriminator_learning_rate(state.progress)
        after, _, metrics = self.descend(state, "discriminator", loss, step_size, self.adam)
        return after._replace(extra={**extra, "endings": endings, "fits": extra["fits"] + 1}), metrics

    def discriminator_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Update on rows of the replay buffer, followed by as many of the expert."""
        rows = torch.arange(2 * self.hp.discriminator_batch_size, device=batch["weights"].device)
        labels = (rows >= self.hp.discriminator_batch_size).to(torch.float32)
        state, metrics = self.fit(state, {**batch, "labels": labels}, key)
        return state, Aux(metrics)

    # --- the policy --------------------------------------------------------------------------------------------------

    def critic_step(
        self, state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        rewards = self.rewards(state, batch["obs"], batch["actions"])
        return super().critic_step(state, {**batch, "rewards": rewards}, key)

    def train_step(
        self, state: TrainState, batch: Batch, key: Tensor, actor: bool | None = None
    ) -> tuple[TrainState, Aux]:
        """TD3 on the policy's rows. If rows are labelled, the algorithm is used on its own, and the discriminator
        learns from them as well; in a run it has a phase for that."""
        if "labels" not in batch:
            return super().train_step(state, batch, key, actor)
        own = {**batch, "weights": batch["weights"] * (1.0 - batch["labels"])}
        state, aux = super().train_step(state, own, key, actor)
        state, metrics = self.fit(state, batch, key)
        return state, Aux({**aux.metrics, **metrics}, aux.priority)

    # --- what the runtime calls --------------------------------------------------------------------------------------

    def sources(self, num_envs: int) -> dict[str, Any]:
        if self.dataset is None:
            raise UserError(f"{self.name} imitates an expert; no dataset of its transitions was given")
        return {"expert": DatasetSource(self.dataset, self.hp.gamma)}

    def phases(self) -> tuple[ReplayPhase, ...]:
        rows = self.hp.discriminator_batch_size
        policy = super().phases()
        discriminator = policy[0]._replace(
            name="discriminator", step=self.discriminator_step, between=None, period=1, batch_size=rows, learns=False,
            also=("expert", rows), clock=lambda state: -1 - state.extra["fits"],
        )  # fmt: skip
        return (*policy, discriminator)
