"""The one exception that means "the user can fix this": the command line prints its message and exits with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input, told in the user's words: what was given, what is allowed, what to do."""


class NonFiniteError(RuntimeError):
    """Training produced NaN or infinity; the message says where, and where the evidence was saved."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'gamma'?"`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""
