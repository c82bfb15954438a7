"""Distributional deterministic policy gradients, D4PG (Barth-Maron et al. 2018), in one process.

The critic is a categorical distribution over atoms, learned from n-step returns with the projection of C51; the
actor climbs its expected value. Both learn in one backward pass, from the weights before the update (Algorithm 1).
By default the range of the atoms is found in training (algorithms/support.py).

Deviations: no distributed actors (`num_envs` collects in parallel); uniform replay unless `prioritized`;
Polyak-averaged targets instead of periodic copies.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.continuous.base import ContinuousControl, DeterministicHyper
from rl_training.algorithms.hyper import Positive, constant
from rl_training.algorithms.support import Support, SupportFields
from rl_training.data.storage import Batch
from rl_training.models.control import D4PGModel
from rl_training.ops import categorical
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec


class D4PGHyper(SupportFields, DeterministicHyper):
    learning_rate: Positive = constant(3e-4)
    n_step: int = Field(5, ge=1)
    exploration_noise: Positive = constant(0.2)
    layer_norm: bool = True
    """LayerNorm in the critic."""


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
        bounds: dict[str, Any] = {} if isinstance(hp.v_min, str) else {"v_min": hp.v_min, "v_max": hp.v_max}
        model = D4PGModel(
            spec, hp.hidden_sizes, num_atoms=hp.num_atoms, activation=hp.activation, layer_norm=hp.layer_norm, **bounds
        )
        return self.named_networks(model)

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        assert isinstance(network, D4PGModel)
        self.atoms = network.support.to(self.device)
        return super().named_networks(network)

    def setup(self) -> None:
        super().setup()
        hp, low, high = self.hp, self.hp.v_min, self.hp.v_max
        if self.given:  # a model that the user built has its own atoms
            low, high = float(self.atoms[0]), float(self.atoms[-1])
        self.support = Support(len(self.atoms), low, high, hp.gamma**hp.n_step, self.device)

    def init_extra(self) -> dict[str, Any]:
        return {**super().init_extra(), **self.support.init_extra()}

    def atoms_of(self, state: TrainState) -> Tensor:
        """The atoms z_i: [Z]."""
        bounds = self.support.bounds(state.extra)
        return self.atoms if bounds is None else self.support.atoms(bounds)

    def policy(self, params: Tensor, obs: Obs) -> Tensor:
        """mu(s) in [-1, 1]: [B, A]."""
        return torch.tanh(self.nets["actor"](params, obs))

    def logits(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Unnormalised log-probabilities of the atoms: [B, Z]."""
        logits: Tensor = self.nets["critic"](params, obs, actions)[0]
        return logits

    def target_probs(self, state: TrainState, batch: Batch) -> Tensor:
        """The projected n-step target distribution: [B, Z]."""
        return self.target(state, batch)[0]

    def target(self, state: TrainState, batch: Batch) -> tuple[Tensor, Tensor]:
        """(the projected n-step target distribution [B, Z], its mean before the projection [B])"""
        atoms = self.atoms_of(state)
        next_action = self.policy(state.target["actor"], batch["next_obs"])
        next_probs = self.logits(state.target["critic"], batch["next_obs"], next_action).softmax(-1)
        probs = categorical.project(next_probs, batch["rewards"], batch["discounts"], atoms)
        return probs, batch["rewards"] + batch["discounts"] * (next_probs @ atoms)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp = self.hp
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        state = self.support.hold_rewards(state, batch)
        rate, obs, atoms = hp.learning_rate(state.progress), batch["obs"], self.atoms_of(state)
        target_probs, expected = self.target(state, batch)

        def loss(params: dict[str, Tensor]) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]:
            logits = self.logits(params["critic"], obs, batch["actions"])
            policy_logits = self.logits(params["critic"].detach(), obs, self.policy(params["actor"], obs))
            metrics = d4pg_loss(logits, policy_logits, target_probs, atoms, batch["weights"])
            priority = categorical.cross_entropy(logits, target_probs)
            return metrics["critic_loss"] + metrics["actor_loss"], (metrics, priority)

        _, (metrics, priority), grads = value_and_grad(loss, state.params)
        params, opt, slow = {}, {}, {}
        for name in self.targets:
            params[name], opt[name] = self.optim.update(grads[name], state.opt[name], state.params[name], rate)
            slow[name] = polyak(state.target[name], params[name], hp.tau)
        state, clipped = self.support.widen(state, target_probs @ atoms - expected, batch["weights"])
        state = state._replace(params=params, target=slow, opt=opt, step=state.step + 1)
        return state, Aux({**metrics, "target_clipped": clipped}, priority)

    def advice(self, metrics: dict[str, float]) -> str | None:
        return self.support.warning(self.name, metrics.get("train/target_clipped", 0.0))

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Expected value of the deterministic action."""
        seen = self.reader.normalised(state.extra, obs)
        return self.logits(state.params["critic"], seen, self.greedy(state, obs)).softmax(-1) @ self.atoms_of(state)
