"""Row programs: in which loop nest each node of a row body is computed, what needs an array, and
which nests a row may skip.

A row body computes, for one leading index, every node over its inner shape. Nodes of one inner
shape whose operands are ready share a nest; a reduction ends one; what a later nest reads is kept
in an array. Recomputing or keeping a value cannot change its bits. What only feeds stores of a row
whose slots are -1 is not computed at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tilewright.codegen.emit.row_demand import Guard, demands
from tilewright.codegen.emit.row_order import Nest, Run, runs_of
from tilewright.codegen.emit.shapes import inner_shape
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.types import BlockFormat


@dataclass(frozen=True)
class RowPlan:
    """Runs of nests in order, the nodes kept in arrays, and the stage of every node.

    `packed_from`: stores of quantised rows -> the value that was quantised, where it is at hand.
    """

    runs: tuple[Run, ...]
    arrays: tuple[str, ...]
    stage: Mapping[str, int]
    packed_from: Mapping[str, str] = field(default_factory=dict)

    @property
    def nests(self) -> tuple[Nest, ...]:
        return tuple(nest for run in self.runs for nest in run.nests)

    @cached_property
    def local(self) -> frozenset[str]:
        """Kept values with one line of the last axis, for the outer index at hand."""
        return frozenset(name for run in self.runs for name in run.local)


def row_shape(body: Graph, node: Node, rows: Dim) -> tuple[int, ...]:
    """Inner shape a node is computed over; a store walks its entries."""
    if op_def(node.op).kind is Kind.STORE:
        entries = body.type_of(node.inputs[1])
        return inner_shape(entries, entries.rank, rows)
    return inner_shape(node.type, node.type.rank, rows)


class RowPlanner:
    """Assigns stages to the nodes of a row program.

    `swaps_apart`: neighbours are swapped in a nest of their own, so that all other work walks
    contiguous elements.
    """

    def __init__(
        self,
        body: Graph,
        names: Sequence[str],
        rows: Dim,
        sinks: frozenset[str],
        *,
        swaps_apart: bool = True,
    ) -> None:
        self.body, self.rows, self.sinks = body, rows, sinks
        self.inside = {n: body.node[n] for n in names}
        self.packed_from = self._packed_from()
        self.demand = demands(list(self.inside.values()), self.operands, sinks)
        self.nodes = [n for n in self.inside.values() if self.demand[n.name] != frozenset()]
        self.users: dict[str, list[Node]] = {n.name: [] for n in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(self.operands(node)):
                if name in self.users:
                    self.users[name].append(node)
        self.stage: dict[str, int] = {}
        # A nest walks pairs of one kind only.
        pairings = {n.attr["pairing"] for n in self.nodes if n.op == "rotate_pairs"}
        self.apart = len(pairings) > 1 or swaps_apart and "interleaved" in pairings

    def _packed_from(self) -> dict[str, str]:
        """Stores of quantised rows find codes and scales from what was quantised here."""
        found = {}
        for node in self.inside.values():
            if node.op == "append_rows" and isinstance(node.type.dtype, BlockFormat):
                source = self.inside.get(node.inputs[1])
                if source is not None and source.op == "quantise":
                    found[node.name] = source.inputs[0]
        return found

    def operands(self, node: Node) -> tuple[str, ...]:
        """Return the values a node is computed from in this program."""
        raw = self.packed_from.get(node.name)
        return node.inputs if raw is None else (node.inputs[0], raw, node.inputs[2])

    def shape(self, node: Node) -> tuple[int, ...]:
        return row_shape(self.body, node, self.rows)

    def plan(self) -> RowPlan:
        for node in self.nodes:
            self.stage[node.name] = max(
                (
                    self._ready(self.inside[i], node)
                    for i in self.operands(node)
                    if i in self.inside
                ),
                default=0,
            )
        arrays = tuple(n.name for n in self.nodes if self._needs_array(n))
        private = {n for n in arrays if n not in self.sinks and self._has_lines(self.inside[n])}
        runs = runs_of(self._nests(frozenset(arrays)), private)
        return RowPlan(runs, arrays, self.stage, self.packed_from)

    def _has_lines(self, node: Node) -> bool:
        """Say whether a node has a last axis of its own under outer ones."""
        lost = works_on_lines(node) and node.type.rank < self.body.type_of(node.inputs[0]).rank
        return len(self.shape(node)) > 1 and not lost

    def _ready(self, operand: Node, user: Node) -> int:
        """Stage from which `user` can read `operand`."""
        stage = self.stage[operand.name]
        return stage if self._inline(operand, user) else stage + 1

    def _inline(self, operand: Node, user: Node) -> bool:
        """Say whether the user's nest can compute the operand itself."""
        if not _computed_in_place(operand) or not _walks_elements(user):
            return False
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
        if node.op == "rotate_pairs" and self.apart:
            return True
        return any(not _walks_elements(u) or self._other_shape(node, u) for u in users)

    def _other_shape(self, node: Node, user: Node) -> bool:
        return not _is(user, Kind.REDUCE) and self.shape(user) != self.shape(node)

    def _needs_array(self, node: Node) -> bool:
        if node.op in VIEWS or _is(node, Kind.STORE):
            return False
        if not _computed_in_place(node):
            return bool(self.users[node.name]) or not self._written_in_place(node)
        later = any(self.stage[u.name] != self.stage[node.name] for u in self.users[node.name])
        return later or self._must_keep(node)

    def _written_in_place(self, node: Node) -> bool:
        """Say whether a whole-row op can write its result where it goes."""
        plain = str(node.type.dtype) in ("f32", "i32")
        return not _is(node, Kind.REDUCE) and plain

    def _nests(self, arrays: frozenset[str]) -> tuple[Nest, ...]:
        found: dict[tuple[int, str, tuple[int, ...], str, str, Guard], list[str]] = {}
        for node in self.nodes:
            if (key := self._nest_of(node, arrays)) is not None:
                found.setdefault(key, []).append(node.name)
        first = {s for guard in self.demand.values() if guard for s in guard}
        ordered = sorted(found.items(), key=lambda i: (i[0][0], first.isdisjoint(i[1])))
        nests, done = [], set[str]()
        for (stage, kind, shape, pairing, _, guard), sinks in ordered:
            known = guard is not None and all(s in done or s not in self.inside for s in guard)
            reads, whole = set[str](), set[str]()
            for sink in sinks:
                self._reads(self.inside[sink], stage, arrays, reads, whole)
            nests.append(
                Nest(
                    stage, kind, shape, pairing, tuple(sinks), self._outer(kind, shape, sinks),
                    guard if known else None, frozenset(reads), frozenset(whole),
                )
            )  # fmt: skip
            done.update(sinks)
        return tuple(nests)

    def _outer(self, kind: str, shape: tuple[int, ...], sinks: Sequence[str]) -> tuple[int, ...]:
        """Extents of the loops around a nest: all but the last axis; a call has its own, unless it
        works line by line."""
        if kind != "call":
            return shape[:-1]
        node = self.inside[sinks[0]]
        if not works_on_lines(node):
            return ()
        type_ = self.body.type_of(node.inputs[0])
        return inner_shape(type_, type_.rank, self.rows)[:-1]

    def _reads(
        self, node: Node, stage: int, arrays: frozenset[str], reads: set[str], whole: set[str]
    ) -> None:
        """Collect the kept values that a nest of `stage` reads for a node, and those it reads
        through views, whose lines may be other ones."""
        for operand in self.operands(node):
            name = operand
            while name in self.inside and self.inside[name].op in VIEWS:
                name = self.inside[name].inputs[0]
            if name not in self.inside:
                continue
            source = self.inside[name]
            if name in arrays and (self.stage[name] < stage or not _computed_in_place(source)):
                reads.add(name)
                if name != operand:
                    whole.add(name)
            else:
                self._reads(source, stage, arrays, reads, whole)

    def _nest_of(
        self, node: Node, arrays: frozenset[str]
    ) -> tuple[int, str, tuple[int, ...], str, str, Guard] | None:
        """Nodes of one key share a nest; None for a node that its users compute."""
        stage, guard = self.stage[node.name], self.demand[node.name]
        if node.op in VIEWS:
            return None
        if _is(node, Kind.REDUCE):
            reads = self.body.type_of(node.inputs[0])
            shape = inner_shape(reads, reads.rank, self.rows)
            return stage, "reduce", shape, self._pairing(node), node.name, guard
        if not _computed_in_place(node) and node.op != "append":
            return stage, "call", self.shape(node), "", node.name, guard
        if node.name in arrays | self.sinks or _is(node, Kind.STORE):
            return stage, "loop", self.shape(node), self._pairing(node), "", guard
        return None

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


def works_on_lines(node: Node) -> bool:
    """Say whether a whole-row op treats each line of its operand's last axis by itself."""
    return op_def(node.op).reduced_axes == ((-1,),)


def _is(node: Node, *kinds: Kind) -> bool:
    return op_def(node.op).kind in kinds


def _computed_in_place(node: Node) -> bool:
    """Say whether one element of the node depends on single elements of its operands only."""
    if node.op in VIEWS:
        return False
    return _is(node, Kind.ELEMENTWISE, Kind.LAYOUT) or node.op == "gather_rows"


def _walks_elements(node: Node) -> bool:
    """Say whether the node reads each operand at the element it computes."""
    return _is(node, Kind.ELEMENTWISE, Kind.REDUCE) or node.op == "append"
