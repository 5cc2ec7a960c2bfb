"""Values of a body as Triton block expressions: evaluates nodes at an index, recomputing what is
cheap, so that one row (or a tile of rows) needs no memory of its own.

An index is one block of integers per axis with the mask of its tail. Every operation is written
with the parentheses of the scalar tree; nothing is regrouped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.emit.triton_places import (
    ZERO,
    Index,
    at,
    block_form,
    joined_masks,
    linear,
    load,
    power_of_two,
    unravel,
    whole,
)
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.pack_gpu import ROWS, block_layout, lies_as_rows
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.scalar import Var
from tilewright.graph.types import BlockFormat, DType, ElementType

__all__ = ["Index", "Scope", "Values", "memory_type", "triton_type"]

TYPES: Mapping[str, str] = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "u8": "uint8",
}  # fmt: skip


def triton_type(dtype: ElementType) -> str:
    """Return the name of an element type; LowerError for one without plain form."""
    if not isinstance(dtype, DType) or dtype.name not in TYPES:
        raise LowerError(f"element type '{dtype}': no plain Triton form: have {', '.join(TYPES)}")
    return TYPES[dtype.name]


def memory_type(dtype: ElementType) -> str:
    """Return the name of the type that a computed value has in memory: quantised values are bf16,
    which holds them exactly."""
    return "bfloat16" if isinstance(dtype, BlockFormat) else triton_type(dtype)


@dataclass
class Scope:
    """Statements being written, and the values they have named."""

    lines: list[str] = field(default_factory=list)
    done: dict[tuple[str, ...], str] = field(default_factory=dict)

    def child(self) -> Scope:
        """A scope inside a loop: sees the values named so far, keeps its own to itself."""
        return Scope([], dict(self.done))


Evaluate: TypeAlias = "Callable[[Values, Scope, Node, tuple[Index, ...], Index], str]"
Store: TypeAlias = "Callable[[Scope, tuple[str, ...], str], None]"


class Values:
    """Evaluates nodes of one body for the row(s) `row`. `known` gives texts of finished nodes.

    `calls` evaluate the ops that are neither elementwise nor moves; `stores` is told of every value
    of a node inside, by its name and index, when it is first named.
    """

    def __init__(
        self,
        body: Graph,
        names: Iterable[str],
        rows: Dim,
        row: Index,
        known: Mapping[str, str],
        calls: Mapping[str, Evaluate] | None = None,
    ) -> None:
        self.body, self.rows, self.row = body, rows, row
        self.inside = {n: body.node[n] for n in names}
        self.known = dict(known)
        self.matrices = matrix_weights(body)
        self.calls = calls or {}
        self.stores: Store | None = None
        self._count = 0

    def shape_of(self, node: Node) -> tuple[int, ...]:
        """Inner shape of a node; a store walks its entries."""
        type_ = node.type
        if op_def(node.op).kind is Kind.STORE:
            type_ = self.body.type_of(node.inputs[1])
        return inner_shape(type_, type_.rank, self.rows)

    def name(self, scope: Scope, stem: str, text: str) -> str:
        """Assign a text to a fresh variable."""
        self._count += 1
        variable = f"{stem}_{self._count}"
        scope.lines.append(f"{variable} = {text}")
        return variable

    def once(self, scope: Scope, key: tuple[str, ...], stem: str, text: str) -> str:
        """Assign a text to a variable unless this scope has done so under this key."""
        if key not in scope.done:
            scope.done[key] = self.name(scope, stem, text)
        return scope.done[key]

    def passes(
        self, scope: Scope, width: int, most: int, *, across: bool
    ) -> tuple[Index, ...]:
        """Cover an axis by blocks of neighbours, a power of two and at most `most` each; `across`
        lines of a two-axis block."""
        if width == 1:
            return (ZERO,)
        size, found = min(power_of_two(width), power_of_two(most)), []
        suffix = "[None, :]" if across else ""
        first = self.once(
            scope, ("pass", suffix, str(size), "0"), "j", f"tl.arange(0, {size}){suffix}"
        )
        for base in range(0, width, size):
            key = ("pass", suffix, str(size), str(base))
            text = self.once(scope, key, "j", f"{first} + {base}") if base else first
            mask = f"{text} < {width}" if base + size > width else ""
            found.append(Index(text, mask, base=base, size=size))
        return tuple(found)

    def node(self, scope: Scope, name: str, index: tuple[Index, ...], row: Index) -> str:
        """Return the variable of a node inside at an index over its own inner shape."""
        if name in self.known:
            return self.known[name]
        node = self.inside[name]
        shape = self.shape_of(node)
        index = tuple(ZERO if extent == 1 else i for i, extent in zip(index, shape, strict=True))
        if node.op in VIEWS:
            return self._view(scope, node, index, row)
        key = (name, row.text, *(i.text for i in index))
        if key not in scope.done:
            text = self._expression(scope, node, index, row)
            scope.done[key] = text if text.isidentifier() else self.name(scope, name, text)
            if self.stores is not None and row == self.row:
                self.stores(scope, (name, *key[2:]), scope.done[key])
        return scope.done[key]

    def _view(self, scope: Scope, node: Node, index: tuple[Index, ...], row: Index) -> str:
        source = node.inputs[0]
        shape, mine = self._operand_shape(source), self.shape_of(node)
        kept = [i for i, extent in zip(index, mine, strict=True) if extent != 1]
        if [e for e in shape if e != 1] == [e for e in mine if e != 1]:
            rest = iter(kept)
            moved = tuple(ZERO if e == 1 else next(rest) for e in shape)
        else:
            moved = unravel(linear(index, mine), shape)
        return self.operand(scope, source, moved, len(shape) + 1, row)

    def _operand_shape(self, value: str) -> tuple[int, ...]:
        if value in self.inside:
            return self.shape_of(self.inside[value])
        type_ = self.body.type_of(value)
        return inner_shape(type_, type_.rank, self.rows)

    def operand(
        self,
        scope: Scope,
        value: str,
        index: tuple[Index, ...],
        rank: int,
        row: Index,
        *,
        other_rows: bool = False,
    ) -> str:
        """Return an operand at an index, broadcast by extents of 1, aligned at the last axis."""
        if value in self.inside or value in self.known:
            shape = self.shape_of(self.body.node[value])
            return self.node(scope, value, index[len(index) - len(shape) :], row)
        type_ = self.body.type_of(value)
        if other_rows:
            shape = tuple(constant(d) for d in type_.shape[1:])
        else:
            shape = inner_shape(type_, rank, self.rows)
        used = index[len(index) - len(shape) :] if shape else ()
        offset = linear(used, shape)
        # A weight has rows where a kernel computes from weights alone.
        rowwise = other_rows or has_rows(type_, rank, self.rows)
        parts, text = [offset], offset.text
        if rowwise:
            size = 1
            for extent in shape:
                size *= extent
            text = f"{row.text} * {size} + {text}" if size != 1 else f"{row.text} + {text}"
            parts = [row, offset]
        key = (value, text)
        if key not in scope.done:
            loaded = load(value, text, parts)
            if memory_type(type_.dtype) not in ("int32", "float32"):
                loaded += ".to(tl.float32)"
            scope.done[key] = self.name(scope, f"load_{value}", loaded)
        return scope.done[key]

    def _expression(
        self, scope: Scope, node: Node, index: tuple[Index, ...], row: Index
    ) -> str:
        definition = op_def(node.op)
        if definition.kind is Kind.ELEMENTWISE:
            assert definition.scalar is not None
            names = {}
            for i, value in enumerate(node.inputs):
                text = self.operand(scope, value, index, node.type.rank, row)
                integer = self.body.type_of(value).dtype.name == "i32"
                names[f"operand{i}"] = f"{text}.to(tl.float32)" if integer else text
            return print_scalar(definition.scalar(node.attr, *map(Var, names)), names, "triton")
        source, rank = node.inputs[0], node.type.rank
        match node.op:
            case "rotate_pairs":
                return self._rotated(scope, node, index, row)
            case "slice_last":
                return self.operand(scope, source, (*index[:-1], _moved(node, index)), rank, row)
            case "gather_rows":
                chosen = self._chosen_row(scope, node.inputs[1], (), row)
                return self.operand(scope, source, index, rank, chosen, other_rows=True)
            case "embedding":
                return self._table_row(scope, node, index, row)
            case _ if node.op in self.calls:
                return self.calls[node.op](self, scope, node, index, row)
            case _:
                raise LowerError(f"{node.op} '{node.name}': has no Triton row form")

    def _chosen_row(self, scope: Scope, ids: str, index: tuple[Index, ...], row: Index) -> Index:
        """Return the row that an index tensor chooses."""
        rank = self.body.type_of(ids).rank
        found = self.operand(scope, ids, index, rank, row)
        key = (ids, found, "row")
        wide = self.once(scope, key, f"row_{ids}", f"{found}.to(tl.int64)")
        parts = [row, *index]
        return Index(wide, joined_masks(parts), any(p.block for p in parts))

    def _rotated(self, scope: Scope, node: Node, index: tuple[Index, ...], row: Index) -> str:
        """(a, b) -> (-b, a). Pairs of neighbours in a block are swapped in registers; else the
        partner is read, negated in the first half of a pair."""
        last, half = index[-1], self.shape_of(node)[-1] // 2
        source, rank = node.inputs[0], node.type.rank
        neighbours = node.attr["pairing"] != "half"
        if neighbours and last.size > 1 and last.base % 2 == 0 and not row.block:
            value = self.operand(scope, source, index, rank, row)
            return f"tw_rotated({whole(value, index)}, {block_form(index)})"
        if not neighbours:
            first = f"({last.text} < {half})"
            partner = f"tl.where({first}, {last.text} + {half}, {last.text} - {half})"
        else:
            first = f"(({last.text} & 1) == 0)"
            partner = f"({last.text} ^ 1)"
        moved = Index(partner, last.mask, last.block)
        value = self.operand(scope, source, (*index[:-1], moved), rank, row)
        return f"tl.where({first}, -{value}, {value})"

    def _table_row(self, scope: Scope, node: Node, index: tuple[Index, ...], row: Index) -> str:
        """A row of a table, NaN for an id outside."""
        ids, table = node.inputs
        type_ = self.body.type_of(table)
        count, width = (constant(d) for d in type_.shape)
        *outer, last = index
        chosen = self._chosen_row(scope, ids, tuple(outer), row)
        inside = f"({chosen.text} >= 0) & ({chosen.text} < {count})"
        ok = self.once(scope, (table, chosen.text, "known"), "known", inside)
        safe = self.once(
            scope, (table, chosen.text, "id"), "id", f"tl.where({ok}, {chosen.text}, 0)"
        )
        place = Index(safe, chosen.mask, chosen.block)
        if isinstance(type_.dtype, BlockFormat) and lies_as_rows(type_.dtype):
            value = _coded(table, type_.dtype, place, last, width)
        elif isinstance(type_.dtype, BlockFormat):
            value = self._decoded(scope, table, type_.dtype.name, place, last, width)
        else:
            value = load(table, f"{safe} * {width} + {last.text}", [place, last])
            value += ".to(tl.float32)"
        return f"tl.where({ok}, {value}, float('nan'))"

    def _decoded(
        self, scope: Scope, table: str, name: str, n: Index, k: Index, width: int
    ) -> str:
        """One dequantised element: code * d (+ m); the product is exact."""
        layout = block_layout(name)
        groups, parts = width // layout.group, [n, k]
        cell = self.name(
            scope,
            "cell",
            f"(({n.text} // {ROWS}) * {groups} + {k.text} // {layout.group}) * {ROWS}"
            f" + {n.text} % {ROWS}",
        )
        nibbles = layout.code_bytes * 2 == layout.group
        at = f"({k.text} % {layout.group}) // 2" if nibbles else f"{k.text} % {layout.group}"
        code = load(table, f"{cell} * {layout.code_bytes} + {at}", parts)
        if nibbles:
            code = f"(({code}.to(tl.int32) >> (({k.text} & 1) * 4)) & 15)"
        else:
            code = f"{code}.to(tl.int8, bitcast=True)"
        scale = load(f"{table}_d", cell, parts) + ".to(tl.float32)"
        value = self.name(scope, "scaled", f"{code}.to(tl.float32) * {scale}")
        return f"({value} + {load(f'{table}_m', cell, parts)}.to(tl.float32))" if (
            layout.has_min) else value  # fmt: skip


def _coded(table: str, dtype: BlockFormat, n: Index, k: Index, width: int) -> str:
    """One element of a row of e4m3 codes, with its scale after them; the product is exact."""
    row = f"{n.text} * {dtype.row_bytes(width)}"
    code = load(table, f"{row} + {k.text}", [n, k])
    scale = load(table, f"{row} + {width} + {k.text} // {dtype.block[1]}", [n, k])
    return f"(tw_e4m3_value({code}) * tw_power_value({scale}))"


def _moved(node: Node, index: tuple[Index, ...]) -> Index:
    """Where a slice of the last axis reads."""
    last, start = index[-1], int(str(node.attr["start"]))
    if last.number is not None:
        return at(last.number + start)
    if not start:
        return last
    base = last.base + start if last.size else 0
    return Index(f"({last.text} + {start})", last.mask, last.block, base, last.size)
