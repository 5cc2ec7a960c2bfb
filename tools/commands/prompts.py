"""Prompts from the command line and from JSON lines. A bad line is an error of that line alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.runtime.json_pairs import repeated_key
from tilewright.tools.commands.values import integer
from tilewright.tools.failures import CommandError

_KEYS = ("prompt", "tokens", "messages", "params")


@dataclass(frozen=True)
class Asked:
    """One prompt: a text, token ids, or messages for the chat template. `line` is its place in a
    file; `problem` says why it cannot be served."""

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None
    problem: str | None = None


def read_lines(path: Path, *, chat: bool) -> Iterator[Asked]:
    """Yield the prompts of a file of JSON lines, `-` for stdin; empty lines are skipped.

    `chat`: texts become messages later, which token ids cannot. Raises OSError if the file cannot
    be read.
    """
    content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if raw.strip():
            try:
                yield _parse(raw, number, chat)
            except CommandError as error:
                yield Asked(line=number, problem=f"line {number}: {error}")


def _parse(raw: bytes, number: int, chat: bool) -> Asked:
    try:
        tree = json.loads(_text(raw), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise CommandError(f"got {type(tree).__name__}, want an object")
    for key in tree:
        if key not in _KEYS:
            raise CommandError(f"key '{key}': unknown: have {', '.join(_KEYS)}")
    given = [key for key in _KEYS[:3] if key in tree]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise CommandError(f"got {got}, want one of prompt, tokens, messages")
    params = _params(tree.get("params", {}))
    match given[0]:
        case "prompt":
            return Asked(_typed(tree, "prompt", str, "a text"), params=params, line=number)
        case "tokens":
            if chat:
                raise CommandError(
                    "key 'tokens': got --chat too, and no chat template takes token ids: want "
                    "prompt or messages"
                )
            return Asked(_typed(tree, "tokens", list, "a list"), params=params, line=number)
        case _:
            return Asked(messages=_messages(tree["messages"]), params=params, line=number)


def _text(raw: bytes) -> str:
    """Return a line's text; some editors begin a file with a mark."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CommandError(
            f"not UTF-8: got byte 0x{raw[error.start]:02x} at byte {error.start} of the line, want "
            "text in UTF-8"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = repeated_key(pairs)
    if twice is not None:
        raise CommandError(f"key '{twice:.40}': is given twice")
    return dict(pairs)


def _typed(tree: Mapping[str, Any], key: str, kind: type[Any], want: str) -> Any:
    if not isinstance(tree[key], kind):
        raise CommandError(f"key '{key}': got {type(tree[key]).__name__}, want {want}")
    return tree[key]


def _messages(tree: Any) -> list[Mapping[str, str]]:
    if not isinstance(tree, list) or not all(isinstance(each, dict) for each in tree) or not tree:
        raise CommandError("key 'messages': want a list of objects with role and content")
    return tree


def _params(tree: Any) -> Mapping[str, Any]:
    """Return sampling parameters; JSON has only texts as keys, so token ids are read from them."""
    if not isinstance(tree, dict):
        raise CommandError(f"key 'params': got {type(tree).__name__}, want an object")
    bias = tree.get("logit_bias")
    if not isinstance(bias, dict):
        return tree
    try:
        return {**tree, "logit_bias": {integer(key): value for key, value in bias.items()}}
    except ValueError:
        raise CommandError("key 'params': 'logit_bias': want token ids as keys") from None
