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
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.pack_gpu import ROWS, block_layout
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.scalar import Var
from tilewright.graph.types import BlockFormat, DType, ElementType

TYPES: Mapping[str, str] = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "u8": "uint8",
}  # fmt: skip


@dataclass(frozen=True)
class Index:
    """Positions along one axis: text, the condition under which they exist, whether a block.

    A block of `size` neighbouring positions, counted from `base`, knows both; others have size 0.
    """

    text: str
    mask: str = ""
    block: bool = True
    base: int = 0
    size: int = 0

    @property
    def number(self) -> int | None:
        """The one position, where it is known."""
        return int(self.text) if self.text.isdigit() else None


def at(number: int) -> Index:
    """One known position."""
    return Index(str(number), block=False)


ZERO = at(0)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def triton_type(dtype: ElementType) -> str:
    """Return the name of an element type; LowerError for one without plain form."""
    if not isinstance(dtype, DType) or dtype.name not in TYPES:
        raise LowerError(f"element type '{dtype}': no plain Triton form: have {', '.join(TYPES)}")
    return TYPES[dtype.name]


def memory_type(dtype: ElementType) -> str:
    """Return the name of the type that a computed value has in memory: quantised values are bf16,
    which holds them exactly."""
    return "bfloat16" if isinstance(dtype, BlockFormat) else triton_type(dtype)


def joined_masks(parts: Iterable[Index]) -> str:
    """Return the condition under which all of these positions exist; empty for always."""
    return " & ".join(dict.fromkeys(f"({p.mask})" for p in parts if p.mask))


def linear(index: tuple[Index, ...], shape: tuple[int, ...]) -> Index:
    """Row-major offset of an index; axes of extent 1 count as position 0."""
    terms, used, stride, start = list[str](), list[Index](), 1, 0
    run: Index | None = None
    for part, extent in zip(reversed(index), reversed(shape), strict=True):
        if extent != 1 and part.number is not None:
            start += part.number * stride
        elif extent != 1:
            terms.append(part.text if stride == 1 else f"{part.text} * {stride}")
            used.append(part)
            run = part if stride == 1 else run
        stride *= extent
    terms = [*([str(start)] if start else []), *reversed(terms)]
    mask = joined_masks(reversed(used))
    text = f"({' + '.join(terms)})" if len(terms) > 1 else (terms or ["0"])[0]
    if run is None or len(used) > 1 or not run.size:
        return Index(text, mask, any(p.block for p in used))
    return Index(text, mask, run.block, start + run.base, run.size)


def unravel(offset: Index, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Invert `linear`."""
    found, stride = list[Index](), 1
    outermost = next((axis for axis, extent in enumerate(shape) if extent != 1), 0)
    for axis, extent in reversed(list(enumerate(shape))):
        found.append(_coordinate(offset, stride, extent, outermost=axis == outermost))
        stride *= extent
    return tuple(reversed(found))


def _coordinate(offset: Index, stride: int, extent: int, *, outermost: bool) -> Index:
    """One axis of an offset; a block that stays within one line knows the line."""
    if extent == 1:
        return ZERO
    first = offset.number
    if offset.size and offset.base // stride == (offset.base + offset.size - 1) // stride:
        first = offset.base
    if first is not None:
        return at(first // stride if outermost else first // stride % extent)
    if outermost and stride == 1:
        return offset
    line = stride * extent
    inside = offset.size and offset.base // line == (offset.base + offset.size - 1) // line
    if inside and stride == 1 and not outermost:
        start = offset.base // line * line
        text = f"({offset.text} - {start})" if start else offset.text
        return Index(text, offset.mask, offset.block, offset.base - start, offset.size)
    text = offset.text if stride == 1 else f"({offset.text} // {stride})"
    if not outermost:
        text = f"({text} % {extent})"
    return Index(text, offset.mask, offset.block)


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
        rowwise = other_rows or (
            value not in self.body.weight and has_rows(type_, rank, self.rows)
        )
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
        if isinstance(type_.dtype, BlockFormat):
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


def _moved(node: Node, index: tuple[Index, ...]) -> Index:
    """Where a slice of the last axis reads."""
    last, start = index[-1], int(str(node.attr["start"]))
    if last.number is not None:
        return at(last.number + start)
    if not start:
        return last
    base = last.base + start if last.size else 0
    return Index(f"({last.text} + {start})", last.mask, last.block, base, last.size)


def block_shape(index: tuple[Index, ...]) -> tuple[int, ...]:
    """Shape of the block that an index spans: its last axis, and lines of it if they are one."""
    *outer, last = index
    lines = max((i.size for i in outer), default=0)
    return (lines, last.size) if lines > 1 else (last.size,)


def block_form(index: tuple[Index, ...]) -> str:
    """Lines, size of a line and rank of the block that an index spans."""
    shape = block_shape(index)
    return f"{1 if len(shape) == 1 else shape[0]}, {shape[-1]}, {len(shape)}"


def whole(value: str, index: tuple[Index, ...]) -> str:
    """Return a value as the block that an index spans, also where it is the same for all."""
    return f"tl.broadcast_to({value}, {block_shape(index)})"


def load(pointer: str, offset: str, parts: Iterable[Index]) -> str:
    """Return a load of the elements that exist; the others read as 0."""
    parts = list(parts)
    mask = joined_masks(p for p in parts if p.block)
    tail = f", mask={mask}, other=0" if mask else ""
    return f"tl.load({pointer} + {offset}{tail})"
