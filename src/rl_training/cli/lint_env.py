"""`rl-training lint-env`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import one_line
from rl_training.cli.output import lines, say, show
from rl_training.errors import UserError


def lint_env(
    env: Annotated[
        str,
        typer.Argument(metavar="ENV", callback=o.typed, help="Environment, such as CartPole-v1.", show_default=False),
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Argument of the environment.")
    ] = None,
    seed: o.EpisodeSeed = 0,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Check an environment for mistakes and say how to fix them. Exit status 0: clean, 1: problems found."""
    arguments: dict[str, Any] = {}
    for pair in settings or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set '{pair}': write it as key=value, such as gravity=8")
        arguments[key.strip()] = o.read_value(text, key.strip())
    from rl_training.experiment.tools.lint_env import lint

    found = lint(env, arguments, seed)
    show(found, as_json, _show)
    raise typer.Exit(1 if found["problems"] else 0)


def _show(found: dict[str, Any]) -> None:
    rows = [("observation", found["observation"]), ("action", found["action"])]
    if "random_return" in found:
        score, endings = found["random_return"], found["endings"]
        length = (
            f"{found['mean_length']:,.0f} steps ({endings['terminated']} terminated, {endings['truncated']} truncated)"
        )
        rows += [
            ("random policy", f"return {score['mean']:,.2f} (std {score['std']:,.2f})"),
            ("episodes", f"{found['episodes']} of {length}; time limit {found['max_episode_steps'] or 'none'}"),
            ("seeding", found["seeding"]),
        ]
    if "resume" in found:
        rows.append(("exact resume", found["resume"]))
    say(found["env_id"])
    print(lines([(name, one_line(text)) for name, text in rows]))
    for finding in found["findings"]:
        say(f"{finding['level']}: {finding['check']}: {one_line(finding['what'])}; {finding['do']}")
    print("No problems found." if not found["problems"] else f"Problems found: {found['problems']}.")
