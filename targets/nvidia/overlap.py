"""Kernels that begin while the one before them in a stream ends.

A kernel waits, before anything else, until all kernels that it comes after are complete and what
they wrote is there. So nothing is read or written earlier than before, but blocks are launched and
come to their first instruction while the last ones of the kernel before still work. A kernel of few
blocks lets the next one's blocks come at once, into the room that it leaves; one that fills the
chip does not: they would come where its own blocks end first, and all to the same places.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tilewright.graph.errors import TargetError

FEW_BLOCKS = 16  # what a step of one or a few requests has; 64 cost steps of 32 requests 15 %
WAIT = "griddepcontrol.wait;"
_ENTRY = re.compile(r"\.entry\s+\w+\s*\([^)]*\)[^{;]*\{")
BEGIN = f"""
\t{{
\t.reg .pred %few;
\t.reg .b32 %blocks, %more;
\tmov.u32 %blocks, %nctaid.x;
\tmov.u32 %more, %nctaid.y;
\tmul.lo.s32 %blocks, %blocks, %more;
\tmov.u32 %more, %nctaid.z;
\tmul.lo.s32 %blocks, %blocks, %more;
\tsetp.le.s32 %few, %blocks, {FEW_BLOCKS};
\t@%few griddepcontrol.launch_dependents;
\t}}
\t{WAIT}
"""


def waiting(ptx: str) -> str:
    """Return PTX whose kernels wait first, but for those that say themselves where they wait.

    Raises TargetError where there is no kernel.
    """
    found = list(_ENTRY.finditer(ptx))
    if not found or len(found) != len(re.findall(r"\.entry\b", ptx)):
        raise TargetError(
            f"PTX: {len(found)} kernels were found to begin, want every entry and at least one"
        )
    starts = [0, *(entry.end() for entry in found)]
    parts = [ptx[a:b] for a, b in zip(starts, [*starts[1:], len(ptx)], strict=True)]
    return parts[0] + "".join(part if WAIT in part else BEGIN + part for part in parts[1:])


def check_waits(name: str, ptx: str) -> None:
    """Raise TargetError for a kernel without the wait, which the host would let begin too early."""
    if WAIT not in ptx:
        raise TargetError(
            f"kernel '{name}': does not wait for those before it: this Triton did not call what "
            "writes the wait; want a version with stage hooks, such as 3.9"
        )


def stages_hook(*given: Any) -> tuple[str, str] | None:
    """What Triton calls for the stages of a compilation, and, without arguments, for its key."""
    if not given:
        return BEGIN, BEGIN
    stages: dict[str, Callable[[str, Any], str]] = given[1]
    make = stages["ptx"]
    stages["ptx"] = lambda source, metadata: waiting(make(source, metadata))
    return None
