"""Where errors become one sentence and an exit status: 2 for what the user can fix, 1 for what only we can.

Everything a command raises ends here, so no command needs a `try` of its own and none can show a traceback by accident.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.main import get_command

from rl_training.errors import NonFiniteError, UserError, did_you_mean

EPILOG = "Start with: rl-training train --config ppo/cartpole"
PROGRAM = "rl-training"
DEBUG = "--debug"
_LONGEST = 600  # characters of a message: a value of a million digits must not fill the screen

_stdout: Any = None  # the process's own, while another stands in its place

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# Newer versions of typer carry their own copy of click: its classes are reached through the one typer has always shown.
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]


class Interrupted(Exception):
    """Ctrl-C outside a training run. Some versions of typer swallow KeyboardInterrupt, others rename it."""


def interruptible(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose Ctrl-C reaches `guarded` whatever typer does with it."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except KeyboardInterrupt as error:
            raise Interrupted from error

    return run


@functools.cache
def _command(app: typer.Typer) -> Callable[..., Any]:
    """What typer makes of the app. It would read all signatures again at each call, 40 ms a time."""
    return get_command(app)


def guarded(app: typer.Typer, argv: list[str]) -> int:
    """Run the app; whatever happens, the result is an exit status."""
    debug = DEBUG in argv  # wherever it stands: who needs it appends it to the command that failed
    argv = [word for word in argv if word != DEBUG]
    with _plain_warnings(), _any_text(), _kept_clean("--json" in argv):
        try:
            status = _command(app)(argv, prog_name=PROGRAM, standalone_mode=False)
            sys.stdout.flush()
        except BaseException as error:  # SystemExit and KeyboardInterrupt as well
            status = _status_of(error, argv, debug)
    return status if isinstance(status, int) else 0


def answer(text: str) -> None:
    """What the command was asked for: stdout."""
    print(text, file=_stdout or sys.stdout, flush=True)


def tell(message: str) -> None:
    """A line for the person at the terminal: stderr, so that stdout stays clean."""
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def _status_of(error: BaseException, argv: list[str], debug: bool) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt | Interrupted | typer.Abort):
        tell("interrupted")
        return 130
    if isinstance(error, BrokenPipeError):  # `rl-training list | head -1`
        _drop_stdout()
        return 141
    if debug:
        traceback.print_exception(error)
    if isinstance(error, _UsageError):
        return _fail(_usage(error, argv), 2)
    if isinstance(error, UserError | _ClickException):
        return _fail(str(error), 2)
    if isinstance(error, OSError):
        return _fail(_os_sentence(error), 2)
    if isinstance(error, UnicodeEncodeError):
        return _fail("a value on the command line is not valid UTF-8", 2)
    if isinstance(error, ValueError) and "null byte" in str(error):  # how Python refuses such a path
        return _fail("a path holds a null character", 2)
    if isinstance(error, NonFiniteError) or type(error).__name__ == "EnvError":
        return _fail(str(error), 1)
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
        return _fail("not enough memory; use fewer seeds or environments, a smaller buffer_size or hidden_sizes", 2)
    where = "" if debug else f"; {_saved(error, argv)}"
    return _fail(f"unexpected {type(error).__name__}: {error}{where}", 1)


def _fail(message: str, status: int) -> int:
    tell(f"error: {one_line(message).removesuffix('.')}")
    return status


def one_line(text: str) -> str:
    """Without line breaks and control characters, and of bounded length."""
    text = _COLOURS.sub("", text)
    words = "".join(c if c.isprintable() else " " for c in text).split()
    line = " ".join(words)
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST * 2 // 3]} ... {line[-_LONGEST // 3 :]}"
    return line


def _usage(error: Any, argv: list[str]) -> str:
    """A sentence with the nearest spelling and where to read more; click's own has three shapes."""
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", None) or PROGRAM
    command = getattr(context, "command", None)
    see = f" `{path} --help` shows what there is"
    kind, text = type(error).__name__, one_line(error.format_message()).rstrip(".")
    if kind == "NoSuchOption":
        params, word = list(getattr(command, "params", ())), error.option_name.lstrip("-")
        if any(param.name in (word, f"{word}s") and not param.opts[0].startswith("-") for param in params):
            return f"{path} takes the {word} as it is, without '--{word}'.{see}"
        known = [name for param in params for name in param.opts if name.startswith("--")]
        return f"unknown option '{error.option_name}'.{did_you_mean(error.option_name, known)}{see}"
    if text.startswith("No such command"):
        commands = list(getattr(command, "commands", ()))
        given = text.split("'")[1] if "'" in text else ""
        return f"unknown command '{given}'.{did_you_mean(given, commands)} Commands: {', '.join(commands)}"
    if kind == "BadParameter" and getattr(error, "param", None) is not None:
        names = error.param.opts
        value = next((f" = '{word}'" for name, word in itertools.pairwise(argv) if name in names), "")
        return f"{names[0]}{value}: {error.message.removeprefix('Value error, ').removeprefix('Input ')}"
    return f"{text[:1].lower()}{text[1:]}.{see}"


def _os_sentence(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def _saved(error: BaseException, argv: list[str]) -> str:
    """Keep the traceback where it can be sent from; a second failure here must not hide the first."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="rl-training-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"{PROGRAM} {' '.join(argv)}\n\n")
            traceback.print_exception(error, file=file)
        return f"the traceback is in {file.name} (or repeat with {DEBUG} to see it)"
    except OSError:
        return f"repeat with {DEBUG} to see the traceback"


def _drop_stdout() -> None:
    """The reader has gone: what is left in the buffer must not raise again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (_stdout or sys.stdout).fileno())
        os.close(null)


@contextlib.contextmanager
def _kept_clean(as_json: bool) -> Iterator[None]:
    """With --json stdout holds one object and nothing else: what an environment or a library prints goes to stderr."""
    global _stdout
    if not as_json:
        yield
        return
    before, _stdout = _stdout, sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout = before


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line without file and source; each once."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = one_line(str(message))
        if text not in seen:
            seen.add(text)
            tell(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _any_text() -> Iterator[None]:
    """Names may hold bytes that the terminal's encoding has no character for; printing them must not fail."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    yield
