"""The command line, with one module per command. Heavy modules are imported only when a command needs them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rl-training` with these arguments (by default the process's) and return the exit status."""
    try:
        from rl_training.cli.app import app
        from rl_training.cli.boundary import run_app
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130

    if argv is not None:
        return run_app(app, list(argv))
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # no child process puts the working directory on its import path
    # This process belongs to us. SIGTERM ends it with status 143, also outside of training. Once a signal ends it, a
    # second one from an impatient user no longer changes the exit status.
    signal.signal(signal.SIGTERM, _terminated)
    status = run_app(app, sys.argv[1:])
    if status > 128:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return status


def _terminated(number: int, _frame: object) -> None:
    from rl_training.errors import Terminated

    raise Terminated(number)
