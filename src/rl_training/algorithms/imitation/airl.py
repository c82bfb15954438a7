"""Adversarial inverse reinforcement learning, AIRL (Fu et al. 2018): the discriminator is built from a reward function.

D = exp f / (exp f + pi), so its logit is f(s, a, s') - log pi(a|s) with f = g(s, a) + gamma h(s') - h(s). When the
policy is as good as the expert, g is a reward that explains the expert. The reward of the policy, log D - log(1 - D),
is that logit (section 4); it can be negative. In the absorbing state there is nothing to choose (log pi = 0), and the
potential of a terminal state is that of the absorbing one; without absorbing states it is 0.

Deviations: those of GAIL.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.imitation.discriminator import Inputs, with_absorbing
from rl_training.algorithms.imitation.gail import Adversarial, AdversarialHyper
from rl_training.data.storage import Batch
from rl_training.models.imitation import MLPAIRLReward, action_code, action_code_size
from rl_training.spec import EnvSpec


class AIRLHyper(AdversarialHyper):
    state_only: bool = False
    """The learned reward g reads the state alone, which lets it transfer to other dynamics."""
    reward_clip: float = Field(10.0, gt=0.0)
    """The learned reward is clipped to plus or minus this value."""


class AIRL(Adversarial[AIRLHyper]):
    Hyper = AIRLHyper
    name = "airl"

    def discriminator(self, spec: EnvSpec) -> nn.Module:
        hp = self.hp
        return MLPAIRLReward(
            spec.obs_dim, action_code_size(spec.action), hp.discriminator_hidden_sizes, hp.activation, gamma=hp.gamma,
            state_only=hp.state_only,
        )  # fmt: skip

    def inputs(self, state: TrainState, rows: Batch) -> Inputs:
        obs, actions, flag = with_absorbing(
            self.seen(state, rows["states"]), action_code(self.spec.action, rows["actions"])
        )
        ended = F.pad(rows["terminated"].to(obs.dtype), (0, 1), value=1.0)  # the absorbing state follows itself
        next_obs = F.pad(self.seen(state, rows["next_states"]), (0, 0, 0, 1)) * (1.0 - ended).unsqueeze(-1)
        return obs, actions, next_obs, flag, ended

    def judge(self, params: Tensor, *inputs: Tensor) -> Tensor:
        """f(s, a, s')."""
        ended = inputs[-1]
        continues = ended.new_ones(()) if self.hp.absorbing_states else 1.0 - ended
        return super().judge(params, *inputs, continues)

    def logits(self, params: Tensor, state: TrainState, rows: Batch) -> tuple[Tensor, Tensor]:
        """f(s, a, s') - log pi(a|s) of each row [B], and of the absorbing state []."""
        f, absorbing = super().logits(params, state, rows)
        return f - self.log_probs(state, rows), absorbing

    def log_probs(self, state: TrainState, rows: Batch) -> Tensor:
        """log pi(a|s) of the current policy; no gradient of the discriminator flows through it."""
        obs, mask = self.ppo.reader.read(state.extra, rows["states"])
        out = self.ppo.policy_out({"policy": state.params["policy"]}, obs)
        return self.ppo.dist.log_prob(out, rows["actions"], mask).detach()

    def reward(self, logits: Tensor) -> Tensor:
        return logits.clamp(-self.hp.reward_clip, self.hp.reward_clip)  # log D - log(1 - D)
