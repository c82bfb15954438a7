"""Twin critics whose values are categorical distributions over atoms, as in FastTD3 (Seo et al. 2025).

The target of all critics is the projected distribution of the critic whose target has the smallest mean: clipped double
Q-learning for distributions. The mean is that after the projection, in which atoms beyond the support are moved to its
ends.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.critics.base import Critic, CriticOptions, Extra, Owner
from rl_training.algorithms.support import Support, SupportFields
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.layers import EnsembleLinear
from rl_training.ops import categorical
from rl_training.ops.losses import weighted_mean


class CategoricalOptions(SupportFields, CriticOptions):
    can_share: ClassVar[bool] = False
    kind: Literal["categorical"] = "categorical"

    def build(self, owner: Owner) -> Critic:
        return CategoricalCritic(owner, self)


class CategoricalCritic(Critic):
    """The policy climbs the smallest expected value."""

    def __init__(self, owner: Owner, options: CategoricalOptions) -> None:
        super().__init__(owner)
        hp, device = owner.algorithm.hp, owner.algorithm.device
        head = getattr(self.net.module, "head", None)  # of a model that the user built
        if isinstance(head, EnsembleLinear) and head.weight.shape[-1] != options.num_atoms:
            raise UserError(
                f"{owner.algorithm.name}: the critics have {head.weight.shape[-1]} outputs, but num_atoms is"
                f" {options.num_atoms}"
            )
        self.support = Support(options.num_atoms, options.v_min, options.v_max, hp.gamma**hp.n_step, device)

    def init_extra(self) -> Extra:
        return self.support.init_extra()

    def atoms(self, extra: Extra) -> Tensor:
        """The atoms z_i: [Z]."""
        return self.support.atoms(self.support.bounds(extra))

    def target(self, state: TrainState, batch: Batch, next_action: Tensor) -> tuple[Tensor, Tensor]:
        """(the target's probabilities [B, Z], its mean before the projection [B])"""
        atoms, rewards, discounts = self.atoms(state.extra), batch["rewards"], batch["discounts"]
        probs = self.net(state.target["critic"], batch["next_obs"], next_action).softmax(-1)  # [E, B, Z]
        shifted = rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * atoms  # [B, Z]
        projected_mean = (probs * torch.clamp(shifted, atoms[0], atoms[-1])).sum(-1)  # [E, B]
        chosen = projected_mean.argmin(0)  # [B]
        picked = chosen.view(1, -1, 1).expand(1, *probs.shape[1:])
        probs = probs.gather(0, picked)[0]  # [B, Z]
        return categorical.project(probs, rewards, discounts, atoms), (probs * shifted).sum(-1)

    def update(
        self, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        if bonus is not None:  # a reward that comes with the next value
            batch = {**batch, "rewards": batch["rewards"] + batch["discounts"] * bonus}
        weights, state = batch["weights"], self.support.hold_rewards(state, batch)
        atoms = self.atoms(state.extra)
        target, mean = self.target(state, batch, next_action)

        def loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            logits = self.net(params, batch["obs"], batch["actions"])  # [E, B, Z]
            log_probs, probs = categorical.log_softmax_and_softmax(logits)
            errors = -(target * log_probs).sum(-1)  # [E, B]
            return weighted_mean(errors.sum(0), weights), (errors.mean(0), (probs @ atoms).mean(0))

        after, value, (error, q), grad_norm = self.owner.algorithm.descend_with_norm(state, "critic", loss)
        after, clipped = self.support.widen(after, target @ atoms - mean, weights)
        metrics = {
            "critic_loss": value,
            "q_value_mean": weighted_mean(q, weights),
            "target_mean": weighted_mean(mean, weights),
            "grad_norm": grad_norm,
            "target_clipped": clipped,
        }
        return after, batch, metrics, error

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        values: Tensor = self.net(params, obs, action).softmax(-1) @ self.atoms(extra)  # [E, B]
        return values.amin(0)
