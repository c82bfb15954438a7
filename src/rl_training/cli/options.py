"""The options shared by several commands, and the parsing of their values."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli.boundary import tell
from rl_training.errors import UserError, did_you_mean
from rl_training.imports import allow_address, allow_import, allow_imports_in

if TYPE_CHECKING:
    from rl_training.experiment.run.config import TrainConfig

_MAX_SEEDS = 4096  # a typo such as 0-99999999 must not become a list


def parse_count(text: str) -> int:
    """Parse a number of steps: 50000, 50_000, 5e4, 50k or 1M."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([kKmM]?)", text.strip())
    value = float(match[1].replace("_", "")) * {"": 1, "k": 1e3, "m": 1e6}[match[2].lower()] if match else 0.5
    if not 1 <= value <= 2**53 or value != int(value):
        raise typer.BadParameter("must be a positive number of steps, such as 50000, 5e4 or 50k")
    return int(value)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds: `0,1,2`, `0-4` or a mix of both."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,10})\s*(?:-\s*(\d{1,10})\s*)?", part)
        if match is None:
            raise UserError(f"seeds '{text}' are not valid; write 0,1,2 or 0-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first + len(seeds) >= _MAX_SEEDS:
            problem = f"write {last}-{first}" if last < first else f"at most {_MAX_SEEDS} seeds are allowed"
            raise UserError(f"seeds '{text}': {part.strip()} is not a valid range; {problem}")
        seeds.extend(range(first, last + 1))
    return tuple(seeds)


def typed(value: Any) -> Any:
    """Callback of options that may name a module, `module:Env-v0`: what the person typed may be imported."""
    allow_imports_in(value)
    return value


def typed_address(address: str | None) -> str | None:
    """Callback of --cluster: an address that the person typed may be joined."""
    if address is not None:
        allow_address(address)
    return address


def allow(names: Any) -> Any:
    """Callback of --allow-import."""
    for name in names or ():
        allow_import(name)
    return names


Config = Annotated[
    str | None,
    typer.Option("--config", "-c", metavar="FILE|PRESET", help="YAML file, or a preset such as ppo/cartpole."),
]
Algo = Annotated[
    str | None, typer.Option("--algo", "-a", metavar="NAME", help="Algorithm; `rl-training list` shows all.")
]
Env = Annotated[
    str | None,
    typer.Option("--env", "-e", metavar="ID", callback=typed, help="Environment: CartPole-v1, or my_module:MyEnv-v0."),
]
AllowImport = Annotated[
    list[str] | None,
    typer.Option("--allow-import", metavar="NAME", callback=allow, help="Module that files may name; can be repeated."),
]
_STEPS = typer.Option(
    "--total-timesteps", "-n", metavar="N", parser=parse_count, help="Steps per seed, such as 50000, 5e4 or 50k."
)
Steps = Annotated[int | None, _STEPS]
RequiredSteps = Annotated[int, _STEPS]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", min=0, max=2**31 - 1, help="Train one agent with this seed.")
]
Seeds = Annotated[
    str | None, typer.Option("--seeds", metavar="LIST", help="Train one agent per seed, together: 0,1,2 or 0-4.")
]
OutputDir = Annotated[
    str | None,
    typer.Option("--output-dir", "-o", metavar="DIR", help="Directory for new run directories.  [default: runs]"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Change a setting: gamma=0.98, num_envs=4, env_kwargs.gravity=8."
    ),
]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:1.")]
Execution = Annotated[
    str | None, typer.Option("--execution", metavar="MODE", help="auto, eager, recorded, compile or cudagraph.")
]
Defaults = Annotated[
    bool,
    typer.Option("--defaults", help="Use the plain default settings even if there is a preset for --algo and --env."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="local|ADDRESS", callback=typed_address,
        help="Distribute with Ray: start it here, or join a cluster (host:port).",
    ),
]  # fmt: skip
GpusPerTrial = Annotated[
    float, typer.Option("--gpus-per-trial", metavar="N", min=0.0, help="With --cluster; fractions are allowed.")
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Hide the progress display.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result to stdout as one JSON object.")]
EpisodeSeed = Annotated[
    int, typer.Option("--seed", min=0, max=2**31 - 1, help="Seed for the episodes (not the training seed).")
]
Checkpoint = Annotated[
    str,
    typer.Option("--checkpoint", "-p", metavar="PATH", help="Checkpoint, RUN (its latest checkpoint) or RUN/best."),
]


def with_options(shared: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `shared` as well. What `shared` makes of them is the command's first argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        theirs, own = (inspect.signature(one, eval_str=True).parameters for one in (shared, command))

        @functools.wraps(command)
        def run(**options: Any) -> None:
            command(shared(**{name: options.pop(name) for name in theirs}), **options)

        parameters = [*theirs.values(), *list(own.values())[1:]]
        run.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
        return run

    return decorate


def run_options(
    config: Config = None, algo: Algo = None, env: Env = None, total_timesteps: Steps = None, seed: Seed = None,
    seeds: Seeds = None, settings: Settings = None, device: Device = None, execution: Execution = None,
) -> dict[str, Any]:  # fmt: skip
    """The options that describe a run, as arguments of `build_config`."""
    return {"source": config, "algo": algo, "env_id": env, "total_timesteps": total_timesteps, "seed": seed,
            "seeds": seeds, "settings": settings, "device": device, "execution": execution}  # fmt: skip


def build_config(
    source: str | None, *, settings: Sequence[str] | None = None, seeds: str | None = None, tuned: bool = False,
    **fields: Any,
) -> TrainConfig:  # fmt: skip
    """The config from the options: the file or preset, changed by the named options, then by `--set`. With `tuned`, an
    algorithm and an environment without a file start from their preset, if there is one; stderr says so."""
    from rl_training.experiment.run.config import TrainConfig, merge, read_config, tuned_preset

    if fields.get("seed") is not None and seeds is not None:
        raise UserError("--seed and --seeds cannot be combined: use --seed for one agent or --seeds for several")
    if source is None and (fields.get("algo") is None or fields.get("env_id") is None):
        given = any("=" in pair and pair.split("=")[0].strip() in ("algo", "env_id") for pair in settings or ())
        if not given:
            raise UserError("nothing to train: give --config ppo/cartpole (a preset or a file), or --algo and --env")
    if source is None and tuned:
        pair = {**dict(p.partition("=")[::2] for p in settings or ()), **{k: v for k, v in fields.items() if v}}
        source = tuned_preset(pair["algo"], pair["env_id"]) if {"algo", "env_id"} <= pair.keys() else None
        if source is not None:
            tell(f"settings: the tuned preset {source} (--defaults for the plain ones)")
    base = read_config(source) if source is not None else {}
    named = {key: value for key, value in fields.items() if value is not None}
    if seeds is not None:
        named["seeds"] = parse_seeds(seeds)
    if "cluster" in named:
        named["cluster"] = {"address": named["cluster"]}
    changes = merge(named, parse_settings(settings or (), named.get("algo", base.get("algo"))))
    if "total_timesteps" not in base and "total_timesteps" not in changes:
        raise UserError("the number of steps is missing: give --total-timesteps, such as -n 50000")
    for chosen, other in (("seeds", "seed"), ("seed", "seeds")):
        if chosen in changes and other not in changes:
            base = {key: value for key, value in base.items() if key != other}
    return TrainConfig.from_file(merge(base, changes))


def parse_settings(pairs: Sequence[str], algo: Any) -> dict[str, Any]:
    """The values of `--set` as TrainConfig fields. Plain names of the algorithm's settings go to algo_kwargs."""
    from rl_training.experiment.run.config import TrainConfig, merge

    fields = TrainConfig.model_fields
    out: dict[str, Any] = {}
    split = [_split(pair) for pair in pairs]
    algo = next((value for path, value in reversed(split) if path == ["algo"]), algo)
    for path, text in split:
        if path[0] not in fields:
            path = ["algo_kwargs", *path] if path[0] in _hyper_fields(algo, path[0]) else path
        value = (
            text if path[0] in ("tags", "algo", "env_id", "output_dir", "device") else read_value(text, ".".join(path))
        )
        if path == ["seeds"] and isinstance(value, str | int):
            value = parse_seeds(text)
        for part in reversed(path[1:]):
            value = {part: value}
        allow_imports_in({path[0]: value})
        out = merge(out, {path[0]: value})
    return out


def _split(pair: str) -> tuple[list[str], str]:
    key, equals, value = pair.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise UserError(f"--set '{pair}': write it as key=value, such as gamma=0.98 or env_kwargs.gravity=8")
    if len(path) > 8:
        raise UserError(f"--set {key}: at most eight levels are allowed")
    return path, value.strip()


def _hyper_fields(algo: Any, key: str) -> Mapping[str, Any]:
    """The algorithm's settings. An unknown key raises UserError here, where the config's fields are known too."""
    from rl_training import registry
    from rl_training.experiment.run.config import TrainConfig
    from rl_training.experiment.run.sb3_names import NAMES

    known: Mapping[str, Any] = registry.entry(algo).load().Hyper.model_fields if isinstance(algo, str) else {}
    if key in NAMES:  # TrainConfig translates them
        return {**known, key: None}
    if key not in known:
        near = did_you_mean(key, [*known, *TrainConfig.model_fields])
        of = f" of {algo}" if isinstance(algo, str) else ""
        raise UserError(f"--set: unknown setting '{key}'{of}.{near} See `rl-training config` for all settings")
    return known


def read_value(text: str, key: str) -> Any:
    """Parse a value as in a configuration file."""
    import yaml

    from rl_training.experiment.run.config import is_bounded, read_yaml

    try:
        value = read_yaml(text)
        if not is_bounded(value):
            raise ValueError("it expands to too many values")
        return value
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = getattr(error, "problem", None) or error
        raise UserError(f"--set {key}: '{text[:80]}' is not valid YAML: {reason}") from None
