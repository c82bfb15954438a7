"""`rl-training tune` and `rl-training tune-report`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import tell
from rl_training.cli.output import command, lines, named_modules, print_json, say, score
from rl_training.cli.sweep import Workers

if TYPE_CHECKING:
    from rl_training.experiment.studies.pool import Event

_SHOWN = 10  # rows of the table


def tune(
    config: o.Config = None,
    algo: o.Algo = None,
    env: o.Env = None,
    total_timesteps: o.Steps = None,
    trials: Annotated[
        int, typer.Option("--trials", "-t", metavar="N", min=1, max=100_000, help="Number of settings to try.")
    ] = 20,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="LIST", help="Seeds of each trial, trained together.")
    ] = "100-102",
    final_seeds: Annotated[
        str, typer.Option("--final-seeds", metavar="LIST", help="Held-out seeds for the score of the best settings.")
    ] = "1000-1004",
    space: Annotated[
        str | None,
        typer.Option("--space", metavar="FILE", help="Search space.  [default: the algorithm's packaged space]"),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Study directory.  [default: tuning/<algo>-<env>]"),
    ] = None,
    workers: Workers = 1,
    sampler_seed: Annotated[
        int, typer.Option("--sampler-seed", metavar="N", min=0, max=2**31 - 1, help="Seed for the search itself.")
    ] = 0,
    settings: o.Settings = None,
    device: o.Device = None,
    execution: o.Execution = None,
    allow_import: o.AllowImport = None,
    cluster: o.Cluster = None,
    no_progress: o.NoProgress = False,
    as_json: o.Json = False,
) -> None:
    """Search for better settings with Optuna, which stops bad trials early. Needs the `tuning` extra.

    rl-training tune --config ppo/cartpole --trials 50 --workers 4

    To continue a study that was interrupted, run the same command again; with more --trials it searches longer. The
    best settings are written to best.yaml, a file for `train --config`, and scored on held-out seeds.
    """
    from rl_training.experiment.studies.tune import make_tuning, optuna

    optuna()  # first, because the extra may be missing
    chosen = o.build_config(
        config, settings=settings, algo=algo, env_id=env, total_timesteps=total_timesteps, device=device,
        execution=execution,
    )  # fmt: skip
    chosen.hyper()
    place = output_dir or f"tuning/{chosen.algo}-{chosen.env_id.replace('/', '-').replace(':', '-')}"
    study = make_tuning(
        place, chosen, space=space, trials=trials, seeds=o.parse_seeds(seeds), final_seeds=o.parse_seeds(final_seeds),
        sampler_seed=sampler_seed, on_event=(lambda event: None) if no_progress else _show,
    )  # fmt: skip
    _report(study.run(workers, cluster=cluster), as_json)


def tune_report(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory of a study.", show_default=False)],
    as_json: o.Json = False,
) -> None:
    """Show the trials of a tuning study, the most important settings, and the best values."""
    from rl_training.experiment.studies.tune import report

    _report(report(directory), as_json)


def _show(event: Event) -> None:
    from rl_training.experiment.studies.trials import summary_of
    from rl_training.experiment.studies.tune import was_pruned

    state, name = event.state, event.job.name
    if event.job.directory.parent.name == "final":
        name = f"{name} on held-out seeds"
    evaluation = summary_of(state).get("final_eval") or {}
    mean = f"mean return {evaluation['mean_return']:,.1f}" if "mean_return" in evaluation else "no evaluation"
    outcome = {
        "start": f"resumed at step {state.step:,}" if state.step >= 0 else "started",
        "restart": "its worker died; restarted",
        "done": f"pruned, {mean}" if was_pruned(state) else mean,
        "failed": f"failed: {state.error}",
    }[event.kind]
    tell(f"{name}: {outcome}")


def _report(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    done = [row for row in report["trials"] if row["state"] == "complete"]
    counts = ", ".join(
        f"{sum(row['state'] == state for row in report['trials'])} {state}" for state in ("complete", "pruned", "fail")
    )
    say(f"{report['algo']} on {report['env_id']}: {counts}; seeds {', '.join(map(str, report['seeds']))}")
    for row in sorted(done, key=lambda row: -row["mean_return"])[:_SHOWN]:
        params = "  ".join(f"{key}={_short(value)}" for key, value in row["params"].items())
        say(f"  {row['mean_return']:>10,.1f}  trial {row['number']:<4} {params}")
    rows = []
    if report["importance"]:
        rows.append(("matters most", ", ".join(f"{k} {v:.0%}" for k, v in list(report["importance"].items())[:5])))
    if report["held_out"]:
        rows.append(("held-out seeds", score(report["held_out"])))
    if report["best_config"]:
        rows.append(("best settings", report["best_config"]))
        rows.append(
            ("train with them", command("train", "--config", report["best_config"], *named_modules(report["env_id"])))
        )
    if errors := [row for row in report["trials"] if row["error"]]:
        rows.append(("first failure", f"trial {errors[0]['number']}: {errors[0]['error']}"))
    if rows:
        print(lines(rows))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
