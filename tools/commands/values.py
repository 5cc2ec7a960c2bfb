"""What an option's text may be. The parser's own messages differ from release to release and do not
say what was got, so the texts are read here; whoever reads is called with a default value too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

MOST = 40  # characters of a value that a message shows


def refusal(got: object, want: str, *, option: str | None = None) -> typer.BadParameter:
    """Return the usage error of a value; its option is known to the parser where it reads one."""
    text = str(got)
    shown = repr(text) if len(text) <= MOST else f"{text[:MOST]!r}..."
    hint = None if option is None else f"'{option}'"
    return typer.BadParameter(f"got {shown}, want {want}", param_hint=hint)


def path(text: str | Path) -> Path:
    """Read a path; an empty one, which stands for the current folder in Python, is refused."""
    if not str(text):
        raise refusal(text, "a path")
    return Path(text)


def name(text: str) -> str:
    """Read a name or path that stays a text."""
    if not text:
        raise refusal(text, "a name or a path")
    return text


def integer(text: Any) -> int:
    """Return the whole number that a text is; raise ValueError for other spellings Python has, such
    as 1_0 and digits of other scripts."""
    if not re.fullmatch(r"\s*[-+]?[0-9]+\s*", str(text)):
        raise ValueError(text)
    return int(text)


def real(text: Any) -> float:
    """Return the number that a text is; raise ValueError likewise."""
    if not str(text).isascii() or "_" in str(text):
        raise ValueError(text)
    return float(text)


def whole(low: int | None = None, high: int | None = None) -> Callable[[Any], int]:
    """Return the reader of whole numbers, within bounds where there are any."""
    want = "a whole number" + _bounds(low, high)

    def read(text: Any) -> int:
        try:
            number = integer(text)
        except ValueError:  # also for one of thousands of digits
            raise refusal(text, want) from None
        if (low is not None and number < low) or (high is not None and number > high):
            raise refusal(text, want)
        return number

    return read


def _bounds(low: int | None, high: int | None) -> str:
    if high is None:
        return "" if low is None else f" of at least {low}"
    return f" of at most {high}" if low is None else f" from {low} to {high}"


def number(text: Any) -> float:
    """Read a number; whether it is a good one is for whoever takes it to say."""
    try:
        return real(text)
    except ValueError:
        raise refusal(text, "a number") from None


def one_of(*choices: str) -> Callable[[str], str]:
    """Return the reader of one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise refusal(text, " or ".join(choices))
        return text

    return read
