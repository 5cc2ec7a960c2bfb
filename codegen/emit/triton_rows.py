"""Prints a row program in Triton: one program per row. Reductions name their lanes and their tree,
so that neither warps nor the compiler's layout can change a bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.emit.shapes import inner_shape
from tilewright.codegen.emit.triton_values import (
    ZERO,
    Index,
    Scope,
    Values,
    joined_masks,
    linear,
    triton_type,
)
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def

BLOCK = 4096  # elements of a row that one pass holds
FRAME = 16384  # elements of a two-axis block
UNROLLED = 8  # passes of a reduction that are written out
_SELECT_BLOCK = 4096
_MAX_TOP_K_WIDTH = 16384


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Frame:
    """Positions over an inner shape: statements that declare them, and the loop they stand in."""

    index: tuple[Index, ...]
    lines: tuple[str, ...]
    loop: str = ""


def rows_of(outer: Sequence[int], last: Index) -> tuple[tuple[Index, ...], list[str], int]:
    """Positions of the leading axes as a column, the statements, and the padded count."""
    count = 1
    for extent in outer:
        count *= extent
    if count == 1:
        return (ZERO,) * len(outer), [], 1
    padded = power_of_two(count)
    name = "o" + "_".join(map(str, outer))
    lines = [f"{name} = tl.arange(0, {padded})[:, None]"]
    mask = f"{name} < {count}" if padded != count else ""
    found, stride = [], 1
    for axis, extent in reversed(list(enumerate(outer))):
        text = name if stride == 1 else f"({name} // {stride})"
        if any(e != 1 for e in outer[:axis]):
            text = f"({text} % {extent})"
        found.append(ZERO if extent == 1 else Index(text, mask))
        stride *= extent
    return tuple(reversed(found)), lines, padded


def frame(shape: tuple[int, ...]) -> Frame:
    """Return positions over all elements of an inner shape."""
    if not shape:
        return Frame((), ())
    *outer, width = shape
    index, lines, count = rows_of(outer, ZERO)
    if width == 1:
        return Frame((*index, ZERO), tuple(lines))
    name, padded = "j" + "_".join(map(str, shape)), power_of_two(width)
    across = "[None, :]" if count > 1 else ""
    if count * padded > FRAME:
        raise LowerError(
            f"row kernel: shape {shape} is too large for one block: want {FRAME} elements"
        )
    if count == 1 and padded > BLOCK:
        lines += [f"{name} = base + tl.arange(0, {BLOCK})"]
        ragged = width % BLOCK != 0
        loop = f"for base in range(0, {width}, {BLOCK}):"
        return Frame((*index, Index(name, f"{name} < {width}" if ragged else "")), tuple(lines),
                     loop)  # fmt: skip
    lines.append(f"{name} = tl.arange(0, {padded}){across}")
    mask = f"{name} < {width}" if padded != width else ""
    return Frame((*index, Index(name, mask)), tuple(lines))


class RowPrinter:
    """Prints the program that computes some nodes of a body for row `row`.

    `sinks` maps nodes to the pointer their row is stored to. `lanes` bounds the lanes of sums.
    """

    def __init__(
        self,
        body: Graph,
        names: Sequence[str],
        rows: Dim,
        sinks: Mapping[str, str],
        lanes: int,
        row: str = "row",
    ) -> None:
        self.body, self.sinks, self.lanes = body, sinks, lanes
        self.row = Index(row, block=False)
        self.values = Values(body, names, rows, self.row, {})
        self.scope = Scope()

    def text(self) -> list[str]:
        """Return the statements of the program."""
        stores: dict[tuple[int, ...], list[Node]] = {}
        for node in self.values.inside.values():
            kind = op_def(node.op).kind
            if kind is Kind.REDUCE:
                self._reduce(node)
            elif kind is Kind.SELECT:
                self._select(node)
                continue
            if node.name in self.sinks or kind is Kind.STORE:
                stores.setdefault(self.values.shape_of(node), []).append(node)
        for shape, nodes in stores.items():
            self._store_all(shape, nodes)
        return self.scope.lines

    def _store_all(self, shape: tuple[int, ...], nodes: Iterable[Node]) -> None:
        """Compute and store every node of one inner shape, in one pass over its elements."""
        place = frame(shape)
        scope = self.scope.child() if place.loop else self.scope
        scope.lines += place.lines
        for node in nodes:
            if op_def(node.op).kind is Kind.STORE:
                self._append(scope, node, place.index)
            else:
                value = self.values.node(scope, node.name, place.index, self.row)
                scope.lines.append(self._store(node, value, linear(place.index, shape)))
        if place.loop:
            self.scope.lines += [place.loop, *("    " + line for line in scope.lines)]

    def _store(self, node: Node, value: str, offset: Index) -> str:
        size = 1
        for extent in self.values.shape_of(node):
            size *= extent
        at = f"{self.row.text} * {size} + {offset.text}"
        mask = f", mask={offset.mask}" if offset.mask else ""
        dtype = triton_type(node.type.dtype)
        narrowed = value if dtype == "float32" else f"{value}.to(tl.{dtype})"
        return f"tl.store({self.sinks[node.name]} + {at}, {narrowed}{mask})"

    def _append(self, scope: Scope, node: Node, index: tuple[Index, ...]) -> None:
        """Store an entry in its slot of [blocks, heads, block_size, width]; slot -1 is skipped."""
        cache, x, slots = node.inputs
        _, heads, block_size, width = self.body.type_of(cache).shape
        value = self.values.operand(scope, x, index, 3, self.row)
        key = (slots, "slot")
        if key not in scope.done:
            scope.done[key] = self.values.name(
                scope, "slot", f"tl.load({slots} + {self.row.text}).to(tl.int64)"
            )
        slot = scope.done[key]
        head, last = index
        block = f"(({slot} // {block_size}) * {heads} + {head.text}) * {block_size}"
        at = f"({block} + {slot} % {block_size}) * {width} + {last.text}"
        mask = joined_masks([head, last])
        dtype = triton_type(self.body.type_of(x).dtype)
        tail = f", mask={mask}" if mask else ""
        scope.lines += [
            f"if {slot} >= 0:",
            f"    tl.store({cache} + {at}, {value}.to(tl.{dtype}){tail})",
        ]

    def _reduce(self, node: Node) -> None:
        """Fixed lanes, each summed in order, then a fixed tree."""
        type_ = self.body.type_of(node.inputs[0])
        *outer, width = inner_shape(type_, type_.rank, self.values.rows)
        lanes = min(self.lanes, power_of_two(width))
        index, lines, count = rows_of(outer, ZERO)
        if count * lanes > FRAME:
            raise LowerError(f"reduction '{node.name}': {outer} rows of a row are too many")
        self.scope.lines += lines
        sum_ = node.op == "reduce_sum"
        start = "0.0" if sum_ else "float('-inf')"
        shape = f"({count}, {lanes})" if count > 1 else f"({lanes},)"
        filled = f"tl.full({shape}, {start}, tl.float32)"
        total = self.values.name(self.scope, f"lanes_{node.name}", filled)
        scope = self.scope.child()
        across = "[None, :]" if count > 1 else ""
        scope.lines.append(f"j = base + tl.arange(0, {lanes}){across}")
        ragged = width % lanes != 0
        last = Index("j", f"j < {width}" if ragged else "")
        value = self.values.operand(scope, node.inputs[0], (*index, last), type_.rank, self.row)
        step = f"{total} + {value}" if sum_ else f"tw_max({total}, {value})"
        kept = f"tl.where({last.mask}, {step}, {total})" if ragged else step
        scope.lines.append(f"{total} = {kept}")
        passes = -(-width // lanes)
        if passes == 1:
            self.scope.lines += ["base = 0", *scope.lines]
        else:
            loop = "tl.static_range" if passes <= UNROLLED else "range"
            self.scope.lines += [
                f"for base in {loop}(0, {width}, {lanes}):",
                *("    " + line for line in scope.lines),
            ]
        self._tree(node, total, count, lanes, sum_)
        self.values.reduced[node.name] = total, tuple(i.text for i in index) if count > 1 else ()

    def _tree(self, node: Node, total: str, count: int, lanes: int, sum_: bool) -> None:
        """Add halves until one lane is left; an addition of two has no order to choose."""
        while lanes > 1:
            lanes //= 2
            if count > 1:
                shape, axis = f"({count}, 2, {lanes})", 1
            else:
                shape, axis = f"(2, {lanes})", 0
            if lanes == 1:
                shape, axis = (f"({count}, 2)", 1) if count > 1 else ("(2,)", 0)
            halves = f"tl.reshape({total}, {shape})"
            folded = (
                f"tl.sum({halves}, axis={axis})"
                if sum_
                else f"tl.reduce({halves}, {axis}, tw_max)"
            )
            self.scope.lines.append(f"{total} = {folded}")
        if count > 1:
            self.scope.lines.append(f"{total} = tl.reshape({total}, ({count}, 1))")

    def _select(self, node: Node) -> None:
        """Positions or values of the largest entries: exact, so no order is to be fixed."""
        type_ = self.body.type_of(node.inputs[0])
        *outer, width = inner_shape(type_, type_.rank, self.values.rows)
        if any(e != 1 for e in outer):
            raise LowerError(f"{node.op} '{node.name}': got {outer} rows in a row, want one")
        if node.name not in self.sinks:
            raise LowerError(f"{node.op} '{node.name}': is used in its own kernel: want an output")
        if node.op == "argmax":
            self._argmax(node, len(outer), width, type_.rank)
        else:
            self._top_k(node, len(outer), width, type_.rank)

    def _argmax(self, node: Node, outer: int, width: int, rank: int) -> None:
        block = min(_SELECT_BLOCK, power_of_two(width))
        scope = self.scope.child()
        scope.lines.append(f"j = base + tl.arange(0, {block})")
        last = Index("j", f"j < {width}")
        index = (*(ZERO,) * outer, last)
        value = self.values.operand(scope, node.inputs[0], index, rank, self.row)
        scope.lines += [
            f"shown = tl.where(j < {width}, {value}, float('-inf'))",
            "bad = tl.maximum(bad, tl.max((shown != shown).to(tl.int32), axis=0))",
            "top = tl.max(shown, axis=0)",
            f"at = tl.min(tl.where((shown == top) & (j < {width}), j, {width}), axis=0)",
            "place = tl.where(top > best, at, place)",
            "best = tl.where(top > best, top, best)",
        ]
        self.scope.lines += [
            "bad = tl.full([], 0, tl.int32)",
            "place = tl.full([], 0, tl.int32)",
            "best = tl.full([], float('-inf'), tl.float32)",
            f"for base in range(0, {width}, {block}):",
            *("    " + line for line in scope.lines),
            f"tl.store({self.sinks[node.name]} + {self.row.text}, tl.where(bad > 0, 0, place))",
        ]

    def _top_k(self, node: Node, outer: int, width: int, rank: int) -> None:
        """Take the largest k times; keys order like entries, NaN above all, zeros equal."""
        padded, k = power_of_two(width), int(str(node.attr["k"]))
        if padded > _MAX_TOP_K_WIDTH:
            raise LowerError(
                f"{node.op} '{node.name}': row too long: got {width}, want {_MAX_TOP_K_WIDTH}"
            )
        scope = self.scope
        j = f"k{width}"
        scope.lines.append(f"{j} = tl.arange(0, {padded})")
        last = Index(j, f"{j} < {width}" if padded != width else "")
        index = (*(ZERO,) * outer, last)
        value = self.values.operand(scope, node.inputs[0], index, rank, self.row)
        result = "at" if node.op == "top_k_indices" else "tw_key_value(top)"
        scope.lines += [
            f"key = tw_order_key({value})",
            f"alive = {j} < {width}",
            f"for taken in range(0, {k}):",
            "    top = tl.max(tl.where(alive, key, -2147483648), axis=0)",
            f"    at = tl.min(tl.where(alive & (key == top), {j}, {padded}), axis=0)",
            f"    tl.store({self.sinks[node.name]} + {self.row.text} * {k} + taken, {result})",
            f"    alive = alive & ({j} != at)",
        ]
