"""`rl-training dashboard`"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from rl_training.cli.boundary import answer, tell


def dashboard(
    runs: Annotated[str, typer.Argument(metavar="RUNS", help="A directory of runs, or one run.")] = "runs",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port on this machine; 0: a free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show runs in a browser while they train: curves, settings, videos and files.

    The page is read-only and served on this machine only, at an address with a random token. Ctrl-C ends it.
    """
    import webbrowser

    from rl_training.reports.dashboard import Dashboard
    from rl_training.reports.runs import runs_below

    runs_below(Path(runs))  # at least one, or an error
    with Dashboard(Path(runs).resolve(), port) as server:
        answer(server.url)
        tell("the dashboard is at this address until you press Ctrl-C")
        if browser:
            webbrowser.open(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
