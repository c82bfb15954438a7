"""UserError: a problem that the user can fix. The command line prints its message and exits with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class UserError(ValueError):
    """Bad input. The message says what was given, what is allowed and what to do."""


class MismatchError(UserError):
    """Settings or saved tensors that do not fit the algorithm."""


class Terminated(SystemExit):
    """SIGTERM ends the process. A plain SystemExit comes from third-party code that called sys.exit()."""

    def __init__(self, number: int = 15) -> None:
        super().__init__(128 + number)


class NonFiniteError(RuntimeError):
    """Training produced NaN or infinity. The message says where, and where the dump was saved."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'gamma'?"`, or an empty string if no known word is close."""
    cutoff = 0.6 if len(word) < 6 else 0.72  # one or two wrong letters of a short word, a few of a long one
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""


def _field_names(model: type[BaseModel], path: Iterable[int | str]) -> list[str]:
    """Field names of the model at `path` inside another model."""
    for part in path:
        pending: list[Any] = [model.model_fields[part].annotation] if part in model.model_fields else []
        while pending:
            kind = pending.pop()
            pending += get_args(kind)
            if hasattr(kind, "model_fields"):
                model = kind
                break
    return list(model.model_fields)


def printable(text: str) -> str:
    """The text on one line, with line breaks, terminal codes and other control characters written as \\n, \\x1b, ..."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short_repr(value: object) -> str:
    """A value for a message, shortened to one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print very large integers
        return "a number with thousands of digits"
    return text if len(text) <= 120 else f"{text[:100]}..."


def describe(error: BaseException) -> str:
    """`KeyError: 'x'`; an exception of another library may fail to give its message."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return f"{type(error).__name__} (its message cannot be read)"


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem that pydantic found, as a sentence with the key, its value and what is allowed. Unknown keys
    come before all other problems."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _field_names(model, problem["loc"][:-1])
        return f"unknown key '{key}'.{did_you_mean(str(problem['loc'][-1]), known)} Known: {', '.join(sorted(known))}"
    if problem["type"] == "missing":
        return f"{key} is missing in {short_repr(problem['input'])}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("valid tuple", "list")
    return f"{key} = {short_repr(problem['input'])}: {message}" if key else message
