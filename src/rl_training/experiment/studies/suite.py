"""Suites: lists of studies with the published score of each, read from `assets/suites/*.yaml` or a file of the user.

    title: Classic control
    about: ...
    defaults: {seeds: [0, 1, 2, 3, 4]}
    studies:
      - {algo: dqn, env_id: CartPole-v1, preset: dqn/cartpole, total_timesteps: 50000,
         bar: {mean: 500, source: "rl-baselines3-zoo benchmark (one run)"}}

A suite is data: a module that it names is imported only if the user allows it (`--allow-import`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_training import registry
from rl_training.data.levels import REFERENCE_RETURNS, normalized_score
from rl_training.errors import UserError, did_you_mean, explain
from rl_training.experiment.run.config import TrainConfig, combine, merge, read_config

EVALUATIONS = 50  # in a run
CHECKPOINTS = 20  # in a run: what a killed machine can lose at most


class Bar(BaseModel):
    """A published score. A study reaches it if its own score is at most one standard deviation below."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float
    std: float = Field(0.0, ge=0.0)  # as published; 0: none was
    source: str
    judged: bool = True  # off: shown for comparison only, because it was measured on other data or at another budget

    @property
    def threshold(self) -> float:
        return self.mean - self.std


class Study(BaseModel):
    """One algorithm on one environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algo: str
    env_id: str
    preset: str | None = None  # none: the algorithm's defaults
    total_timesteps: int = Field(ge=1)
    seeds: tuple[int, ...] = (0, 1, 2)
    eval_episodes: int = Field(10, ge=1)
    variant: str = Field("", pattern=r"^[a-z0-9-]*$")  # distinguishes studies of the same algorithm and environment
    settings: dict[str, Any] = Field(default_factory=dict)  # fields of TrainConfig that differ from the preset
    score: Literal["return", "normalized"] = "return"  # normalized: on D4RL's scale
    bar: Bar | None = None
    reason: str = ""  # why the bar is missed, as far as it was found

    @property
    def name(self) -> str:
        return f"{self.algo}__{self.env_id.replace('/', '-')}" + (f"__{self.variant}" if self.variant else "")

    def config(self, changes: dict[str, Any] | None = None) -> TrainConfig:
        """The configuration of the run, with an evaluation every fiftieth of it."""
        base = {"env_id": self.env_id, "seeds": self.seeds, "eval_episodes": self.eval_episodes}
        fields = merge(merge({"total_timesteps": self.total_timesteps, **base}, self.settings), changes or {})
        steps = fields["total_timesteps"]
        if isinstance(steps, int):  # else TrainConfig says what is wrong
            fields.setdefault("eval_interval", max(1, steps // EVALUATIONS))
            fields.setdefault("checkpoint_interval", max(10_000, steps // CHECKPOINTS))
        config = combine(self.preset or {"algo": self.algo}, **fields)
        if config.algo != self.algo:
            raise UserError(f"{self.name}: the preset {self.preset} is for {config.algo}")
        config.hyper()  # invalid settings raise now, not after hours
        return config

    def passes(self, score: float, completed: bool = True) -> bool | None:
        """Is the bar reached? None if there is no bar to judge by."""
        return completed and score >= self.bar.threshold if self.bar is not None and self.bar.judged else None

    def score_of(self, mean_return: float) -> float:
        if self.score == "return":
            return mean_return
        score = normalized_score(self.env_id, mean_return)
        assert score is not None  # checked by `load_suite`
        return score


class Suite(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    about: str = ""
    studies: tuple[Study, ...]

    def chosen(self, patterns: Sequence[str]) -> list[Study]:
        """The studies whose name matches one of the patterns; without patterns, all of them."""
        names = [study.name for study in self.studies]
        keep: set[str] = set()
        for pattern in patterns:
            found = {n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*{pattern}*")}
            if not found:
                near = did_you_mean(pattern, names)
                raise UserError(f"no study of {self.name} matches '{pattern}'.{near} Studies: {', '.join(names)}")
            keep |= found
        return [study for study in self.studies if study.name in keep or not patterns]


def suite_names() -> list[str]:
    """The packaged suites."""
    files = (resources.files("rl_training") / "assets" / "suites").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_suite(name: str) -> Suite:
    """A packaged suite by name, or a YAML file by path. Algorithms, presets and settings are checked."""
    path = Path(name)
    if name in suite_names():
        path = Path(str(resources.files("rl_training") / "assets" / "suites" / f"{name}.yaml"))
    elif not path.is_file():
        known = suite_names()
        raise UserError(f"there is no suite '{name}'.{did_you_mean(name, known)} Suites: {', '.join(known)}")
    data = read_config(path)
    defaults, rows = data.pop("defaults", {}), data.get("studies")
    if not isinstance(rows, list) or not isinstance(defaults, dict) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: a suite has `studies`, a list of mappings such as {{algo: dqn, env_id: CartPole-v1}}")
    studies = []
    for number, row in enumerate(rows, start=1):
        try:
            studies.append(Study(**merge(defaults, row)))
        except ValidationError as error:
            raise UserError(f"{path}, study {number}: {explain(error, Study)}") from None
    _check(studies)
    try:
        return Suite(**{**data, "name": path.stem, "studies": studies})
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, Suite)}") from None


def _check(studies: Sequence[Study]) -> None:
    seen: set[str] = set()
    for study in studies:
        if study.name in seen:
            raise UserError(f"the suite has {study.name} twice; give one of them a `variant`")
        seen.add(study.name)
        registry.entry(study.algo)  # a typo raises an error with the nearest name
        if study.score == "normalized" and normalized_score(study.env_id, 0.0) is None:
            known = ", ".join(REFERENCE_RETURNS)
            raise UserError(f"{study.name}: normalised scores are known only for {known}")
