"""Keys of a JSON object that stand twice: `json` alone would keep the last one and say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def repeated_key(pairs: Sequence[tuple[str, Any]]) -> str | None:
    """Return the first key of an object's pairs that is given twice, or None."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return None
