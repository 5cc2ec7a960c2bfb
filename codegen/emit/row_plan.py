"""Row programs: in which loop nest each node of a row body is computed, and what needs an array.

A row body computes, for one leading index, every node over its inner shape. Nodes of one inner
shape whose operands are ready share a nest; a reduction ends one; what a later nest reads is kept
in an array. Recomputing or keeping a value cannot change its bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.emit.shapes import inner_shape
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS


@dataclass(frozen=True)
class Nest:
    """One loop nest over `shape`: `sinks` are the nodes it stores, or the one it reduces."""

    stage: int
    kind: str  # loop | reduce | call
    shape: tuple[int, ...]
    pairing: str
    sinks: tuple[str, ...]


@dataclass(frozen=True)
class RowPlan:
    """Nests in order, the nodes kept in arrays of one row, and the stage of every node."""

    nests: tuple[Nest, ...]
    arrays: tuple[str, ...]
    stage: Mapping[str, int]


class RowPlanner:
    """Assigns stages to the nodes of a row program."""

    def __init__(self, body: Graph, names: Sequence[str], rows: Dim, sinks: frozenset[str]) -> None:
        self.body, self.rows, self.sinks = body, rows, sinks
        self.nodes = [body.node[n] for n in names]
        self.inside = {n.name: n for n in self.nodes}
        self.users = {
            n.name: [self.inside[u] for u in body.users[n.name] if u in self.inside]
            for n in self.nodes
        }
        self.stage: dict[str, int] = {}
        # A nest walks pairs of one kind only.
        self.mixed = len({n.attr["pairing"] for n in self.nodes if n.op == "rotate_pairs"}) > 1

    def shape(self, node: Node) -> tuple[int, ...]:
        """Inner shape a node is computed over; a store walks its entries."""
        if op_def(node.op).kind is Kind.STORE:
            return inner_shape(self.body.type_of(node.inputs[1]), 3, self.rows)
        return inner_shape(node.type, node.type.rank, self.rows)

    def plan(self) -> RowPlan:
        for node in self.nodes:
            self.stage[node.name] = max(
                (self._ready(self.inside[i], node) for i in node.inputs if i in self.inside),
                default=0,
            )
        arrays = tuple(n.name for n in self.nodes if self._needs_array(n))
        return RowPlan(tuple(self._nests(frozenset(arrays))), arrays, self.stage)

    def _ready(self, operand: Node, user: Node) -> int:
        """Stage from which `user` can read `operand`."""
        stage = self.stage[operand.name]
        return stage if self._inline(operand, user) else stage + 1

    def _inline(self, operand: Node, user: Node) -> bool:
        """Say whether the user's nest can compute the operand itself."""
        if not _computed_in_place(operand) or not _walks_elements(user):
            return operand.op in VIEWS and False
        if self._must_keep(operand):
            return False
        reads = self.body.type_of(user.inputs[0]) if _is(user, Kind.REDUCE) else None
        width = self.shape(user) if reads is None else inner_shape(reads, reads.rank, self.rows)
        return self.shape(operand) == width

    def _must_keep(self, node: Node) -> bool:
        """Say whether users need the node in an array, whatever their stage."""
        users = self.users[node.name]
        reduced = [u for u in users if _is(u, Kind.REDUCE)]
        if reduced and (len(users) > 1 or self._pairing(node)):
            return True
        if node.op == "rotate_pairs" and self.mixed:
            return True
        return any(not _walks_elements(u) or self._other_shape(node, u) for u in users)

    def _other_shape(self, node: Node, user: Node) -> bool:
        return not _is(user, Kind.REDUCE) and self.shape(user) != self.shape(node)

    def _needs_array(self, node: Node) -> bool:
        if node.op in VIEWS or _is(node, Kind.STORE):
            return False
        if not _computed_in_place(node):
            return bool(self.users[node.name]) or _is(node, Kind.REDUCE, Kind.GATHER)
        later = any(self.stage[u.name] != self.stage[node.name] for u in self.users[node.name])
        return later or self._must_keep(node)

    def _nests(self, arrays: frozenset[str]) -> list[Nest]:
        found: dict[tuple[int, str, tuple[int, ...], str, str], list[str]] = {}
        for node in self.nodes:
            if (
                node.op in VIEWS
                or node.op == "gather_rows"
                and node.name not in arrays | self.sinks
            ):
                continue
            stage = self.stage[node.name]
            if _is(node, Kind.REDUCE):
                reads = self.body.type_of(node.inputs[0])
                shape = inner_shape(reads, reads.rank, self.rows)
                key = (stage, "reduce", shape, self._pairing(node), node.name)
            elif _is(node, Kind.SELECT) or node.op == "embedding":
                key = (stage, "call", self.shape(node), "", node.name)
            elif node.name in arrays | self.sinks or _is(node, Kind.STORE):
                key = (stage, "loop", self.shape(node), self._pairing(node), "")
            else:
                continue
            found.setdefault(key, []).append(node.name)
        ordered = sorted(found.items(), key=lambda item: item[0][0])
        return [Nest(k[0], k[1], k[2], k[3], tuple(sinks)) for k, sinks in ordered]

    def _pairing(self, node: Node) -> str:
        """How the pairs rotated inside this node's nest lie, or nothing."""
        if node.op == "rotate_pairs":
            return str(node.attr["pairing"])
        for name in node.inputs:
            operand = self.inside.get(name)
            if operand and self._inline(operand, node):
                found = self._pairing(operand)
                if found:
                    return found
        return ""


def _is(node: Node, *kinds: Kind) -> bool:
    return op_def(node.op).kind in kinds


def _computed_in_place(node: Node) -> bool:
    """Say whether one element of the node depends on single elements of its operands only."""
    if node.op in VIEWS:
        return False
    return _is(node, Kind.ELEMENTWISE, Kind.LAYOUT) or node.op == "gather_rows"


def _walks_elements(node: Node) -> bool:
    """Say whether the node reads each operand at the element it computes."""
    return _is(node, Kind.ELEMENTWISE, Kind.REDUCE, Kind.STORE)
