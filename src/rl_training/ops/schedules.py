"""Schedules as data: a number, or a dict such as {kind: linear, start: 1e-3, end: 0, warmup: 0.05}."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator
from torch import Tensor


class Schedule(BaseModel):
    """A value as a function of training progress in [0, 1]."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["constant", "linear", "cosine"] = "constant"
    start: float
    """Value after the warm-up."""
    end: float = 0.0
    """Value at the end of `fraction` (linear, cosine)."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Share of training over which the value moves from `start` to `end`; it stays there afterwards."""
    warmup: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of training over which the value first rises linearly from 0."""

    @model_validator(mode="after")
    def _moves_after_the_warm_up(self) -> Schedule:
        if self.kind != "constant" and self.warmup >= self.fraction:
            raise ValueError(
                f"fraction must be larger than warmup: the warm-up lasts until {self.warmup:g} of training, but the"
                f" value should reach its end at {self.fraction:g}"
            )
        return self

    @model_serializer
    def _plain(self) -> float | dict[str, Any]:
        if self.kind == "constant" and not self.warmup:
            return self.start
        return dict(self.__dict__)

    def __call__(self, progress: Tensor) -> Tensor | float:
        """The value at `progress`. A constant schedule returns a plain float, which costs no operation."""
        if self.kind == "constant" and not self.warmup:
            return self.start
        share = torch.clamp((progress - self.warmup) / max(self.fraction - self.warmup, 1e-8), 0.0, 1.0)
        if self.kind == "linear":
            value = self.start + share * (self.end - self.start)
        elif self.kind == "cosine":
            value = self.end + (self.start - self.end) * 0.5 * (1.0 + torch.cos(math.pi * share))
        else:
            value = torch.full_like(progress, self.start)
        return value * torch.clamp(progress / self.warmup, max=1.0) if self.warmup else value


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
    if not isinstance(value, dict | Schedule):
        raise ValueError("expected a number or a schedule: 0.001, lin_0.001 or {kind: linear, start: 0.001}")
    return value


def _in_range(low: float, high: float) -> Any:
    def check(schedule: Schedule) -> Schedule:
        for value in (schedule.start,) if schedule.kind == "constant" else (schedule.start, schedule.end):
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
