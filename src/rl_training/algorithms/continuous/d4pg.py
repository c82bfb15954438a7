"""Distributional deterministic policy gradients, D4PG (Barth-Maron et al. 2018), in one process.

The critic is a categorical distribution over fixed atoms, learned from n-step returns with the projection of C51; the
actor climbs its expected value. Both learn in one backward pass, from the weights before the update (Algorithm 1).
Deviations: no distributed actors (`num_envs` collects in parallel); uniform replay unless `prioritized`;
Polyak-averaged targets instead of periodic copies.
"""

from __future__ import annotations

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import Behaviour, ContinuousControl, DeterministicHyper
from rl_training.algorithms.hyper import Positive, constant
from rl_training.data.storage import Batch
from rl_training.models.control import D4PGModel
from rl_training.ops import categorical
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec


class D4PGHyper(DeterministicHyper):
    learning_rate: Positive = constant(3e-4)
    """Step size of the optimiser; a number or a schedule."""
    n_step: int = Field(5, ge=1)
    """Rewards summed before bootstrapping."""
    exploration_noise: Positive = constant(0.2)
    """Standard deviation of the noise added to the actions, which lie in [-1, 1]; a number or a schedule."""
    num_atoms: int = Field(51, ge=2)
    """Atoms of the value distribution."""
    v_min: float = -150.0
    """Smallest return that can be represented."""
    v_max: float = 150.0
    """Largest return that can be represented."""
    layer_norm: bool = True
    """LayerNorm in the critic."""

    @model_validator(mode="after")
    def _ordered(self) -> D4PGHyper:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min = {self.v_min} must be below v_max = {self.v_max}")
        return self


def d4pg_loss(
    logits: Tensor, policy_logits: Tensor, target_probs: Tensor, atoms: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """The critic's loss, which is the cross-entropy to the projected target (Eq. 6), the actor's, which is minus the
    expected value (Eq. 4), and means over the batch.

    `logits` [B, Z] belong to the actions taken, `policy_logits` to the actor's. The gradient of `actor_loss` must reach
    the actor only: compute `policy_logits` with detached parameters of the critic.
    """
    policy_q = policy_logits.softmax(-1) @ atoms
    return {
        "critic_loss": weighted_mean(categorical.cross_entropy(logits, target_probs), weights),
        "actor_loss": -weighted_mean(policy_q, weights),
        "target_q_mean": weighted_mean(target_probs @ atoms, weights),
        "q_value_mean": weighted_mean(logits.softmax(-1) @ atoms, weights),
    }


class D4PG(ContinuousControl[D4PGHyper]):
    Hyper = D4PGHyper
    name = "d4pg"
    targets = ("actor", "critic")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        model = D4PGModel(
            spec, hp.hidden_sizes, num_atoms=hp.num_atoms, v_min=hp.v_min, v_max=hp.v_max, activation=hp.activation,
            layer_norm=hp.layer_norm,
        )  # fmt: skip
        return self.named_networks(model)

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        assert isinstance(network, D4PGModel)
        self.atoms = network.support.to(self.device)  # a model that the user built has its own atoms
        return super().named_networks(network)

    def policy(self, params: Tensor, obs: Obs) -> Tensor:
        """mu(s) in [-1, 1]: [B, A]."""
        return torch.tanh(self.nets["actor"](params, obs))

    def logits(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the atoms: [B, Z]."""
        logits: Tensor = self.nets["critic"](params, obs, actions)[0]
        return logits

    def target_probs(self, state: TrainState, batch: Batch) -> Tensor:
        """The projected n-step target distribution: [B, Z]."""
        next_action = self.policy(state.target["actor"], batch["next_obs"])
        next_probs = self.logits(state.target["critic"], batch["next_obs"], next_action).softmax(-1)
        return categorical.project(next_probs, batch["rewards"], batch["discounts"], self.atoms)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, obs = self.hp, batch["obs"]
        rate = hp.learning_rate(state.progress)
        target_probs = self.target_probs(state, batch)

        def loss(params: dict[str, Tensor]) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]:
            logits = self.logits(params["critic"], obs, batch["actions"])
            policy_logits = self.logits(params["critic"].detach(), obs, self.policy(params["actor"], obs))
            metrics = d4pg_loss(logits, policy_logits, target_probs, self.atoms, batch["weights"])
            priority = categorical.cross_entropy(logits, target_probs)
            return metrics["critic_loss"] + metrics["actor_loss"], (metrics, priority)

        _, (metrics, priority), grads = value_and_grad(loss, state.params)
        params, opt, slow = {}, {}, {}
        for name in self.targets:
            params[name], opt[name] = self.adam.update(grads[name], state.opt[name], state.params[name], rate)
            slow[name] = polyak(state.target[name], params[name], hp.tau)
        return state._replace(params=params, target=slow, opt=opt, step=state.step + 1), Aux(metrics, priority)

    def behaviour(self, state: TrainState, obs: Obs) -> Behaviour:
        out, features = self.nets["actor"](state.params["actor"], obs, True)
        return Behaviour(torch.tanh(out), self.hp.exploration_noise(state.progress), features)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Expected value of the deterministic action."""
        return self.logits(state.params["critic"], obs, self.greedy(state, obs)).softmax(-1) @ self.atoms
