"""The support of a categorical value distribution (C51, Rainbow, D4PG): given by v_min and v_max, or found in training.

`auto` starts from the rewards. If a policy collected rewards of mean m and deviation s for ever, its discounted return
would have the mean m / (1 - gamma) and, with independent rewards, the deviation s / sqrt(1 - gamma^2). The support
holds three deviations around that mean, zero, and every reward seen. Later it is widened where it clips: when it
changes the mean of more than 5 % of the targets (a moving average), it grows by its own width on that side. It never
shrinks.

The network's outputs belong to the atoms by number, so a wider support scales all values alike: the best action stays
the best, and the values are learned again. The range is part of the training state (`extra["support"]`).
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from rl_training.algorithms.state import TrainState
from rl_training.data.storage import Batch
from rl_training.ops.categorical import support
from rl_training.ops.running_stats import init_moments, update_moments

SETTLING = 200  # updates in which the estimate from the rewards may still move the support
DEVIATIONS = 3.0  # of the return that the first estimate holds, on both sides of its mean
LONGEST_HORIZON = 1_000.0  # bound on 1 / (1 - gamma)
CLIPPED = 0.1  # atoms by which the mean of a target must move to count as clipped
EDGE = 0.05  # share of clipped targets that widens the support
RATE = 0.01  # of the moving average of that share
WARNED = 0.01  # share of clipped targets that a user with a support of their own is told about

Bound = float | Literal["auto"]
F = TypeVar("F", bound="SupportFields")


class SupportFields(BaseModel):
    """Settings of the support."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    num_atoms: int = Field(51, ge=2)
    """Values that the distribution of the return is spread over."""
    v_min: Bound = "auto"
    """Lowest atom of the distribution; auto: found from the rewards and gamma, and lowered when targets fall below
    it."""
    v_max: Bound = "auto"
    """Highest atom of the distribution; auto: found from the rewards and gamma, and raised when targets exceed it."""

    @model_validator(mode="after")
    def _ordered(self: F) -> F:
        low, high = self.v_min, self.v_max
        if isinstance(low, str) or isinstance(high, str):
            if low != high:
                raise ValueError(f"v_min = {low} and v_max = {high}: give two numbers, or leave both on auto")
        elif low >= high:
            raise ValueError(f"v_min = {low:g} must be below v_max = {high:g}")
        return self


class Support:
    """The atoms of a value distribution, as functions of the training state."""

    def __init__(self, num_atoms: int, low: Bound, high: Bound, discount: float, device: torch.device) -> None:
        """`discount`: the factor on the value of the next state, gamma^n for n-step returns."""
        self.num_atoms, self.low, self.high, self.discount, self.device = num_atoms, low, high, discount, device
        self.auto = isinstance(low, str) or isinstance(high, str)

    def init_extra(self) -> dict[str, Any]:
        """The entries in `state.extra`; empty for a fixed support."""
        if not self.auto:
            return {}
        return {
            "support": {
                "range": torch.tensor([-1.0, 1.0]),
                "clipped": torch.zeros(2),  # moving averages: below, above
                "rewards": init_moments(),
            }
        }

    def atoms(self, bounds: Tensor | None = None) -> Tensor:
        """The atoms [N] of a fixed support, or of one that was found: `bounds` [2]."""
        if bounds is None:
            low, high = float(self.low), float(self.high)
            return support(low, high, self.num_atoms, self.device)  # on the spot: a constant of the graph
        share = torch.linspace(0.0, 1.0, self.num_atoms, device=bounds.device)
        return torch.lerp(bounds[0], bounds[1], share)

    def bounds(self, extra: dict[str, Any]) -> Tensor | None:
        """The range that was found [2]; None for a fixed support."""
        bounds: Tensor | None = extra["support"]["range"] if self.auto else None
        return bounds

    def hold_rewards(self, state: TrainState, batch: Batch) -> TrainState:
        """The state with a support for the rewards of the batch."""
        if not self.auto:
            return state
        own, rewards = state.extra["support"], batch["rewards"]
        counted = (batch["weights"] > 0).to(rewards.dtype)
        moments = update_moments(own["rewards"], rewards, counted)
        horizon = min(1.0 / max(1.0 - self.discount, 1e-9), LONGEST_HORIZON)
        spread_horizon = min(1.0 / max(1.0 - self.discount**2, 1e-9), LONGEST_HORIZON)
        mean, spread = moments["mean"] * horizon, DEVIATIONS * (moments["var"] * spread_horizon).sqrt()
        estimate = torch.stack([(mean - spread).clamp(max=0.0), (mean + spread).clamp(min=0.0)])
        seen = torch.stack([(rewards * counted).amin(), (rewards * counted).amax()])
        old = torch.where(own["rewards"]["count"] < 1.0, 0.0, own["range"])  # nothing seen: no range to keep
        needed = torch.where(state.step < SETTLING, estimate, 0.0)
        low = torch.minimum(torch.minimum(old, needed), seen)[0]
        high = torch.maximum(torch.maximum(old, needed), seen)[1]
        return _replaced(state, {**own, "range": torch.stack([low, high]), "rewards": moments})

    def widen(self, state: TrainState, clip: Tensor, weights: Tensor) -> tuple[TrainState, Tensor]:
        """(the state with a wider support if targets reach its edge, the share of clipped targets). `clip` [B] is by
        how much the projection moved the mean of each target: up where it was below the support."""
        bounds, counted = self.bounds(state.extra), weights > 0
        rows = counted.sum().clamp(min=1)
        if bounds is None:
            tolerance = CLIPPED * (float(self.high) - float(self.low)) / (self.num_atoms - 1)
            return state, ((clip.abs() > tolerance) & counted).sum() / rows
        own, far = state.extra["support"], CLIPPED * (bounds[1] - bounds[0]) / (self.num_atoms - 1)
        share = (torch.stack([clip > far, clip < -far]) & counted).sum(-1) / rows  # below, above
        average = torch.lerp(own["clipped"], share, RATE)
        due = average > EDGE
        step = torch.where(due, bounds[1] - bounds[0], 0.0)
        wider = torch.stack([bounds[0] - step[0], bounds[1] + step[1]])
        new = {**own, "range": wider, "clipped": torch.where(due, 0.0, average)}
        return _replaced(state, new), share.sum()

    def warning(self, owner: str, share: float) -> str | None:
        """The warning for a share of clipped targets; None for a support that widens by itself."""
        if self.auto or not share > WARNED:
            return None
        return (
            f"{owner}: v_min = {self.low:g} and v_max = {self.high:g} clip {share:.0%} of the targets, so values beyond"
            " them cannot be learned; set both to auto, or to the range of the returns"
        )


def _replaced(state: TrainState, own: dict[str, Any]) -> TrainState:
    return state._replace(extra={**state.extra, "support": own})
