"""Phasic policy gradient (Cobbe et al. 2021): PPO with separate networks, and every few rollouts an auxiliary phase
that distils the value function into the policy's features while a KL term keeps the policy where it is.

Settings are the paper's, except those that were chosen for Procgen.

Deviations: with normalised observations, the auxiliary phase reads them as they were normalised when they were
collected.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import OnPolicyHyper, Positive, constant
from rl_training.algorithms.phases import RolloutPhase, Window
from rl_training.algorithms.policy_gradient.base import Params, PolicyGradient
from rl_training.algorithms.policy_gradient.ppo import clipped_objective
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.layers import Scalar
from rl_training.models.policy import Actor
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean, weighted_normalise


class PPGHyper(OnPolicyHyper):
    n_epochs: int = Field(1, ge=1)
    """Passes over each rollout in the policy phase, for policy and critic (E_pi = E_V)."""
    n_policy_phases: int = Field(32, ge=2)
    """Rollouts between two auxiliary phases, which learn from all of them (N_pi)."""
    n_aux_epochs: int = Field(6, ge=1)
    """Passes over these rollouts in the auxiliary phase (E_aux)."""
    aux_batch_size: int = Field(256, ge=1)
    """Transitions in one update of the auxiliary phase; must divide n_steps x num_envs x n_policy_phases."""
    beta_clone: float = Field(1.0, ge=0.0)
    """Weight of the KL term that keeps the policy in the auxiliary phase."""
    clip_range: Positive = constant(0.2)
    """How far the probability ratio may move before its gradient stops; a number or a schedule."""
    ent_coef: Positive = constant(0.01)
    """Weight of the entropy bonus; a number or a schedule."""
    normalize_advantage: bool = True
    """Standardise the advantages of each minibatch."""

    def updates_per_rollout(self, num_envs: int) -> int:
        return (
            super().updates_per_rollout(num_envs) + self.n_aux_epochs * self.n_steps * num_envs // self.aux_batch_size
        )

    def check_rollout(self, num_envs: int) -> None:
        super().check_rollout(num_envs)
        if self.n_steps * num_envs * self.n_policy_phases % self.aux_batch_size:
            raise UserError(
                f"aux_batch_size = {self.aux_batch_size} must divide n_steps x num_envs x n_policy_phases ="
                f" {self.n_steps} x {num_envs} x {self.n_policy_phases}"
            )


class PhasicActor(Actor):
    """A policy with an auxiliary value head on its features."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.aux_head = Scalar(self.features, gain=1.0)

    def forward(self, obs: Tensor, part: str = "policy") -> Any:
        features = self.actor_torso(obs)
        return self.head(features) if part == "policy" else (self.head(features), self.aux_head(features))


class PPG(PolicyGradient[PPGHyper]):
    Hyper = PPGHyper
    name = "ppg"
    separate = True
    actor_class = PhasicActor

    def rollout_phases(self) -> tuple[RolloutPhase, ...]:
        hp = self.hp
        window = Window(hp.n_policy_phases, ("obs", "returns", "weights", "mask"), self.begin_auxiliary)
        return (
            *super().rollout_phases(),
            RolloutPhase("auxiliary", self.auxiliary_step, every=hp.n_policy_phases, times=hp.n_aux_epochs,
                         batch_size=hp.aux_batch_size, window=window),
        )  # fmt: skip

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Policy phase: the clipped objective for the actor, the squared error for the critic (algorithm 1)."""
        hp, weights = self.hp, batch["weights"]
        advantages = weighted_normalise(batch["advantages"], weights) if hp.normalize_advantage else batch["advantages"]
        clip, ent_coef = hp.clip_range(state.progress), hp.ent_coef(state.progress)

        def loss(params: Params) -> tuple[Tensor, dict[str, Tensor]]:
            out, values = self.outputs(params, batch["obs"])
            loss, entropy, kl, _ = clipped_objective(self.dist, out, batch, advantages, clip)
            value = weighted_mean(0.5 * (values - batch["returns"]) ** 2, weights)
            metrics = {"policy_loss": loss, "value_loss": value, "entropy": entropy, "approx_kl": kl}
            return loss - ent_coef * entropy + value, metrics

        return self._step(state, loss)

    def begin_auxiliary(self, state: TrainState, batch: Batch) -> Batch:
        """Add the outputs of the policy before the first step: the KL term keeps the policy close to them."""
        return {**batch, "old_out": self.policy_out(state.params, batch["obs"])}

    def auxiliary_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """L_joint for the actor and L_value for the critic (algorithm 1)."""
        hp, weights, mask = self.hp, batch["weights"], batch.get("mask")

        def loss(params: Params) -> tuple[Tensor, dict[str, Tensor]]:
            out, aux_values = self.nets["actor"](params["actor"], batch["obs"], "both")
            aux = weighted_mean(0.5 * (aux_values - batch["returns"]) ** 2, weights)
            clone = weighted_mean(self.dist.kl(batch["old_out"], out, mask), weights)
            value = weighted_mean(0.5 * (self.values(params, batch["obs"]) - batch["returns"]) ** 2, weights)
            return aux + hp.beta_clone * clone + value, {"aux_loss": aux, "clone_kl": clone, "aux_value_loss": value}

        return self._step(state, loss)

    def _step(self, state: TrainState, loss: Any) -> tuple[TrainState, Aux]:
        _, metrics, grads = value_and_grad(loss, state.params)
        rate = self.hp.learning_rate(state.progress)
        new = {k: self.optim.update(grads[k], state.opt[k], flat, rate) for k, flat in state.params.items()}
        params, opt = {k: v[0] for k, v in new.items()}, {k: v[1] for k, v in new.items()}
        return state._replace(params=params, opt=opt, step=state.step + 1), Aux(metrics)
