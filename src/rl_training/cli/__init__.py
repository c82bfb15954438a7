"""The command line. One module a command; nothing heavy is imported before a command needs it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rl-training` with these arguments (the process's by default) and return the exit status."""
    from rl_training.cli.app import app
    from rl_training.cli.boundary import guarded

    if argv is not None:
        return guarded(app, list(argv))
    # The process is ours: also outside of training SIGTERM ends it with 143, and once it ends by a signal, a second
    # one (an impatient user) can no longer change how.
    signal.signal(signal.SIGTERM, _terminated)
    status = guarded(app, sys.argv[1:])
    if status > 128:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return status


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
