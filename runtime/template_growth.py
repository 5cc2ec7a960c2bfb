"""How large the results of a template's operations may be, told from their operands alone.

Nothing here computes a result: a text that would not fit is refused before it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

from tilewright.runtime.prompt import MAX_TEXT_CHARS

MAX_NUMBER_BITS = 1 << 14
ITEM_CHARS = 16  # what an item of a list counts for, beside its own text
_PERCENT_WIDE = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\*|\d{5,})")
_BRACES_WIDE = re.compile(r"\{[^{}]*:[^{}]*(\d{5,}|\{)")


def check_length(length: int) -> None:
    """Raise SecurityError for a text that is too long."""
    if length > MAX_TEXT_CHARS:
        raise SecurityError(f"a text of {length} characters, want at most {MAX_TEXT_CHARS}")


def check_bits(bits: int) -> None:
    """Raise SecurityError for a whole number that is too large."""
    if bits > MAX_NUMBER_BITS:
        raise SecurityError(f"a number of over {MAX_NUMBER_BITS} bits")


def size_of(value: Any) -> int:
    """Return what a value that was made counts for, in characters."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return ITEM_CHARS * len(value) if isinstance(value, (list, tuple, dict)) else 0


def written(value: Any, found: int = 0) -> int:
    """Return about how many characters a value takes as text, lists within lists included; raise
    SecurityError as soon as they are too many. `found`: those before it."""
    if isinstance(value, (str, bytes)):
        found += len(value)
    elif isinstance(value, Mapping):
        for pair in value.items():
            found = written(pair, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            found = written(item, found + 2)
    check_length(found)
    return found + 1


def percent_formatted(form: Any, *values: Any, **named: Any) -> int:
    """Return how long a text may get whose % are filled in; raise SecurityError for a width that is
    too large, or that comes from a value."""
    text = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    return _filled(text, _PERCENT_WIDE.search(text), "%", (*values, *named.values()))


def _braces_formatted(form: str, *values: Any, **named: Any) -> int:
    text = form.replace("{{", "").replace("}}", "")
    return _filled(text, _BRACES_WIDE.search(text), "{", (*values, *named.values()))


def _filled(text: str, wide: object, mark: str, values: tuple[Any, ...]) -> int:
    if wide:
        raise SecurityError("a format with a width that is too large or an argument")
    longest = max((written(each) for each in values), default=0)
    return len(text) + sum(max(longest, width) for width in _widths(text, mark))


def _widths(text: str, mark: str) -> list[int]:
    """Return for each place of a form a width that its number cannot pass."""
    numbers = re.findall(r"\d+", text)
    return [sum(int(each) for each in numbers if len(each) < 5)] * text.count(mark)


def _written_first(value: Any, *_: Any, **__: Any) -> int:
    return written(value)


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    text, old, new = (each if isinstance(each, bytes) else str(each) for each in (text, old, new))
    return written(text) + int(text.count(old)) * written(new)


def _padded(text: Any, width: int = 0, *_: Any, **__: Any) -> int:
    return max(written(text), width)


def _tabbed(text: str | bytes, tabsize: int = 8) -> int:
    return len(text) * max(tabsize, 1)


def _joined(items: Iterable[Any], between: Any = "", *_: Any, **__: Any) -> int:
    parts = list(items)
    return written(parts) + len(parts) * written(between)


def _joined_by(between: Any, items: Iterable[Any]) -> int:
    return _joined(items, between)


def _translated(text: str | bytes, table: Any = None, *_: Any, **__: Any) -> int:
    values = table.values() if isinstance(table, Mapping) else ()
    return len(text) * max((written(each) for each in values), default=1)


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    step = width if isinstance(width, int) else len(str(width))
    return written(text) + (str(text).count("\n") + 1) * step


def _wrapped(text: Any, *_: Any, wrapstring: Any = None, **__: Any) -> int:
    return written(text) * (1 + len(str(wrapstring or "")) + len(str(_[-1] if _ else "")))


def _parted(items: Any, count: int = 1, *_: Any, **__: Any) -> int:
    return count * ITEM_CHARS


def _summed(items: Any, *_: Any, **__: Any) -> int:
    return sum(size_of(each) for each in items) if isinstance(items, (list, tuple)) else 0


def _rounded(value: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    check_bits(4 * abs(precision))
    return 0


Growth = Callable[..., int]
FILTERS: Mapping[str, Growth] = {
    "batch": _parted, "center": _padded, "format": percent_formatted, "indent": _indented,
    "join": _joined, "pprint": _written_first, "replace": _replaced, "round": _rounded,
    "slice": _parted, "string": _written_first, "sum": _summed, "tojson": _written_first,
    "wordwrap": _wrapped, "xmlattr": _written_first,
}  # fmt: skip
METHODS: Mapping[str, Growth] = {
    "center": _padded, "expandtabs": _tabbed, "format": _braces_formatted,
    "format_map": _braces_formatted, "join": _joined_by,
    "ljust": _padded, "replace": _replaced, "rjust": _padded, "translate": _translated,
    "zfill": _padded,
}  # fmt: skip
