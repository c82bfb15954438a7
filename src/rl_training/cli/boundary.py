"""Turns every error into one sentence and an exit status: 2 if the user can fix it, 1 if only we can.

All exceptions of a command end up here. So no command needs its own `try`, and none shows a traceback by accident.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import select
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.main import get_command

from rl_training.errors import NonFiniteError, Terminated, UserError, describe, did_you_mean, printable, short_repr
from rl_training.imports import forget_afterwards

EPILOG = "Start with: rl-training train --config ppo/cartpole"
PROGRAM = "rl-training"
DEBUG = "--debug"
_MAX_LENGTH = 600  # of a message, in characters: a value with a million digits must not fill the screen

_stdout: Any = None  # the original stdout while it is redirected

# Of PyTorch, for tensors that no machine has room for.
_TOO_LARGE = re.compile(
    "^OutOfMemoryError|allocate memory|Overflow when unpacking|multiplication overflow|size calculation"
)
_CALLERS = tuple(f"rl_training.envs.{name}" for name in ("sync", "native", "masks"))  # they call environments
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# Newer versions of typer bundle their own click. BadParameter is public in all versions and leads to the base classes.
_UsageError, _ClickException = typer.BadParameter.__mro__[1:3]


class Interrupted(Exception):
    """Ctrl-C outside of training. Some versions of typer swallow KeyboardInterrupt, others rename it."""


def interruptible(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that Ctrl-C reaches `run_app` with every version of typer."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except KeyboardInterrupt as error:
            raise Interrupted from error

    return run


@functools.cache
def _command(app: typer.Typer) -> Callable[..., Any]:
    """The app's click command, cached: typer would read all signatures again at each call, which takes 40 ms."""
    return get_command(app)


def run_app(app: typer.Typer, argv: list[str]) -> int:
    """Run the app and return an exit status, whatever happens."""
    debug = DEBUG in argv  # anywhere: users append it to the command that failed
    argv = [word for word in argv if word != DEBUG]
    quiet = _redirect_prints("--json" in argv)
    with forget_afterwards(), _one_line_warnings(), _print_any_text(), _quiet_threads(), quiet:
        try:
            status = _command(app)(_own_names(_command(app), argv), prog_name=PROGRAM, standalone_mode=False)
            sys.stdout.flush()
        except BaseException as error:  # including SystemExit and KeyboardInterrupt
            status = _status_of(error, argv, debug)
    return status if isinstance(status, int) else 0


# Every command uses the first name of a row. The others are older names, and names that another command uses for the
# same thing: they are understood everywhere and shown nowhere.
_SAME = (
    ("--checkpoint", "--run", "--path"),
    ("--output-dir", "--output", "--video"),
    ("--output", "--output-dir"),
    ("--num-episodes", "--episodes"),
    ("--total-timesteps", "--timesteps", "--steps"),
    ("--env", "--env-id"),
    ("--workers", "--jobs", "-j"),
)


def _own_names(command: Any, argv: list[str]) -> list[str]:
    """The words of a command line with the command's own names of options."""
    words = iter(argv)
    while isinstance(getattr(command, "commands", None), dict):
        found = next((command.commands[word] for word in words if word in command.commands), None)
        if found is None:
            return argv
        command = found
    known = {name for param in command.params for name in param.opts}
    names = {other: own for own, *others in _SAME if own in known for other in others if other not in known}
    out = []
    for word in argv:
        name, equals, value = word.partition("=")
        if word[:2] in names and not equals:  # a short option; its value may follow directly: -j4
            name, equals, value = word[:2], "=" if word[2:] else "", word[2:]
        if name in names and names[name] in [w.partition("=")[0] for w in argv]:
            raise UserError(f"{name} and {names[name]} mean the same: give one of them")
        out.append(f"{names.get(name, name)}{equals}{value}")
    return out


def answer(text: str) -> None:
    """Print the result of the command to stdout."""
    print(text, file=_stdout or sys.stdout, flush=True)


def tell(message: str) -> None:
    """Print a message for the user to stderr, so that stdout only contains results."""
    with contextlib.suppress(OSError, ValueError):
        print("\n".join(map(printable, message.split("\n"))), file=sys.stderr, flush=True)


def _status_of(error: BaseException, argv: list[str], debug: bool) -> int:
    if isinstance(error, Terminated):
        return int(error.code or 0)
    if isinstance(error, KeyboardInterrupt | Interrupted | typer.Abort):
        tell("interrupted")
        return 130
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):  # click's answer to it
        error = error.__context__
    in_environment = _in_environment(error)
    if isinstance(error, BrokenPipeError) and (not in_environment or _reader_is_gone()):  # `rl-training list | head -1`
        _drop_stdout()
        return 141
    if debug:
        traceback.print_exception(error)
    if in_environment:
        return _fail(f"the environment failed: {_described(error, argv, debug)}", 1)
    if isinstance(error, _UsageError):
        return _fail(_usage_message(error, argv), 2)
    if isinstance(error, UserError | _ClickException):
        return _fail(str(error), 2)
    if isinstance(error, OSError):
        return _fail(_os_message(error), 2)
    if isinstance(error, UnicodeEncodeError):
        return _fail("a value on the command line is not valid UTF-8", 2)
    if isinstance(error, ValueError) and "null byte" in describe(error):  # Python's error for such a path
        return _fail("a path contains a null character", 2)
    if isinstance(error, NonFiniteError) or (type(error).__name__ == "EnvError" and error.__cause__ is None):
        return _fail(str(error), 1)
    if isinstance(error, MemoryError) or _TOO_LARGE.search(describe(error)):
        return _fail("not enough memory; use fewer seeds or environments, or smaller buffer_size or hidden_sizes", 2)
    if type(error).__name__ == "EnvError":  # caused by an exception of the environment's own code
        return _fail(f"{error}{_traceback_place(error, argv, debug)}", 1)
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}) was called in {_raised_in(error)}, so the command ended early"
        return _fail(f"{what}{_traceback_place(error, argv, debug)}", 1)
    return _fail(f"unexpected {_described(error, argv, debug)}", 1)


def _described(error: BaseException, argv: list[str], debug: bool) -> str:
    return f"{describe(error)}, raised in {_raised_in(error)}{_traceback_place(error, argv, debug)}"


def _in_environment(error: BaseException) -> bool:
    """Did a step or reset of an environment raise it? The innermost frame of the library is the one that called it."""
    if isinstance(error, UserError | MemoryError | SystemExit) or type(error).__name__ == "EnvError":
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [index for index, name in enumerate(modules) if name.partition(".")[0] == "rl_training"]
    return bool(own) and own[-1] < len(modules) - 1 and modules[own[-1]] in _CALLERS


def _raised_in(error: BaseException) -> str:
    """The module that raised the error: that of a plug-in, an environment or a callback."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{frame.f_globals.get('__name__', 'unknown code')} ({frame.f_code.co_filename}:{line})"


def _fail(message: str, status: int) -> int:
    tell(f"error: {one_line(message).removesuffix('.')}")
    return status


def one_line(text: str) -> str:
    """The text without line breaks and control characters, and of bounded length."""
    text = _COLOURS.sub("", text)
    words = "".join(c if c.isprintable() else " " for c in text).split()
    line = " ".join(words)
    if len(line) > _MAX_LENGTH:
        line = f"{line[: _MAX_LENGTH * 2 // 3]} ... {line[-_MAX_LENGTH // 3 :]}"
    return line


def _usage_message(error: Any, argv: list[str]) -> str:
    """One sentence with the nearest spelling and where to read more. click formats its errors in three ways."""
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", None) or PROGRAM
    command = getattr(context, "command", None)
    see = f" See `{path} --help`"
    kind, text = type(error).__name__, one_line(error.format_message()).rstrip(".")
    if kind == "NoSuchOption":
        params, word = list(getattr(command, "params", ())), error.option_name.lstrip("-")
        if any(param.name in (word, f"{word}s") and not param.opts[0].startswith("-") for param in params):
            return f"give the {word} without '--{word}': {path} {word.upper()}.{see}"
        known = [name for param in params for name in param.opts if name.startswith("--")]
        return f"unknown option '{error.option_name}'.{did_you_mean(error.option_name, known)}{see}"
    if text.startswith("No such command"):
        commands = list(getattr(command, "commands", ()))
        given = text.split("'")[1] if "'" in text else ""
        return f"unknown command '{given}'.{did_you_mean(given, commands)} Commands: {', '.join(commands)}"
    if kind == "BadParameter" and getattr(error, "param", None) is not None:
        names = error.param.opts
        value = next((f" = {short_repr(word)}" for name, word in itertools.pairwise(argv) if name in names), "")
        return f"{names[0]}{value}: {error.message.removeprefix('Value error, ').removeprefix('Input ')}"
    return f"{text[:1].lower()}{text[1:]}.{see}"


def _os_message(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def _traceback_place(error: BaseException, argv: list[str], debug: bool) -> str:
    """Save the traceback to a file and say where it is. A failure here must not hide the first error."""
    if debug:  # it was shown
        return ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="rl-training-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"{PROGRAM} {' '.join(argv)}\n\n")
            traceback.print_exception(error, file=file)
        return f"; the traceback is in {file.name} (or run again with {DEBUG} to see it)"
    except OSError:
        return f"; run again with {DEBUG} to see the traceback"


def _reader_is_gone() -> bool:
    """Was the pipe that stdout writes to closed?"""
    try:
        poll = select.poll()
        poll.register((_stdout or sys.stdout).fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):  # not a file, or no poll on this system
        return False


def _drop_stdout() -> None:
    """The reader closed the pipe: what is left in the buffer must not raise again when the interpreter exits."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (_stdout or sys.stdout).fileno())
        os.close(null)


@contextlib.contextmanager
def _redirect_prints(as_json: bool) -> Iterator[None]:
    """With --json, stdout contains exactly one object: what an environment or a library prints goes to stderr."""
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
def _one_line_warnings() -> Iterator[None]:
    """Show each warning once, as one line without file and source."""
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
def _quiet_threads() -> Iterator[None]:
    """An error in a thread of a library, such as TensorBoard's writer, is one line instead of a traceback."""

    def show(failure: threading.ExceptHookArgs) -> None:
        name = failure.thread.name if failure.thread is not None else "a thread"
        tell(f"warning: {name} failed: {one_line(describe(failure.exc_value or failure.exc_type()))}")

    before, threading.excepthook = threading.excepthook, show
    try:
        yield
    finally:
        threading.excepthook = before


@contextlib.contextmanager
def _print_any_text() -> Iterator[None]:
    """Printing must not fail for names that the terminal's encoding cannot represent."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    yield
