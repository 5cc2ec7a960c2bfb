"""Prints a row program in Triton: one program for each row, or several that share its results.

Every value is computed block by block along the last axis; what several results need of one block
is computed once and stays in registers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_calls import ROUTINES, Call, Text, evaluations
from tilewright.codegen.emit.triton_coded import CodedRows, coded_store
from tilewright.codegen.emit.triton_parts import Part, ancestors_inside, depth, parts_of
from tilewright.codegen.emit.triton_places import (
    ZERO,
    Index,
    at,
    joined_masks,
    linear,
    power_of_two,
    unravel,
)
from tilewright.codegen.emit.triton_quant import packed_store, quantise
from tilewright.codegen.emit.triton_reduce import FRAME, UNROLLED, reduction
from tilewright.codegen.emit.triton_select import select
from tilewright.codegen.emit.triton_values import Scope, Values, memory_type
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, ElementType

BLOCK = 2048  # elements of a line that one block holds where nothing is reduced
_UNROLLED_LINES = 16

__all__ = ["RowPrinter", "power_of_two"]


class RowPrinter:
    """Prints the program that computes some nodes of a body for row `row`.

    `sinks` maps nodes to the pointer their row is stored to; with `coded`, codes go there instead.
    `lanes` bounds the lanes of sums.
    """

    def __init__(
        self,
        body: Graph,
        names: Sequence[str],
        rows: Dim,
        sinks: Mapping[str, str],
        lanes: int,
        row: str = "row",
        coded: CodedRows | None = None,
    ) -> None:
        self.body, self.sinks, self.lanes, self.coded = body, sinks, lanes, coded
        self.row = Index(row, block=False)
        calls = evaluations({**ROUTINES, **self._own_routines()})
        self.values = Values(body, names, rows, self.row, {}, calls)
        self.parts = parts_of(self.values, self._results())

    def _own_routines(self) -> Mapping[str, Text]:
        def reduce(c: Call) -> str:
            return reduction(c, self.lanes)

        return {"reduce_sum": reduce, "reduce_max": reduce, "quantise": quantise}

    def _results(self) -> list[str]:
        """Nodes that leave the program, those behind most reductions first."""
        nodes = self.values.inside.values()
        found = [n.name for n in nodes if n.name in self.sinks or _is(n, Kind.STORE)]
        before = depth(self.values)
        return sorted(found, key=lambda name: -before[name])

    @property
    def programs(self) -> int:
        """Programs of one row: the extent of the grid's second axis."""
        return sum(part.programs for part in self.parts)

    def text(self) -> list[str]:
        """Return the statements of the program."""
        lines, start = ["part = tl.program_id(1)"][: self.programs - 1], 0
        if len(self.parts) == 1:
            return lines + self._part(self.parts[0], 0)
        for part in self.parts:
            word, start_here = "elif" if start else "if", start
            start += part.programs
            head = f"{word} part < {start}:" if start < self.programs else "else:"
            lines += [head, *("    " + line for line in self._part(part, start_here))]
        return lines

    def _part(self, part: Part, start: int) -> list[str]:
        """One part; its first program is number `start` of the row."""
        scope = Scope()
        if not part.guard:
            self._results_of(scope, part, start)
            return scope.lines
        slots = [self.values.operand(scope, slot, (), 1, self.row) for slot in part.guard]
        inner = scope.child()
        self._results_of(inner, part, start)
        condition = " | ".join(f"({slot} >= 0)" for slot in slots)
        return [*scope.lines, f"if {condition}:", *("    " + line for line in inner.lines)]

    def _results_of(self, scope: Scope, part: Part, start: int) -> None:
        """Evaluate every block of every result. A value is stored as soon as it is known, so that
        it need not be kept for that."""
        nodes = [self.values.inside[name] for name in reversed(part.sinks)]
        outer = self._lines(scope, part, start)
        waiting: dict[tuple[str, ...], tuple[Node, tuple[Index, ...]]] = {}
        stores: list[tuple[Node, tuple[Index, ...]]] = []
        for node in nodes:
            if _is(node, Kind.SELECT):
                continue
            for index in self._blocks(scope, part, node, outer):
                if _is(node, Kind.STORE):
                    stores.append((node, index))
                else:
                    waiting[node.name, *(i.text for i in index)] = node, index

        def store(where: Scope, key: tuple[str, ...], value: str) -> None:
            if key in waiting:
                node, index = waiting.pop(key)
                if self.coded is not None:
                    call = Call(self.values, where, node, index, self.row)
                    where.lines += coded_store(call, self.coded)
                    return
                where.lines.append(self._store(node, value, index))

        self.values.stores = store
        for node, index in list(waiting.values()):
            value = self.values.node(scope, node.name, index, self.row)
            store(scope, (node.name, *(i.text for i in index)), value)
        for node, index in stores:
            self._append(scope, node, index, guarded=part.guard == node.inputs[2:])
        for node in (n for n in nodes if _is(n, Kind.SELECT)):
            select(self.values, scope, node, self.sinks[node.name])
        self.values.stores = None

    def _lines(self, scope: Scope, part: Part, start: int) -> Index | None:
        """Lines of the spread axes that this program computes."""
        if not part.outer:
            return None
        number = f"(part - {start})" if start else "part"
        if self.programs == 1:
            number = "0"
        count = math.prod(part.outer)
        if part.lines == 1:
            return Index(self.values.name(scope, "line", number), block=False)
        text = f"{number} * {part.lines} + tl.arange(0, {part.lines})[:, None]"
        name = self.values.name(scope, "line", text)
        mask = f"{name} < {count}" if count % part.lines else ""
        return Index(name, mask, size=part.lines)

    def _blocks(
        self, scope: Scope, part: Part, node: Node, lines: Index | None
    ) -> list[tuple[Index, ...]]:
        """Cover the inner shape of a node by blocks, block after block."""
        shape = self.values.shape_of(node)
        if not shape:
            return [()]
        *outer, width = shape
        if lines is not None:
            places = [unravel(lines, tuple(outer))]
        elif math.prod(outer) <= _UNROLLED_LINES:
            places = [tuple(map(at, p)) for p in itertools.product(*map(range, outer))]
        else:
            places = [self._all_lines(scope, tuple(outer), width)]
        across = any(i.size > 1 for i in places[0])
        blocks = self.values.passes(scope, width, self._block(part, width), across=across)
        return [
            (*(ZERO if e == 1 else i for i, e in zip(place, outer, strict=True)), block)
            for block in blocks
            for place in places
        ]

    def _all_lines(self, scope: Scope, outer: tuple[int, ...], width: int) -> tuple[Index, ...]:
        count = math.prod(outer)
        padded = power_of_two(count)
        if padded * power_of_two(width) > FRAME:
            raise LowerError(
                f"row kernel: shape {(*outer, width)} is too large for one block: "
                f"want {FRAME} elements"
            )
        name = self.values.name(scope, "line", f"tl.arange(0, {padded})[:, None]")
        return unravel(Index(name, f"{name} < {count}" if padded != count else "", size=padded),
                       outer)  # fmt: skip

    def _block(self, part: Part, width: int) -> int:
        """Elements of a block: the lanes of the reductions, so that both walk the same blocks; else
        many, but few that do not exist."""
        needed = [n for name in part.sinks for n in ancestors_inside(self.values, name)]
        if any(_is(n, Kind.REDUCE) for n in needed) and width <= UNROLLED * self.lanes:
            return min(self.lanes, power_of_two(width))
        sizes = [BLOCK >> i for i in range(5)]
        fitting = [s for s in sizes if -(-width // s) * s * 8 <= width * 9]
        return min(power_of_two(width), fitting[0] if fitting else sizes[-1])

    # --- stores ---------------------------------------------------------------------------------

    def _store(self, node: Node, value: str, index: tuple[Index, ...]) -> str:
        shape = self.values.shape_of(node)
        offset = linear(index, shape)
        at_ = f"{self.row.text} * {math.prod(shape)} + {offset.text}"
        mask = f", mask={offset.mask}" if offset.mask else ""
        dtype = memory_type(node.type.dtype)
        narrowed = value if dtype in ("float32", "int32") else f"{value}.to(tl.{dtype})"
        return f"tl.store({self.sinks[node.name]} + {at_}, {narrowed}{mask})"

    def _append(self, scope: Scope, node: Node, index: tuple[Index, ...], *, guarded: bool) -> None:
        """Store one block of an entry in its slot; slot -1 stores nothing."""
        cache, x, slots = node.inputs
        found = self.values.operand(scope, slots, (), 1, self.row)
        slot = self.values.once(scope, (slots, "slot"), "slot", f"{found}.to(tl.int64)")
        inner = scope if guarded else scope.child()
        if node.op == "append_rows":
            lines = self._append_row(inner, node, slot, index)
        else:
            lines = [self._append_heads(inner, node, slot, index)]
        if guarded:
            scope.lines += lines
        else:
            everything = [*inner.lines, *lines]
            scope.lines += [f"if {slot} >= 0:", *("    " + line for line in everything)]

    def _append_row(
        self, scope: Scope, node: Node, slot: str, index: tuple[Index, ...]
    ) -> list[str]:
        """States [pages, entries, width], plain or packed."""
        cache, x, _ = node.inputs
        state = self.body.type_of(cache)
        width = constant(state.shape[2])
        if not isinstance(state.dtype, BlockFormat):
            value = self.values.operand(scope, x, index, 2, self.row)
            return [_plain_store(cache, f"{slot} * {width}", index[-1], value, state.dtype)]
        source = self.values.inside.get(x)
        if source is None or source.op != "quantise":
            # What was quantised before is packed by the same rule: its values are kept exactly.
            source = Node(node.name, "quantise", (x,), (), self.body.type_of(x))
        call = Call(self.values, scope, source, index, self.row)
        return packed_store(call, f"{cache} + {slot} * {state.dtype.row_bytes(width)}")

    def _append_heads(
        self, scope: Scope, node: Node, slot: str, index: tuple[Index, ...]
    ) -> str:
        """Caches [blocks, heads, block_size, width]."""
        cache, x, _ = node.inputs
        _, heads, block_size, width = self.body.type_of(cache).shape
        value = self.values.operand(scope, x, index, 3, self.row)
        head, last = index
        block = f"(({slot} // {block_size}) * {heads} + {head.text}) * {block_size}"
        place = f"({block} + {slot} % {block_size}) * {width}"
        last = Index(last.text, joined_masks([head, last]))
        return _plain_store(cache, place, last, value, self.body.type_of(x).dtype)


def _plain_store(cache: str, place: str, last: Index, value: str, dtype: ElementType) -> str:
    kind = memory_type(dtype)
    narrowed = value if kind in ("float32", "int32") else f"{value}.to(tl.{kind})"
    mask = f", mask={last.mask}" if last.mask else ""
    return f"tl.store({cache} + {place} + {last.text}, {narrowed}{mask})"


def _is(node: Node, *kinds: Kind) -> bool:
    return op_def(node.op).kind in kinds
