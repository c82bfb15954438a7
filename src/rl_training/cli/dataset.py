"""`rl-training dataset make | inspect | convert`"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.boundary import interruptible, tell
from rl_training.cli.output import lines, print_json
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.data.dataset import TransitionDataset

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=False, pretty_exceptions_enable=False, help="Make, inspect and convert data."
)

Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="FILE.npz, FILE.hdf5, or a Minari folder.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
Bins = 10


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
        typer.Option("--level", metavar="NAME", help="random, medium, medium-replay, expert, medium-expert."),
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="random, policy or replay.")] = None,
    path: Annotated[str | None, typer.Option("--path", metavar="RUN", help="Agent of policy and replay.")] = None,
    size: Annotated[int, typer.Option("--size", "-n", min=0, max=2**31 - 1, help="Transitions.  [10000]")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31 - 1, help="Of episodes and actions.")] = 0,
    noise: Annotated[float, typer.Option("--noise", min=0.0, help="policy: noise on the actions.")] = 0.0,
    force: Force = False,
    as_json: o.Json = False,
) -> None:
    """Make a dataset: of a named level by our own agents, or by an agent of yours.

    rl-training dataset make --env Pendulum-v1 --level medium -n 20000 -o medium.npz

    rl-training dataset make --kind policy --path runs/my_run -o mine.hdf5
    """
    from rl_training.data.dataset_files import write_dataset
    from rl_training.data.levels import level_recipe
    from rl_training.experiment.run.transition_data import load_transition_dataset

    _free(output, force)
    if level is not None:
        if kind is not None or path is not None or noise:
            raise UserError("--level chooses the agent itself: leave --kind, --path and --noise out")
        if env is None:
            raise UserError("--level needs --env")
        recipe = level_recipe(level, env, size, seed)
    else:
        fields = {"kind": kind or "random", "path": path, "size": size, "seed": seed, "env_id": env, "noise": noise}
        recipe = {name: value for name, value in fields.items() if value is not None}
    dataset = load_transition_dataset(**recipe)
    write_dataset(dataset, output, env_id=env or "")
    _show(dataset, output, env, as_json)


def inspect(path: Annotated[str, typer.Argument(metavar="FILE")], env: o.Env = None, as_json: o.Json = False) -> None:
    """Sizes, returns and action coverage of a dataset."""
    from rl_training.data.dataset_files import read_dataset

    _show(read_dataset(path), path, env, as_json)


def convert(
    path: Annotated[str, typer.Argument(metavar="FILE")], output: Output, force: Force = False, as_json: o.Json = False
) -> None:
    """The same transitions in another format: npz, HDF5 (D4RL) or Minari, by the name of the output."""
    from rl_training.data.dataset_files import read_dataset, write_dataset

    _free(output, force)
    dataset = read_dataset(path)
    write_dataset(dataset, output)
    _show(dataset, output, None, as_json)


_COMMANDS: dict[str, Callable[..., None]] = {"make": make, "inspect": inspect, "convert": convert}
for _name, _function in _COMMANDS.items():
    app.command(_name)(interruptible(_function))


def _free(output: str, force: bool) -> None:
    if Path(output).exists() and not (force and Path(output).is_file()):
        hint = "choose another name" if Path(output).is_dir() else "--force replaces it"
        raise UserError(f"{output} exists already; {hint}")


def describe(dataset: TransitionDataset, env: str | None) -> dict[str, Any]:
    """What `inspect` shows."""
    import numpy as np

    from rl_training.data.levels import normalized_score

    returns = dataset.episode_returns()
    counts, edges = np.histogram(returns, Bins)
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
    """Share of the bins between smallest and largest value (ten a dimension; each number of a discrete one) in use."""
    import numpy as np

    shares = []
    for column in actions.T:
        whole = column.dtype.kind in "iub"
        bins = int(column.max()) - int(column.min()) + 1 if whole else Bins
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
    used = f"{100 * facts['action_coverage']:.0f} % of that range in use"
    actions = f"{_short(facts['actions']['min'])} to {_short(facts['actions']['max'])}, {used}"
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
    print(path)
    print(lines(rows))
    print("\n  returns of the episodes")
    counts, edges = facts["histogram"]["counts"], facts["histogram"]["edges"]
    for count, low, high in zip(counts, edges[:-1], edges[1:]):
        print(f"  {low:>11,.1f} .. {high:>11,.1f}  {'#' * round(40 * count / max(counts))} {count:,}")
    if facts["episodes"] < Bins:
        tell("note: few episodes; the histogram says little")


def _short(values: Any) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"
