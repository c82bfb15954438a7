"""The one exception that means "the user can fix this": the command line prints its message and exits with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class UserError(ValueError):
    """Bad input, told in the user's words: what was given, what is allowed, what to do."""


class NonFiniteError(RuntimeError):
    """Training produced NaN or infinity; the message says where, and where the evidence was saved."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'gamma'?"`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def _fields(model: type[BaseModel], path: Iterable[int | str]) -> list[str]:
    """Names of the fields of a model inside another one."""
    for part in path:
        pending: list[Any] = [model.model_fields[part].annotation] if part in model.model_fields else []
        while pending:
            kind = pending.pop()
            pending += get_args(kind)
            if hasattr(kind, "model_fields"):
                model = kind
                break
    return list(model.model_fields)


def shown(value: object) -> str:
    """A value as a message shows it: at most a line (and Python refuses to print very large integers)."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 120 else f"{text[:100]}..."


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem that pydantic found with making a `model`, as a sentence with key, value and what is allowed;
    a key that does not exist comes before all others."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _fields(model, problem["loc"][:-1])
        return f"unknown key '{key}'.{did_you_mean(str(problem['loc'][-1]), known)} Known: {', '.join(sorted(known))}"
    if problem["type"] == "missing":
        return f"{key} is missing in {shown(problem['input'])}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("valid tuple", "list")
    return f"{key} = {shown(problem['input'])}: {message}" if key else message
