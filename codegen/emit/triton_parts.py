"""Parts of a row program: which results one program computes together, and over how many programs
the lines of a result are spread. Results may be parted in any way without changing a bit: what two
parts need, both compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.emit.shapes import inner_shape
from tilewright.codegen.emit.triton_places import power_of_two
from tilewright.codegen.emit.triton_values import Values
from tilewright.graph import Node
from tilewright.graph.ops import Kind, op_def

ELEMENTS = 4096  # of a row, that one program should compute where lines can be spread
_SHORT = 32  # a sum of so few is recomputed rather than shared
_MIXING = ("hyper_mix", "hyper_collapse", "hyper_update", "sum_slots", "repeat_streams")
_COSTLY = (*_MIXING, "quantise", "hadamard", "pool_window")


@dataclass(frozen=True)
class Part:
    """Results of one shape of program. `outer`: axes whose lines are spread, `lines` to a program;
    none where one program computes all. Rows in which no slot of `guard` is set skip the part."""

    sinks: tuple[str, ...]
    outer: tuple[int, ...] = ()
    lines: int = 1
    guard: tuple[str, ...] = ()

    @property
    def programs(self) -> int:
        return -(-math.prod(self.outer) // self.lines)


def parts_of(values: Values, sinks: Sequence[str]) -> tuple[Part, ...]:
    """Return the parts that compute these nodes, in the order of their first results."""
    found: list[tuple[list[str], tuple[int, ...], frozenset[str]]] = []
    for name in sinks:
        outer, costly = _spread(values, name), _costly(values, name)
        mine: tuple[list[str], tuple[int, ...], frozenset[str]] = ([name], outer, costly)
        for other in [f for f in found if f[1] == outer and _together(values, f, mine)]:
            found.remove(other)
            mine = ([*other[0], *mine[0]], outer, other[2] | mine[2])
        found.append(mine)
    return tuple(_part(values, names, outer) for names, outer, _ in found)


def _together(
    values: Values,
    first: tuple[list[str], tuple[int, ...], frozenset[str]],
    second: tuple[list[str], tuple[int, ...], frozenset[str]],
) -> bool:
    """Say whether results share work, or neither has any and they are of one shape."""
    if first[2] or second[2]:
        return bool(first[2] & second[2])
    shapes = [values.shape_of(values.inside[names[0]]) for names in (first[0], second[0])]
    return shapes[0] == shapes[1] and _guard(values, first[0]) == _guard(values, second[0])


def _part(values: Values, names: list[str], outer: tuple[int, ...]) -> Part:
    order = {n: i for i, n in enumerate(values.inside)}
    names = sorted(names, key=lambda n: order[n])
    width = power_of_two(max(values.shape_of(values.inside[n])[-1] for n in names)) if outer else 1
    lines = min(max(1, ELEMENTS // width), power_of_two(math.prod(outer)))
    return Part(tuple(names), outer, lines, _guard(values, names))


def _guard(values: Values, names: Sequence[str]) -> tuple[str, ...]:
    """Slots without one of which nothing here is stored; none where something always is."""
    nodes = [values.inside[n] for n in names]
    if any(n.op != "append_rows" for n in nodes):
        return ()
    return tuple(dict.fromkeys(n.inputs[2] for n in nodes))


def ancestors_inside(values: Values, name: str) -> list[Node]:
    """Nodes that a result is computed from, itself included, in graph order."""
    needed, todo = set[str](), [name]
    while todo:
        current = todo.pop()
        if current in values.inside and current not in needed:
            needed.add(current)
            todo += values.inside[current].inputs
    return [n for n in values.inside.values() if n.name in needed]


def is_costly(values: Values, node: Node) -> bool:
    """Say whether a node is worth sharing."""
    if op_def(node.op).kind is Kind.REDUCE:
        return _line(values, node)[-1] > _SHORT
    return node.op in _COSTLY


def _line(values: Values, node: Node) -> tuple[int, ...]:
    """Inner shape of what a node reads line by line."""
    type_ = values.body.type_of(node.inputs[0])
    return inner_shape(type_, type_.rank, values.rows)


def _costly(values: Values, name: str) -> frozenset[str]:
    return frozenset(n.name for n in ancestors_inside(values, name) if is_costly(values, n))


def _spread(values: Values, name: str) -> tuple[int, ...]:
    """Axes of a result whose lines have nothing costly in common."""
    node = values.inside[name]
    *outer, _ = values.shape_of(node) or (1,)
    if math.prod(outer) == 1 or op_def(node.op).kind in (Kind.SELECT, Kind.STORE):
        return ()
    for other in ancestors_inside(values, name):
        if other.op in _MIXING:
            return ()
        if is_costly(values, other) and _line(values, other)[:-1] != tuple(outer):
            return ()
    return tuple(outer)


def depth(values: Values) -> Mapping[str, int]:
    """Longest chain of reductions before each node."""
    found: dict[str, int] = {}
    for node in values.inside.values():
        before = max((found.get(i, 0) for i in node.inputs), default=0)
        found[node.name] = before + (op_def(node.op).kind is Kind.REDUCE)
    return found
