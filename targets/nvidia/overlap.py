"""Kernels that begin while the one before them in a stream ends.

A kernel waits, before anything else, until all kernels that it comes after are complete and what
they wrote is there; then it lets the next one begin likewise. So blocks are launched and come to
their first instruction while others still work, and nothing is read or written earlier than before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tilewright.graph.errors import TargetError

_ENTRY = re.compile(r"\.entry\s+\w+\s*\([^)]*\)[^{;]*\{")
WAIT = "griddepcontrol.wait;"
_BEGIN = f"\n\t{WAIT}\n\tgriddepcontrol.launch_dependents;\n"


def waiting(ptx: str) -> str:
    """Return PTX whose kernels wait first; raise TargetError where there is none."""
    found, count = _ENTRY.subn(lambda entry: entry[0] + _BEGIN, ptx)
    if count == 0 or count != len(re.findall(r"\.entry\b", ptx)):
        raise TargetError(f"PTX: {count} kernels were found to begin, want every entry and one")
    return found


def stages_hook(*given: Any) -> tuple[str, str] | None:
    """What Triton calls for the stages of a compilation, and, without arguments, for its key."""
    if not given:
        return "waiting", "waiting"
    stages: dict[str, Callable[[str, Any], str]] = given[1]
    make = stages["ptx"]
    stages["ptx"] = lambda source, metadata: waiting(make(source, metadata))
    return None
