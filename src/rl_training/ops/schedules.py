"""Schedules as data: a number, a dict such as {kind: linear, start: 1e-3, end: 0, warmup: 0.05}, or a table of values.

A function, as Stable-Baselines3 takes it (of the share of training that remains), becomes a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator
from torch import Tensor

from rl_training.errors import UserError


class Schedule(BaseModel):
    """A value as a function of training progress in [0, 1]."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["constant", "linear", "cosine", "table"] = "constant"
    start: float
    """Value after the warm-up."""
    end: float = 0.0
    """Value at the end of `fraction` (linear, cosine)."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Share of training over which the value moves from `start` to `end`; it stays there afterwards."""
    warmup: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of training over which the value first rises linearly from 0."""
    values: tuple[float, ...] = ()
    """Values of a table at equal distances from the start to the end of `fraction`; linear in between."""

    @model_validator(mode="after")
    def _moves_after_the_warm_up(self) -> Schedule:
        if self.kind != "constant" and self.warmup >= self.fraction:
            raise ValueError(
                f"fraction must be larger than warmup: the warm-up lasts until {self.warmup:g} of training, but the"
                f" value should reach its end at {self.fraction:g}"
            )
        if (self.kind == "table") != (len(self.values) > 1):
            raise ValueError("a table needs at least two values, and only a table has values")
        return self

    @model_serializer
    def _plain(self) -> float | dict[str, Any]:
        if self.kind == "constant" and not self.warmup:
            return self.start
        return {name: value for name, value in self.__dict__.items() if name != "values" or value}

    def __call__(self, progress: Tensor) -> Tensor | float:
        """The value at `progress`. A constant schedule returns a plain float, which costs no operation."""
        if self.kind == "constant" and not self.warmup:
            return self.start
        share = torch.clamp((progress - self.warmup) / max(self.fraction - self.warmup, 1e-8), 0.0, 1.0)
        if self.kind == "linear":
            value = self.start + share * (self.end - self.start)
        elif self.kind == "table":  # a sum of ramps: no gather, so it works under vmap and in every graph
            values, steps = torch.tensor(self.values, device=progress.device), len(self.values) - 1
            ramps = torch.clamp(steps * share - torch.arange(steps, device=progress.device), 0.0, 1.0)
            value = self.start + (ramps * values.diff()).sum()
        elif self.kind == "cosine":
            value = self.end + (self.start - self.end) * 0.5 * (1.0 + torch.cos(math.pi * share))
        else:
            value = torch.full_like(progress, self.start)
        return value * torch.clamp(progress / self.warmup, max=1.0) if self.warmup else value


def table_of(function: Callable[[float], float], points: int = 101) -> dict[str, Any]:
    """A function of the share of training that remains (1 at the start, 0 at the end) as a table."""
    try:
        values = [float(function(1.0 - i / (points - 1))) for i in range(points)]
    except Exception as error:  # a user's function may raise anything
        raise UserError(
            f"a schedule must be a function of the share of training that remains, from 1 to 0: {error}"
        ) from None
    return {"kind": "table", "start": values[0], "end": values[-1], "values": values}


def _parse(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number or a schedule, not true or false")
    if isinstance(value, int | float):
        return {"kind": "constant", "start": value}
    if isinstance(value, str):
        try:
            if value.startswith("lin_"):  # the notation of the Stable-Baselines3 zoo
                return {"kind": "linear", "start": float(value[4:]), "end": 0.0}
            return {"kind": "constant", "start": float(value)}
        except ValueError as error:
            raise ValueError(
                f"'{value}' is not a number or a schedule; write 0.001, lin_0.001 or {{kind: linear, start: 0.001}}"
            ) from error
    if callable(value) and not isinstance(value, Schedule):
        return table_of(value)
    if not isinstance(value, dict | Schedule):
        raise ValueError("expected a number or a schedule: 0.001, lin_0.001 or {kind: linear, start: 0.001}")
    return value


def _in_range(low: float, high: float) -> Any:
    def check(schedule: Schedule) -> Schedule:
        ends = () if schedule.kind == "constant" else (schedule.end, *schedule.values)
        for value in (schedule.start, *ends):
            if not low <= value <= high:
                allowed = f"must be at least {low:g}" if high == math.inf else f"is outside [{low:g}, {high:g}]"
                raise ValueError(f"{value:g} {allowed}")
        return schedule

    return check


class Range:
    """Pydantic check that a schedule's start and end are in range: `Annotated[ScheduleLike, Range(0, 1)]`."""

    def __new__(cls, low: float, high: float = math.inf) -> Any:
        from pydantic import AfterValidator

        return AfterValidator(_in_range(low, high))


ScheduleLike = Annotated[Schedule, BeforeValidator(_parse)]
Positive = Annotated[ScheduleLike, Range(0.0)]
Fraction = Annotated[ScheduleLike, Range(0.0, 1.0)]
