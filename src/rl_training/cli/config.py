"""`rl-training config`"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import print_json

if TYPE_CHECKING:
    from rl_training.experiment.run.config import TrainConfig


class Format(str, Enum):  # older versions of typer do not support Literal
    yaml = "yaml"
    json = "json"


@o.with_options(o.run_options)
def config(
    run: dict[str, Any],
    output_dir: o.OutputDir = None,
    defaults: o.Defaults = False,
    form: Annotated[Format, typer.Option("--format", hidden=True)] = Format.yaml,  # the older name of --json
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Show the complete configuration of a run, including all defaults. The YAML output is a valid --config file."""
    algo, env = run["algo"], run["env_id"]
    if run["source"] is None and algo is not None:
        from rl_training.experiment.run.config import tuned_preset

        if defaults or env is None or tuned_preset(algo, env) is None:
            run["env_id"], run["total_timesteps"] = _example(algo, env, run["total_timesteps"], run["settings"])
            defaults = True  # the preset of an example says nothing about the algorithm
    chosen = o.build_config(**run, output_dir=output_dir, tuned=not defaults)
    from rl_training.experiment.run.environment import with_env

    chosen = with_env(chosen, None)[0].resolved()
    if as_json or form is Format.json:
        print_json(chosen.to_dict())
    else:
        print(as_yaml(chosen), end="")


def _example(
    algo: str, env: str | None, steps: int | None, settings: list[str] | None
) -> tuple[str | None, int | None]:
    """The environment and length to show an algorithm's settings with, where the user gave none."""
    from rl_training import registry

    given = {pair.partition("=")[0].strip() for pair in settings or ()}
    shown = []
    if env is None and "env_id" not in given:
        env = "CartPole-v1" if "discrete" in registry.entry(algo).actions else "Pendulum-v1"
        shown.append(env)
    if steps is None and "total_timesteps" not in given:
        steps = 100_000
        shown.append(f"{steps:,} steps")
    if shown:
        tell(f"shown for {' and '.join(shown)}")
    return env, steps


def as_yaml(config: TrainConfig) -> str:
    """The config as YAML, with a comment that explains each field."""
    from rl_training import registry

    out = []
    for name, value in config.to_dict().items():
        field = type(config).model_fields[name]
        if name != "algo_kwargs":
            out.append(_entry(name, value, field.description))
            continue
        hyper = registry.entry(config.algo).load().Hyper.model_fields
        out.append(f"algo_kwargs:  # {field.description}\n")
        for key, item in value.items():
            text = _entry(key, item, hyper[key].description)
            out.extend(f"  {line}\n" for line in text.splitlines())
    return "".join(out)


def _entry(name: str, value: Any, description: str | None) -> str:
    import yaml

    flow = None if isinstance(value, dict | list) else False  # `[64, 64]` on one line, but `seed: 0` without braces
    text: str = yaml.safe_dump({name: value}, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=10**6)
    comment = f"# {' '.join(description.split())}" if description else ""
    if text.count("\n") > 1:  # within a block, a comment would be read as part of the value
        return f"{comment}\n{text}"
    return f"{text.rstrip():<32}  {comment}".rstrip() + "\n"
