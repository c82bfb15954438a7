"""The commands and their order in `--help`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from rl_training.cli.bench import bench
from rl_training.cli.boundary import EPILOG, interruptible
from rl_training.cli.cluster import app as cluster
from rl_training.cli.compare import compare
from rl_training.cli.config import config
from rl_training.cli.dashboard import dashboard
from rl_training.cli.dataset import app as dataset
from rl_training.cli.doctor import doctor
from rl_training.cli.dream import dream
from rl_training.cli.evaluate import evaluate, record
from rl_training.cli.export import export
from rl_training.cli.finetune import finetune
from rl_training.cli.lint_env import lint_env
from rl_training.cli.listing import list_algorithms
from rl_training.cli.plan import plan
from rl_training.cli.predict import predict
from rl_training.cli.replay_crash import replay_crash
from rl_training.cli.report import leaderboard, report
from rl_training.cli.resume import resume
from rl_training.cli.sweep import sweep
from rl_training.cli.train import train
from rl_training.cli.tune import tune, tune_report
from rl_training.cli.verify import verify
from rl_training.cli.verify_resume import verify_resume

# Plain help texts: importing rich would take longer than everything else together.
app = typer.Typer(
    name="rl-training", add_completion=False, rich_markup_mode=None, no_args_is_help=False, epilog=EPILOG,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        from rl_training.version import __version__

        print(f"rl-training {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback if an error occurs.")] = False,
) -> None:
    """Train, evaluate and resume reinforcement-learning agents."""
    if context.invoked_subcommand is None:
        print(context.get_help())


_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "train": (train, "Train an agent, or a study with several seeds."),
    "eval": (evaluate, "Evaluate a checkpoint."),
    "record": (record, "Record videos of a trained agent."),
    "dream": (dream, "Compare a world model's predictions with reality."),
    "sweep": (sweep, "Train every combination of a grid of settings."),
    "tune": (tune, "Search for better settings with Optuna."),
    "tune-report": (tune_report, "Show the results of a tuning study."),
    "resume": (resume, "Continue a run exactly where it stopped."),
    "finetune": (finetune, "Continue training an offline agent in the environment."),
    "plan": (plan, "Estimate the memory, disk space and time of a run."),
    "lint-env": (lint_env, "Check an environment for mistakes."),
    "predict": (predict, "Print the action for an observation."),
    "export": (export, "Export a policy to ONNX or torch.export."),
    "dashboard": (dashboard, "Show runs in a browser while they train."),
    "report": (report, "Summarise runs with scores, intervals and plots."),
    "leaderboard": (leaderboard, "Rank the runs in a directory."),
    "compare": (compare, "Test whether run B is worse than run A."),
    "config": (config, "Show the complete configuration of a run."),
    "list": (list_algorithms, "List the algorithms."),
    "verify": (verify, "Compare an algorithm's score with its published bar."),
    "bench": (bench, "Train a suite of studies and compare with published scores."),
    "verify-resume": (verify_resume, "Check that a run resumes exactly."),
    "replay-crash": (replay_crash, "Find the operation that first produced NaN."),
    "doctor": (doctor, "Check this machine and installation."),
}
for _name, (_function, _summary) in _COMMANDS.items():
    app.command(_name, short_help=_summary)(interruptible(_function))
app.add_typer(cluster, name="cluster", short_help="Look at distributed runs.")
app.add_typer(dataset, name="dataset", short_help="Make, inspect and convert datasets.")
