"""Target rules: how the value of the next state is computed, for every value head, scalar or distributional.

A rule never sees a distribution. From expected values it derives a policy for the next state and two bonuses. Every
head then backs up

    reward + reward_bonus + discount * (sum_a policy(a) Z(next_obs, a) + next_bonus)

For quantiles, the sum is taken quantile by quantile (as in M-IQN); for C51, it mixes the distributions.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_training.ops.action_masks import count_allowed, forbid

TargetRule = Literal[
    "max", "expected_sarsa", "boltzmann", "soft", "mellowmax", "advantage_learning", "clipped_double", "munchausen"
]
NEEDS_OBS_Q = ("advantage_learning", "munchausen")  # rules that need the values of the current observation
NEEDS_ONLINE_Q = ("clipped_double",)  # rules that need the online network's values of the next observation


class Backup(NamedTuple):
    policy: Tensor  # action [B], or probabilities [B, A]
    next_bonus: Tensor | None = None  # [B]
    reward_bonus: Tensor | None = None  # [B]


def backup(
    rule: TargetRule, choosing_q: Tensor, next_q: Tensor, *, obs_q: Tensor | None, actions: Tensor,
    epsilon: Tensor | float, temperature: float, alpha: float, clip: float, mask: Tensor | None = None,
    obs_mask: Tensor | None = None,
) -> Backup:  # fmt: skip
    """The rule applied to [B, A] values: `next_q` of the target network, `choosing_q` of the one that picks actions
    (the online network for double Q-learning), `obs_q` of the target network at the current observation. The masks mark
    the actions that are allowed in the next and in the current state; other actions do not exist there.

    max                 greedy policy (Q-learning)
    expected_sarsa      the epsilon-greedy policy that collects the data (van Seijen et al. 2009)
    boltzmann           softmax(Q / temperature), its expected value
    soft                the same policy plus its entropy: temperature * logsumexp(Q / temperature) (soft Q-learning)
    mellowmax           soft minus temperature * log A, with omega = 1 / temperature (Asadi & Littman 2017, Eq. 1)
    advantage_learning  max, minus alpha times the gap of the action taken (Bellemare et al. 2016, Eq. 6)
    clipped_double      the online network's greedy action, the smaller of both networks' values (TD3, Eq. 10)
    munchausen          soft, plus alpha * temperature * log pi(a | obs), clipped (Vieillard et al. 2020, Eq. 1)
    """
    if rule in ("max", "advantage_learning", "clipped_double"):
        greedy = forbid(choosing_q, mask).argmax(-1)
        if rule == "clipped_double":
            gap = take(choosing_q, greedy) - take(next_q, greedy)
            return Backup(greedy, next_bonus=gap.clamp(max=0.0))
        if rule == "advantage_learning":
            assert obs_q is not None
            return Backup(greedy, reward_bonus=alpha * (take(obs_q, actions) - forbid(obs_q, obs_mask).amax(-1)))
        return Backup(greedy)
    count = choosing_q.shape[-1]
    if rule == "expected_sarsa":
        best = forbid(choosing_q, mask).argmax(-1, keepdim=True) == torch.arange(count, device=next_q.device)
        random = epsilon / count if mask is None else epsilon * mask / count_allowed(mask).unsqueeze(-1)
        return Backup(torch.where(best, 1.0 - epsilon, 0.0) + random)
    log_policy = forbid(choosing_q / temperature, mask).log_softmax(-1)
    policy = log_policy.exp()
    if rule == "boltzmann":
        return Backup(policy)
    entropy = -(policy * log_policy).sum(-1)
    if rule == "mellowmax":
        full = math.log(count) if mask is None else count_allowed(mask).log()
        return Backup(policy, temperature * (entropy - full))
    if rule == "soft":
        return Backup(policy, temperature * entropy)
    assert obs_q is not None
    scaled_log_policy = temperature * take(forbid(obs_q / temperature, obs_mask).log_softmax(-1), actions)
    return Backup(policy, temperature * entropy, alpha * scaled_log_policy.clamp(min=clip, max=0.0))


def take(values: Tensor, actions: Tensor) -> Tensor:
    """Values of the given actions: [B, A], [B] -> [B], or [B, A, Z], [B] -> [B, Z]."""
    if values.ndim == 2:
        return values.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    # Compared as floats, of the width of the values: a CPU then selects several at a time.
    chosen = actions.to(values.dtype).unsqueeze(-1) == torch.arange(
        values.shape[1], device=values.device, dtype=values.dtype
    )
    return torch.where(chosen.unsqueeze(-1), values, 0.0).sum(1)  # no gather: the gradient of one is a scatter


def under(values: Tensor, policy: Tensor) -> Tensor:
    """Values of a policy: an action [B], or probabilities [B, A] to average with."""
    if policy.ndim == 1:
        return take(values, policy)
    return ((policy if values.ndim == 2 else policy.unsqueeze(-1)) * values).sum(1)
