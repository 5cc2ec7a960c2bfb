"""Which rows need a node: all, or only those for which some stores have a slot.

Most rows of a compressor complete no window: their slot is -1 and nothing is stored, so what only
feeds that store need not be computed. This follows from the edges alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tilewright.graph import Node

# None: every row. Else the values that hold slots; a row where all are -1 needs nothing.
Guard: TypeAlias = frozenset[str] | None


def demands(
    nodes: Sequence[Node], operands: Callable[[Node], tuple[str, ...]], sinks: frozenset[str]
) -> dict[str, Guard]:
    """Return the guard of every node; an empty one means that no row needs it."""
    found: dict[str, Guard] = {n.name: frozenset() for n in nodes}
    for name in sinks:
        if name in found:
            found[name] = None
    for node in reversed(nodes):
        if node.op == "append":
            found[node.name] = None
        elif node.op == "append_rows":
            found[node.name] = frozenset([node.inputs[2]])
        guard = found[node.name]
        for position, name in enumerate(operands(node)):
            if name in found:
                slots = node.op == "append_rows" and position == 2
                found[name] = None if slots else _either(found[name], guard)
    return found


def _either(a: Guard, b: Guard) -> Guard:
    return None if a is None or b is None else a | b
