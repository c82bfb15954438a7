"""Generative adversarial imitation learning, GAIL (Ho & Ermon 2016): a discriminator learns to tell the expert's
(state, action) pairs from the policy's, and PPO is rewarded for pairs that look like the expert's.

The reward softplus(logit) = -log(1 - D) is never negative. Deviations: those of adversarial.py.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.imitation.adversarial import Adversarial, AdversarialHyper
from rl_training.data.storage import Batch
from rl_training.models.imitation import MLPGAILDiscriminator, action_code_size
from rl_training.spec import EnvSpec


class GAIL(Adversarial[AdversarialHyper]):
    Hyper = AdversarialHyper
    name = "gail"

    def discriminator(self, spec: EnvSpec) -> nn.Module:
        hp = self.hp
        return MLPGAILDiscriminator(
            spec.obs_dim, action_code_size(spec.action), hp.discriminator_hidden_sizes, hp.activation
        )

    def logits(self, params: Tensor, state: TrainState, rows: Batch) -> tuple[Tensor, Tensor]:
        obs, actions, flag = self.with_absorbing(self.seen(state, rows["states"]), self.code(rows["actions"]))
        out = self.nets["discriminator"](params, obs, actions, flag)
        return out[:-1], out[-1]

    def reward(self, logits: Tensor) -> Tensor:
        return F.softplus(logits)  # -log(1 - D)
