"""Search spaces as data: which settings of an algorithm are tuned, and over which values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from rl_training import registry
from rl_training.errors import UserError, did_you_mean
from rl_training.experiment.run.config import TrainConfig, merge, read_config

Spec = dict[str, Any]
Space = dict[str, Spec]
_KEYS = ({"choices"}, {"low", "high"}, {"low", "high", "log"})


@cache
def _table() -> dict[str, Any]:
    path = resources.files("rl_training") / "assets" / "search_spaces.yaml"
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data


def default_space(algo: str) -> Space:
    """The packaged search space, limited to settings that the algorithm reads."""
    hyper = registry.entry(algo).load().Hyper
    read = hyper.model_fields.keys() - set(hyper.unused)
    table = {**_table()["settings"], **_table()["algorithms"].get(algo, {})}
    return {name: dict(spec) for name, spec in table.items() if spec is not None and name in read}


def load_space(config: TrainConfig, path: str | Path | None) -> Space:
    """The search space of a study, from a file or the packaged table, with all bounds checked by the algorithm."""
    space: Mapping[str, Any] = read_config(path) if path is not None else default_space(config.algo)
    fields = registry.entry(config.algo).load().Hyper.model_fields
    for name, spec in space.items():
        if name not in fields:
            raise UserError(
                f"the space has '{name}', which is not a setting of {config.algo}.{did_you_mean(name, fields)}"
            )
        _check(name, spec)
        for value in spec["choices"] if "choices" in spec else (spec["low"], spec["high"]):
            apply(config, {name: value}).hyper()  # raises a UserError that names the setting
    if not space:
        raise UserError(f"there is nothing to tune for {config.algo}: pass a --space file with at least one setting")
    return {name: dict(spec) for name, spec in space.items()}


def _check(name: str, spec: Any) -> None:
    if not isinstance(spec, dict) or set(spec) not in _KEYS:
        raise UserError(
            f"the space of '{name}' must be {{choices: [...]}} or {{low: a, high: b, log: true}}, not {spec}"
        )
    if "choices" in spec:
        if not isinstance(spec["choices"], list) or not spec["choices"]:
            raise UserError(f"the choices of '{name}' must be a list with at least one value")
        return
    low, high = spec["low"], spec["high"]
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in (low, high))
    if not numbers or low >= high or (spec.get("log") and low <= 0):
        raise UserError(f"the range of '{name}' must go from a lower to a higher number (above 0 if log), not {spec}")


def apply(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The config with tuned values. A schedule keeps its shape and gets the tuned value as its start."""
    changes = {}
    for name, value in values.items():
        old = config.algo_kwargs.get(name)
        schedule = isinstance(old, dict) and "start" in old and isinstance(value, int | float)
        changes[name] = {**old, "start": value} if schedule else value  # type: ignore[dict-item]
    return TrainConfig.from_file({**config.to_dict(), "algo_kwargs": merge(config.algo_kwargs, changes)})


def own_values(config: TrainConfig, space: Space) -> dict[str, Any]:
    """The config's own values of the tuned settings."""
    current = config.resolved().algo_kwargs
    return {name: _start(current[name]) for name in space}


def base_values(config: TrainConfig, space: Space) -> dict[str, Any]:
    """The point of the space that is nearest to the config's own values, for the search to learn from."""
    out = {}
    for name, value in own_values(config, space).items():
        spec = space[name]
        if "choices" in spec:
            out[name] = as_choice(value if value in spec["choices"] else spec["choices"][0])
        else:
            number = value if isinstance(value, int | float) else spec["low"]
            out[name] = min(max(number, spec["low"]), spec["high"])
    return out


def _start(value: Any) -> Any:
    return value["start"] if isinstance(value, dict) and "start" in value else value


def as_choice(value: Any) -> Any:
    """A choice as Optuna can store it: scalars as they are, anything else as JSON."""
    return value if isinstance(value, bool | int | float | str) or value is None else json.dumps(value)


def from_choice(spec: Spec, value: Any) -> Any:
    if "choices" not in spec:
        return value
    return next(choice for choice in spec["choices"] if as_choice(choice) == value)
