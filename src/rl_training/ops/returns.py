"""Returns and advantages over time-major rollouts `[T, ...]`, and n-step windows `[B, n]`.

All functions share one convention:

- `next_values[t]` is the value of row t's true next observation, so a truncated row still bootstraps;
- `discounts[t]` = gamma * (1 - terminated[t]): a terminated row does not bootstrap;
- `continues[t]` = 1 - (terminated or truncated)[t]: row t + 1 belongs to the same episode.

Nothing is detached here. Pass detached values where targets must be constants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.ops.running_stats import Moments, init_moments, update_moments


def reverse_scan(increments: Tensor, decays: Tensor) -> Tensor:
    """x_t = increments_t + decays_t * x_{t+1} along the first axis, with x_T = 0.

    Recursive doubling: after the pass with shift k, each row holds the sum over 2k rows starting at itself. This takes
    3 ceil(log2 T) operations instead of T. It never divides, so decays of 0 (episode ends) are exact.
    """
    length, shift = increments.shape[0], 1
    total, decay = increments, decays  # decay: rows [0, length - shift) hold the product of `shift` decays
    while shift < length:
        head = torch.addcmul(total[:-shift], decay[: length - shift], total[shift:])
        total = torch.cat((head, total[length - shift :]))
        if 2 * shift < length:
            decay = decay[: length - 2 * shift] * decay[shift : length - shift]
        shift *= 2
    return total


def _shift_back(rows: Tensor) -> Tensor:
    """Row t gets the value of row t + 1; the last row gets 0."""
    return torch.cat((rows[1:], torch.zeros_like(rows[:1])))


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    continues: Tensor,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman 2016, Eq. 11 and 16): (advantages, returns), each `[T, ...]`.

    The recursion decays by discounts * lam * continues, which is gamma * lam within an episode and 0 at its end.
    """
    deltas = rewards + discounts * next_values - values  # Eq. 11
    advantages = reverse_scan(deltas, discounts * continues * lam)  # Eq. 16
    return advantages, advantages + values


def init_returns(num_envs: int) -> Moments:
    """Moments of the discounted return, and its running value in each environment."""
    return {**init_moments(), "running": torch.zeros(num_envs)}


def scale_by_returns(
    returns: Moments,
    rewards: Tensor,
    continues: Tensor,
    weights: Tensor,
    gamma: float,
    clip: float | None = None,
) -> tuple[Moments, Tensor]:
    """(the moments with these rewards, the rewards `[T, N]` over the running deviation of the discounted return)."""
    first = returns["running"].unsqueeze(0)
    decays = gamma * torch.cat([torch.ones_like(first), continues[:-1]])  # into row t from row t - 1
    increments = torch.cat([rewards[:1] + decays[:1] * first, rewards[1:]])
    running = reverse_scan(increments.flip(0), decays.flip(0)).flip(0)  # R_t = r_t + gamma c_{t-1} R_{t-1}
    moments = update_moments({k: returns[k] for k in ("mean", "var", "count")}, running.flatten(), weights.flatten())
    scaled = rewards * torch.rsqrt(moments["var"] + 1e-8)
    if clip is not None:
        scaled = torch.clamp(scaled, -clip, clip)
    return {**moments, "running": running[-1] * continues[-1]}, scaled


def lambda_returns(
    rewards: Tensor, next_values: Tensor, discounts: Tensor, continues: Tensor, lam: float | Tensor
) -> Tensor:
    """TD(lambda) returns `[T, ...]` (Sutton and Barto 2018, Eq. 12.18 in recursive form).

    G_t = r_t + discounts_t * ((1 - lam) * V_{t+1} + lam * G_{t+1}). The last row of an episode or of the rollout
    bootstraps from its next value alone. With a learned discount (DreamerV3), pass ones as `continues`.
    """
    mix = torch.cat((continues[:-1] * lam, torch.zeros_like(next_values[-1:])))
    return reverse_scan(rewards + discounts * (1.0 - mix) * next_values, discounts * mix)


def n_step_window(
    rewards: Tensor, terminated: Tensor, truncated: Tensor, available: Tensor, gamma: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """n-step transitions from windows of consecutive rows, `[..., n]` -> (returns, discounts, last), each `[...]`.

    A transition covers row 0 up to the first terminated or truncated row, or the last available one. `last` is the
    index of that final row: the bootstrap observation is its next observation, and
    `discounts` = gamma^(last + 1) * (1 - terminated[last]). `available` marks the rows that exist; row 0 must exist.
    """
    goes_on = available & ~(terminated | truncated)  # [..., n]
    reached = torch.cat((available[..., :1], goes_on[..., :-1]), -1).to(rewards.dtype).cumprod(-1)
    included = reached * available  # 1 for the rows of the transition
    steps = torch.arange(rewards.shape[-1], device=rewards.device, dtype=rewards.dtype)
    returns = (included * rewards * gamma**steps).sum(-1)
    count = included.sum(-1)
    # Only the last included row can be terminated.
    discounts = gamma**count * (1.0 - (included * terminated).sum(-1))
    return returns, discounts, (count - 1.0).clamp(min=0.0).long()


def vtrace(
    log_rhos: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    continues: Tensor,
    lam: float | Tensor = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt 2018): (policy-gradient advantages, value targets v_s), each `[T, ...]`.

    `log_rhos` = log pi(a|x) - log mu(a|x) for target policy pi and behaviour policy mu. The advantages already include
    the clipped importance weight rho_s. With equal policies and lam = 1, the targets are the n-step returns.
    """
    ratios = log_rhos.exp()
    rhos = ratios.clamp(max=rho_bar)
    cs = ratios.clamp(max=c_bar) * lam  # Remark 2
    deltas = rhos * (rewards + discounts * next_values - values)
    corrections = reverse_scan(deltas, discounts * continues * cs)  # Eq. 1: v_s - V(x_s), in the form of Remark 1
    next_targets = next_values + continues * _shift_back(corrections)
    advantages = rhos * (rewards + discounts * next_targets - values)  # section 4.2
    return advantages, values + corrections


def retrace(
    ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    continues: Tensor,
    lam: float | Tensor = 1.0,
) -> Tensor:
    """Retrace targets of Q(x_t, a_t) (Munos 2016, Eq. 3 and 4), `[T, ...]`.

    `ratios` = pi(a|x) / mu(a|x), `values` = Q(x_t, a_t), and `next_values` = the mean of Q(x_{t+1}, .) under pi. In
    recursive form (Wang 2017, Eq. 5): target_t = r_t + discounts_t (next_values_t + c_{t+1} (target_{t+1} - Q_{t+1})),
    c = lam min(1, ratio). The last row of an episode or of the rollout bootstraps from its next value alone.
    """
    traces = _shift_back(lam * ratios.clamp(max=1.0))
    return values + reverse_scan(rewards + discounts * next_values - values, discounts * continues * traces)
