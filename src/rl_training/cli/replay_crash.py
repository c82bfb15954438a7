"""`rl-training replay-crash`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rl_training.cli import options as o
from rl_training.cli.output import lines, show


def replay_crash(
    dump: Annotated[str, typer.Argument(metavar="DUMP", help="A nan_dump_... directory of a run.", show_default=False)],
    env: o.Env = None,
    allow_import: o.AllowImport = None,
    as_json: o.Json = False,
) -> None:
    """Find the operation that first produced NaN or infinity, by repeating the run up to the update of a dump.

    The run itself is not changed. Exit status 0: found, 1: all values were finite this time.
    """
    from rl_training.experiment.tools.replay_crash import replay_crash as replay

    found = replay(dump, env=env)
    show(found, as_json, _show)
    raise typer.Exit(0 if found["reproduced"] else 1)


def _show(found: dict[str, Any]) -> None:
    print(f"update {found['update']} of seed {found['seed']}")
    if not found["reproduced"]:
        print("Not reproduced: when the run is repeated, this update is finite or never reached.")
        return
    first, rows = found["first"], []
    if first is not None and first["kind"] == "batch":
        rows.append(("first", f"the batch itself: {first['place']}"))
    elif first is not None:
        rows.append(("first", f"{first['value']} in the {first['kind']}, by {first['operation']} at {first['place']}"))
        rows.append(("code", first["code"]))
    rows.append(("loss terms", ", ".join(found["non_finite_metrics"]) or "all finite"))
    rows.append(("afterwards", ", ".join(found["non_finite_after"][:6]) or "all finite"))
    large = sorted(found["largest_in_batch"].items(), key=lambda item: -item[1])[:3]
    rows.append(("batch", ", ".join(f"{name} up to {value:.3g}" for name, value in large)))
    print(lines(rows))
