"""TrainConfig: all settings of a run. A YAML preset has the same fields; unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rl_training import registry
from rl_training.cluster.settings import ClusterSettings, distributed, parse_cluster
from rl_training.errors import UserError, did_you_mean, explain
from rl_training.experiment.run.sb3_names import NAMES, translate
from rl_training.imports import allow_imports_in, check_arguments, values_from_file

ENV_PARTS = ("training", "evaluation")


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 and 1e6 as numbers, which YAML 1.1 reads as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str) -> Any:
    """The value of a YAML text: plain data only, no code is executed."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class TrainConfig(BaseModel):
    """All settings of a run. `resolved()` fills in the defaults that depend on the algorithm."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    algo: str
    """Algorithm, as in `rl-training list`."""
    env_id: str
    """Environment registered with Gymnasium."""
    total_timesteps: int = Field(ge=1, le=2**53)
    """Environment steps of each seed (offline algorithms: gradient steps)."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of a single agent."""
    seeds: tuple[int, ...] | None = None
    """Seeds of a study: several agents, trained together in one process."""
    output_dir: str = "runs"
    """Directory in which the run directories are created."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    execution: Literal["auto", "eager", "recorded", "compile", "cudagraph"] = "auto"
    """How updates run: eager, recorded, compile or cudagraph; auto chooses by the device and the length of the run."""
    num_envs: int | None = Field(None, ge=1, le=65536)
    """Environments of each seed; empty: the algorithm's default."""
    vectorization: Literal["auto", "sync", "threads", "async", "vector", "envpool", "device"] = "auto"
    """How the environments are stepped."""
    cluster: ClusterSettings | None = None
    """Distribute the run with Ray: {actors: 8, envs_per_actor: 16, ...} (docs/scale.md); empty: this process alone."""
    eval_episodes: int = Field(10, ge=1)
    """Episodes of each seed in an evaluation."""
    eval_deterministic: bool = True
    """Evaluate with the policy's best actions; off: with actions sampled as in training."""
    eval_interval: int | None = Field(None, ge=0)
    """Steps between evaluations; empty: a twentieth of the run; 0: evaluate only at the end."""
    eval_video: bool = False
    """Record a video of the first seed's policy at each evaluation, in the run's directory `videos`."""
    log_interval: int = Field(1_000, ge=1)
    """Steps between log lines."""
    checkpoint_interval: int | None = Field(None, ge=1)
    """Steps between checkpoints; empty: ten in a run, at least 10 000 steps apart."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of recent checkpoints to keep, besides the best one."""
    stop_at_return: float | None = None
    """Stop when the mean return of an evaluation reaches this value."""
    init_from: str | None = None
    """Checkpoint or run whose networks this run starts from (they must have the same layers); empty: new networks."""
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that also receive the metrics: wandb, mlflow, trackio."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Labels of your own, to find the run again."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment; those under `training:` or `evaluation:` apply to one of the two only."""
    env_wrappers: tuple[str | dict[str, Any], ...] = ()
    """Wrappers around each environment, the first one innermost: module:Wrapper, or {wrapper: ..., kwargs: {...}}."""
    algo_kwargs: dict[str, Any] = Field(default_factory=dict)
    """The algorithm's own settings (`rl-training config` shows all of them)."""

    def __init__(self, /, **values: Any) -> None:
        allow_imports_in(values)  # passed in Python, unless `from_file` says otherwise
        if "cluster" in values:
            values["cluster"] = parse_cluster(values["cluster"])
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_explain(error, type(self), values.get("algo"))) from None

    @classmethod
    def from_file(cls, values: Mapping[str, Any]) -> TrainConfig:
        """A config whose values come from a file or a checkpoint: the modules that they name are not allowed by it."""
        with values_from_file():
            return cls(**values)

    @field_validator("seeds", mode="after")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if seeds is not None:
            if not seeds or len(set(seeds)) != len(seeds):
                raise ValueError("needs at least one seed, and no seed twice")
            if min(seeds) < 0 or max(seeds) >= 2**31:
                raise ValueError("seeds must be between 0 and 2147483647")
        return seeds

    @model_validator(mode="before")
    @classmethod
    def _names_of_others(cls, values: Any) -> Any:
        """Settings under the names of Stable-Baselines3 get ours."""
        settings, algo = values.get("algo_kwargs"), values.get("algo")
        if not isinstance(settings, Mapping) or not NAMES & settings.keys() or algo not in registry.entries():
            return values
        return {**values, "algo_kwargs": translate(algo, _settings(algo), settings)}

    @field_validator("algo_kwargs", mode="before")
    @classmethod
    def _functions_as_tables(cls, settings: Any) -> Any:
        """Schedules that are functions become data at once, so that the run can be saved and resumed."""
        if not isinstance(settings, Mapping) or not any(map(callable, settings.values())):
            return settings
        from rl_training.ops.schedules import Schedule, table_of

        plain = {key: value for key, value in settings.items() if isinstance(value, Schedule) or not callable(value)}
        return {key: plain[key] if key in plain else table_of(value) for key, value in settings.items()}

    @field_validator("env_wrappers", mode="after")
    @classmethod
    def _named_wrappers(cls, wrappers: tuple[Any, ...]) -> tuple[Any, ...]:
        if wrappers:
            from rl_training.envs.wrappers import check_wrapper

            for entry in wrappers:
                check_wrapper(entry)
        return wrappers

    @model_validator(mode="after")
    def _known_algorithm(self) -> TrainConfig:
        registry.entry(self.algo)
        return self

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds if self.seeds is not None else (self.seed,)

    def env_arguments(self, part: str) -> dict[str, Any]:
        """The environment's arguments in "training" or "evaluation": the common ones and those of that part."""
        common = {k: v for k, v in self.env_kwargs.items() if k not in ENV_PARTS}
        own = self.env_kwargs.get(part) or {}
        if not isinstance(own, dict):
            raise UserError(f"env_kwargs.{part} must be a mapping of arguments, not {own!r}")
        check_arguments(common, "env_kwargs")
        check_arguments(own, f"env_kwargs.{part}")
        return {**common, **own}

    def score_bounds(self) -> tuple[float, float]:
        """The smallest and largest possible return of an evaluation, where that is known."""
        from rl_training.envs.score_bounds import UNKNOWN, score_bounds

        return UNKNOWN if self.env_wrappers else score_bounds(self.env_id, self.env_arguments("evaluation"))

    def hyper(self) -> Any:
        """The algorithm's validated hyper-parameters."""
        from rl_training.algorithms.hyper import parse_hyper

        cls = registry.entry(self.algo).load()
        for name in self.algo_kwargs:
            if name in type(self).model_fields and name not in cls.Hyper.model_fields:
                raise UserError(f"'{name}' is not a setting of {self.algo}: write it next to algo_kwargs, not inside")
        return parse_hyper(cls.Hyper, {**cls.defaults, **self.algo_kwargs}, self.algo)

    def resolved(self) -> TrainConfig:
        """The same run with every default filled in."""
        cls = registry.entry(self.algo).load()
        spacing, rhythm = max(10_000, self.total_timesteps // 10), max(1, self.total_timesteps // 20)
        num_envs, cluster = self.num_envs or cls.Hyper.num_envs, self.cluster
        settings = self.hyper().model_dump(mode="json")
        if cluster is not None:
            settings = distributed(cluster, settings)
            each = cluster.envs_each(num_envs)
            num_envs, cluster = cluster.actors * each, cluster.model_copy(update={"envs_per_actor": each})
        return self.model_copy(
            update={
                "algo_kwargs": settings,
                "num_envs": num_envs,
                "cluster": cluster,
                "checkpoint_interval": self.checkpoint_interval or spacing,
                "eval_interval": rhythm if self.eval_interval is None else self.eval_interval,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def _explain(error: ValidationError, model: type[BaseModel], algo: Any) -> str:
    problems = reversed(error.errors(include_url=False))  # reversed: the first error of each type is kept
    found = {problem["type"]: str(problem["loc"][0]) for problem in problems if problem["loc"]}
    if key := found.get("extra_forbidden"):
        known, settings = [*model.model_fields], _settings(algo)
        if key in settings:
            return f"'{key}' is a setting of {algo}: write it below algo_kwargs, as algo_kwargs.{key}"
        near = did_you_mean(key, [*known, *settings])
        for name in settings:
            near = near.replace(f"'{name}'", f"'algo_kwargs.{name}'")
        return f"unknown key '{key}' in the configuration.{near} Known: {', '.join(known)}"
    if key := found.get("missing"):
        return f"the configuration needs '{key}'"
    return explain(error, model)


def _settings(algo: Any) -> list[str]:
    """Names of the algorithm's settings; none where there is no such algorithm."""
    known = isinstance(algo, str) and algo in registry.entries()
    return list(registry.entry(algo).load().Hyper.model_fields) if known else []


def flat_fields(algo: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a TrainConfig from keywords that may also be settings of the algorithm, which go to algo_kwargs."""
    fields = {key: value for key, value in values.items() if key in TrainConfig.model_fields}
    settings = {key: value for key, value in values.items() if key not in fields}
    known, own = _settings(algo), fields.get("algo_kwargs", {})
    if not settings or not known or not isinstance(own, Mapping):
        return fields  # nothing to move, or TrainConfig will say what is wrong
    for key in settings:
        if key not in known and key not in NAMES:
            near = did_you_mean(key, [*known, *TrainConfig.model_fields])
            raise UserError(f"'{key}' is neither a setting of {algo} nor a field of the configuration.{near}")
        if key in own:
            raise UserError(f"'{key}' is given twice: by itself and in algo_kwargs")
    return {**fields, "algo_kwargs": {**own, **settings}}


def preset_path(name: str) -> Path | None:
    """The file of a packaged preset such as `qr_dqn/cartpole`, or None."""
    algo, _, env = name.removesuffix(".yaml").partition("/")
    if not algo or not env or "/" in env or ".." in name:
        return None
    path = resources.files("rl_training") / "assets" / "configs" / algo / f"{env}.yaml"
    return Path(str(path)) if path.is_file() else None


def tuned_preset(algo: str, env_id: str) -> str | None:
    """The packaged preset for an algorithm and an environment: the one with the shortest name if there are several."""
    found = [name for name in registry.presets(algo) if read_config(name).get("env_id") == env_id]
    return min(found, key=lambda name: (len(name), name), default=None)


def read_config(source: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, given by path or by preset name."""
    path = Path(source)
    if not path.is_file():
        packaged = preset_path(str(source))
        if packaged is None:
            near = did_you_mean(str(source), registry.presets())
            raise UserError(
                f"there is no configuration file and no packaged preset '{source}'.{near}"
                " `rl-training list` shows the presets"
            )
        path = packaged
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not valid YAML: {reason}") from None
    if data is None:
        raise UserError(f"{path} is empty; it must contain a mapping such as 'algo: dqn'")
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise UserError(f"{path} must contain a mapping from names to values, such as 'algo: dqn'")
    if not is_bounded(data):
        raise UserError(f"{path} has far more values than a configuration needs (do aliases refer to aliases?)")
    return data


def is_bounded(data: Any, limit: int = 10_000) -> bool:
    """Does it have at most `limit` values with aliases expanded? A few lines of YAML can expand to billions."""
    left, stack = limit, [data]
    while stack and left:
        item, left = stack.pop(), left - 1
        stack.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple | set) else ())
    return not stack


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` applied; nested mappings are merged key by key."""
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names: {"a": {"b": 1}} as {"a.b": 1}."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        out |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return out


def make_config(source: str | Path | Mapping[str, Any] | None = None, **changes: Any) -> TrainConfig:
    """A TrainConfig from a preset name, a path or a mapping, with changes on top: its fields or settings of the
    algorithm, as in `make_config("ppo/cartpole", seed=1, learning_rate=1e-3)`. A field that is None stays as it is.

    Unlike `rl-training train --algo A --env E`, this never takes settings from a preset that is not named."""
    allow_imports_in([source if isinstance(source, Mapping) else None, changes])
    return combine(source, **changes)


def combine(source: str | Path | Mapping[str, Any] | None = None, **changes: Any) -> TrainConfig:
    """`make_config` for values that may come from a file: the modules that they name are not allowed by it."""
    base: Mapping[str, Any] = {}
    if isinstance(source, Mapping):
        base = source
    elif source is not None:
        base = read_config(source)
    if changes.get("seeds") is not None:
        base = {k: v for k, v in base.items() if k != "seed"}
    elif changes.get("seed") is not None:
        base = {k: v for k, v in base.items() if k != "seeds"}
    changes = {key: value for key, value in changes.items() if value is not None or key not in TrainConfig.model_fields}
    return TrainConfig.from_file(merge(base, flat_fields(changes.get("algo", base.get("algo")), changes)))
