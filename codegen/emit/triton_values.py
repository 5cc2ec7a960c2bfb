"""Values of a body as Triton block expressions: evaluates nodes at an index, recomputing what is
cheap, so that one row (or a tile of rows) needs no memory of its own.

An index is one block of integers per axis with the mask of its tail. Every operation is written
with the parentheses of the scalar tree; nothing is regrouped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

TYPES: Mapping[str, str] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32"}


@dataclass(frozen=True)
class Index:
    """Positions along one axis: text, the condition under which they exist, whether a block."""

    text: str
    mask: str = ""
    block: bool = True


ZERO = Index("0", block=False)


def triton_type(dtype: ElementType) -> str:
    """Return the name of an element type; LowerError for one without plain form."""
    if not isinstance(dtype, DType) or dtype.name not in TYPES:
        raise LowerError(f"element type '{dtype}': no plain Triton form: have {', '.join(TYPES)}")
    return TYPES[dtype.name]


def joined_masks(parts: Iterable[Index]) -> str:
    """Return the condition under which all of these positions exist; empty for always."""
    return " & ".join(dict.fromkeys(f"({p.mask})" for p in parts if p.mask))


def linear(index: tuple[Index, ...], shape: tuple[int, ...]) -> Index:
    """Row-major offset of an index; axes of extent 1 count as position 0."""
    terms, used, stride = [], [], 1
    for part, extent in zip(reversed(index), reversed(shape), strict=True):
        if extent != 1:
            terms.append(part.text if stride == 1 else f"{part.text} * {stride}")
            used.append(part)
        stride *= extent
    text = " + ".join(reversed(terms)) or "0"
    mask = joined_masks(reversed(used))
    return Index(f"({text})" if len(terms) > 1 else text, mask, any(p.block for p in used))


def unravel(offset: Index, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Invert `linear`."""
    found, stride = [], 1
    outermost = next((axis for axis, extent in enumerate(shape) if extent != 1), 0)
    for axis, extent in reversed(list(enumerate(shape))):
        if extent == 1:
            found.append(ZERO)
            continue
        text = offset.text if stride == 1 else f"({offset.text} // {stride})"
        if axis != outermost:
            text = f"({text} % {extent})"
        found.append(Index(text, offset.mask, offset.block))
        stride *= extent
    return tuple(reversed(found))


@dataclass
class Scope:
    """Statements being written, and the values they have named."""

    lines: list[str] = field(default_factory=list)
    done: dict[tuple[str, ...], str] = field(default_factory=dict)

    def child(self) -> Scope:
        """A scope inside a loop: sees the values named so far, keeps its own to itself."""
        return Scope([], dict(self.done))


class Values:
    """Evaluates nodes of one body for the row(s) `row`. `known` gives texts of finished nodes."""

    def __init__(
        self, body: Graph, names: Iterable[str], rows: Dim, row: Index, known: Mapping[str, str]
    ) -> None:
        self.body, self.rows, self.row = body, rows, row
        self.inside = {n: body.node[n] for n in names}
        self.known = dict(known)
        self.matrices = matrix_weights(body)
        self.reduced: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._count = 0

    def shape_of(self, node: Node) -> tuple[int, ...]:
        """Inner shape of a node; a store walks its entries."""
        if op_def(node.op).kind is Kind.STORE:
            return inner_shape(self.body.type_of(node.inputs[1]), 3, self.rows)
        return inner_shape(node.type, node.type.rank, self.rows)

    def name(self, scope: Scope, stem: str, text: str) -> str:
        """Assign a text to a fresh variable."""
        self._count += 1
        variable = f"{stem}_{self._count}"
        scope.lines.append(f"{variable} = {text}")
        return variable

    def node(self, scope: Scope, name: str, index: tuple[Index, ...], row: Index) -> str:
        """Return the variable of a node inside at an index over its own inner shape."""
        if name in self.known:
            return self.known[name]
        node = self.inside[name]
        shape = self.shape_of(node)
        index = tuple(ZERO if extent == 1 else i for i, extent in zip(index, shape, strict=True))
        if name in self.reduced:
            return self._reduced(name, index)
        if node.op in VIEWS:
            return self._view(scope, node, index, row)
        key = (name, row.text, *(i.text for i in index))
        if key not in scope.done:
            scope.done[key] = self.name(scope, name, self._expression(scope, node, index, row))
        return scope.done[key]

    def _reduced(self, name: str, index: tuple[Index, ...]) -> str:
        text, outer = self.reduced[name]
        if outer and outer != tuple(i.text for i in index[:-1]):
            raise LowerError(
                f"reduction '{name}': is read along other axes: got {index}, want {outer}"
            )
        return text

    def _view(self, scope: Scope, node: Node, index: tuple[Index, ...], row: Index) -> str:
        source = node.inputs[0]
        shape = self._operand_shape(source)
        offset = linear(index, self.shape_of(node))
        kept = [i for i in index if i != ZERO]
        same = [e for e in shape if e != 1] == [e for e in self.shape_of(node) if e != 1]
        if same:
            rest = iter(kept)
            moved = tuple(ZERO if e == 1 else next(rest) for e in shape)
        else:
            moved = unravel(offset, shape)
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
            if type_.dtype.name != "i32" and triton_type(type_.dtype) != "float32":
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
                last = index[-1]
                moved = Index(f"({last.text} + {node.attr['start']})", last.mask, last.block)
                return self.operand(scope, source, (*index[:-1], moved), rank, row)
            case "gather_rows":
                chosen = self.gathered_row(scope, node.inputs[1], row)
                return self.operand(scope, source, index, rank, chosen, other_rows=True)
            case "embedding":
                return self._table_row(scope, node, index, row)
            case _:
                raise LowerError(f"{node.op} '{node.name}': has no Triton row form")

    def gathered_row(self, scope: Scope, rows: str, row: Index) -> Index:
        """Return the row that an index tensor chooses."""
        loaded = load(rows, row.text, [row]) + ".to(tl.int64)"
        key = (rows, row.text, "row")
        if key not in scope.done:
            scope.done[key] = self.name(scope, f"row_{rows}", loaded)
        return Index(scope.done[key], row.mask, row.block)

    def _rotated(self, scope: Scope, node: Node, index: tuple[Index, ...], row: Index) -> str:
        """(a, b) -> (-b, a): read the partner, negated in the first half of a pair."""
        last, half = index[-1], self.shape_of(node)[-1] // 2
        if node.attr["pairing"] == "half":
            first = f"({last.text} < {half})"
            partner = f"tl.where({first}, {last.text} + {half}, {last.text} - {half})"
        else:
            first = f"(({last.text} & 1) == 0)"
            partner = f"({last.text} ^ 1)"
        moved = Index(partner, last.mask, last.block)
        value = self.operand(scope, node.inputs[0], (*index[:-1], moved), node.type.rank, row)
        return f"tl.where({first}, -{value}, {value})"

    def _table_row(self, scope: Scope, node: Node, index: tuple[Index, ...], row: Index) -> str:
        """A row of a table, NaN for an id outside."""
        ids, table = node.inputs
        type_ = self.body.type_of(table)
        count, width = (constant(d) for d in type_.shape)
        chosen = self.gathered_row(scope, ids, row)
        ok = self.name(scope, "known", f"({chosen.text} >= 0) & ({chosen.text} < {count})")
        safe = Index(self.name(scope, "id", f"tl.where({ok}, {chosen.text}, 0)"), row.mask)
        (last,) = index
        if isinstance(type_.dtype, BlockFormat):
            value = self._decoded(scope, table, type_.dtype.name, safe, last, width)
        else:
            value = load(table, f"{safe.text} * {width} + {last.text}", [row, last])
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


def load(pointer: str, offset: str, parts: Iterable[Index]) -> str:
    """Return a load of the elements that exist; the others read as 0."""
    parts = list(parts)
    mask = joined_masks(p for p in parts if p.block)
    tail = f", mask={mask}, other=0" if mask else ""
    return f"tl.load({pointer} + {offset}{tail})"
