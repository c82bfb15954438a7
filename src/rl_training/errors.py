"""The one exception that means "the user can fix this": the command line prints its message and exits with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """Bad input, told in the user's words: what was given, what is allowed, what to do."""


class NonFiniteError(RuntimeError):
    """Training produced NaN or infinity; the message says where, and where the evidence was saved."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'gamma'?"`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def shown(value: object) -> str:
    """A value as a message shows it: at most a line (and Python refuses to print very large integers)."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 120 else f"{text[:100]}..."


def explain(error: ValidationError) -> str:
    """The first problem that pydantic found, as a sentence with key, value and what is allowed."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key} = {shown(problem['input'])}: {message}" if key else message
