"""`rl-training dataset make | inspect | convert`"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import interruptible, tell
from rl_training.cli.output import lines, print_json, say
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.data.dataset import TransitionDataset

app = typer.Typer(rich_markup_mode=None, no_args_is_help=False, pretty_exceptions_enable=False)

Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="FILE.npz, FILE.hdf5, or a Minari folder.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
_File = Annotated[str, typer.Argument(metavar="FILE", help="Dataset: .npz, .hdf5, or a Minari folder.")]
_BINS = 10


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Make, inspect and convert datasets of transitions."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def make(
    output: Output,
    env: o.Env = None,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="NAME", help="random, medium, medium-replay, expert or medium-expert."),
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="random, policy or replay.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-p", metavar="PATH", help="Agent to use: checkpoint, RUN or RUN/best."),
    ] = None,
    size: Annotated[
        int,
        typer.Option("--size", "-n", min=0, max=2**31 - 1, show_default=False, help="Transitions.  [default: 10000]"),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31 - 1, help="Seed for episodes and actions.")] = 0,
    noise: Annotated[float, typer.Option("--noise", min=0.0, help="Action noise, for --kind policy.")] = 0.0,
    force: Force = False,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Make a dataset of a standard level with agents trained for it, or with an agent of your own.

    rl-training dataset make --env Pendulum-v1 --level medium -n 20000 -o medium.npz

    rl-training dataset make --kind policy --checkpoint runs/my_run -o mine.hdf5
    """
    from rl_training.data.dataset_files import write_dataset
    from rl_training.data.levels import level_recipe
    from rl_training.experiment.run.transition_data import load_transition_dataset

    _check_output(output, force)
    target = str(Path(output).absolute())  # an environment may change the directory
    if level is not None:
        if kind is not None or checkpoint is not None or noise:
            raise UserError(
                "--level cannot be combined with --kind, --checkpoint or --noise: it chooses the agent itself"
            )
        if env is None:
            raise UserError("--level needs --env, such as --env Pendulum-v1")
        recipe = level_recipe(level, env, size, seed)
    else:
        fields = {
            "kind": kind or "random",
            "path": checkpoint,
            "size": size,
            "seed": seed,
            "env_id": env,
            "noise": noise,
        }
        recipe = {name: value for name, value in fields.items() if value is not None}
    dataset = load_transition_dataset(**recipe)
    write_dataset(dataset, target, env_id=env or "")
    _show(dataset, output, env, as_json)


def inspect(path: _File, env: o.Env = None, as_json: o.Json = False) -> None:
    """Show the size, returns and action coverage of a dataset."""
    from rl_training.data.dataset_files import read_dataset

    _show(read_dataset(path), path, env, as_json)


def convert(path: _File, output: Output, force: Force = False, as_json: o.Json = False) -> None:
    """Convert a dataset to the format of the output's name: npz, HDF5 (D4RL) or Minari."""
    from rl_training.data.dataset_files import read_dataset, write_dataset

    _check_output(output, force)
    dataset = read_dataset(path)
    write_dataset(dataset, output)
    _show(dataset, output, None, as_json)


_COMMANDS: dict[str, Callable[..., None]] = {"make": make, "inspect": inspect, "convert": convert}
for _name, _function in _COMMANDS.items():
    app.command(_name)(interruptible(_function))


def _check_output(output: str, force: bool) -> None:
    if Path(output).exists() and not (force and Path(output).is_file()):
        hint = "choose another name" if Path(output).is_dir() else "use --force to overwrite it"
        raise UserError(f"{output} already exists; {hint}")


def describe(dataset: TransitionDataset, env: str | None) -> dict[str, Any]:
    """The facts that `inspect` shows."""
    import numpy as np

    from rl_training.data.levels import normalized_score

    returns = dataset.episode_returns()
    counts, edges = np.histogram(returns, _BINS)
    actions = dataset.actions.reshape(len(dataset), -1)
    out = {
        "transitions": len(dataset),
        "episodes": len(returns),
        "terminated": int(dataset.terminated.sum()),
        "truncated": int(dataset.truncated.sum()),
        "bytes": dataset.nbytes,
        "columns": {name: f"{a.dtype}{list(a.shape[1:])}" for name, a in dataset.arrays().items()},
        "return": {"mean": returns.mean(), "std": returns.std(), "min": returns.min(), "max": returns.max()},
        "histogram": {"counts": counts, "edges": edges},
        "actions": {"min": actions.min(0), "max": actions.max(0), "mean": actions.mean(0)},
        "action_coverage": _coverage(actions),
        "hash": dataset.content_hash(),
    }
    score = normalized_score(env, float(returns.mean())) if env else None
    return out if score is None else {**out, "normalized_score": score}


def _coverage(actions: Any) -> float:
    """Share of the bins between the smallest and largest action that contain data. A continuous dimension has ten bins,
    a discrete one has a bin per number."""
    import numpy as np

    shares = []
    for column in actions.T:
        whole = column.dtype.kind in "iub"
        bins = int(column.max()) - int(column.min()) + 1 if whole else _BINS
        counts = np.bincount(column - column.min(), minlength=bins) if whole else np.histogram(column, bins)[0]
        shares.append(np.count_nonzero(counts) / bins)
    return float(np.mean(shares))


def _show(dataset: TransitionDataset, path: str, env: str | None, as_json: bool) -> None:
    facts = describe(dataset, env)
    if as_json:
        print_json({"path": path, **facts})
        return
    stats = facts["return"]
    ends = f"{facts['terminated']:,} terminated, {facts['truncated']:,} truncated"
    covered = f"{100 * facts['action_coverage']:.0f} % of that range covered"
    actions = f"{_short(facts['actions']['min'])} to {_short(facts['actions']['max'])}, {covered}"
    rows = [
        ("transitions", f"{facts['transitions']:,} in {facts['episodes']:,} episodes ({ends})"),
        ("size", f"{facts['bytes'] / 2**20:,.1f} MiB"),
        ("columns", ", ".join(f"{name} {kind}" for name, kind in facts["columns"].items())),
        ("return", f"{stats['mean']:,.1f} +/- {stats['std']:,.1f}, from {stats['min']:,.1f} to {stats['max']:,.1f}"),
        ("actions", actions),
        ("content hash", facts["hash"]),
    ]
    if "normalized_score" in facts:
        rows.insert(4, ("D4RL score", f"{facts['normalized_score']:.1f}"))
    say(path)
    print(lines(rows))
    print("\n  episode returns")
    counts, edges = facts["histogram"]["counts"], facts["histogram"]["edges"]
    for count, low, high in zip(counts, edges[:-1], edges[1:]):
        print(f"  {low:>11,.1f} .. {high:>11,.1f}  {'#' * round(40 * count / max(counts))} {count:,}")
    if facts["episodes"] < _BINS:
        tell(f"note: the dataset has fewer than {_BINS} episodes, so the histogram is of little use")


def _short(values: Any) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"
