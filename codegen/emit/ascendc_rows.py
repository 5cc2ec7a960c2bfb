"""Prints a row program as AscendC: transfers of a tile of rows, and one SIMT function over it.

Threads share the elements of a nest; a barrier ends each. A sum names its lanes: a warp takes one
row's, each lane adds in order, then a fixed tree of shuffles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.ascendc_memory import Layout, Region, plan
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.row_plan import Nest, RowPlanner
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, product
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.scalar import Var
from tilewright.graph.types import DType

THREADS, WARP = 256, 32
_REDUCE = {
    "reduce_sum": ("0.0f", "{0} = {0} + {1};"),
    "reduce_max": ("-__builtin_inff()", "{0} = tw_max({0}, {1});"),
}
SIZES = {"float": 4, "uint16_t": 2, "int32_t": 4}


@dataclass(frozen=True)
class Copy:
    """A tensor that a tile brings in: `rows` all rows at once, `indexed` row by row by an index,
    `shared` once for all tiles."""

    how: str
    tensor: str
    region: str
    row_bytes: int
    index: str = ""


@dataclass
class _Nest:
    """Statements of one element, and the values they have computed so far."""

    index: tuple[str, ...]
    stage: int
    pair: tuple[str, str] = ("", "")
    lines: list[str] = field(default_factory=list)
    done: dict[str, str] = field(default_factory=dict)


class AscendRows:
    """The row program of some nodes of a body. `sinks` maps nodes to the tensor they go to."""

    def __init__(
        self, body: Graph, names: Sequence[str], rows: Dim, sinks: Mapping[str, str], lanes: int
    ) -> None:
        if lanes != WARP:
            raise LowerError(f"row kernel '{body.name}': lanes: got {lanes}, want a warp of {WARP}")
        self.body, self.rows, self.sinks = body, rows, sinks
        self.inside = {n: body.node[n] for n in names}
        planner = RowPlanner(body, names, rows, frozenset(sinks))
        self.plan, self.shape_of = planner.plan(), planner.shape
        self.packed = matrix_weights(body)
        self.copies: dict[tuple[str, str], Copy] = {}
        self.regions: dict[str, Region] = {}
        self.function = self._function()
        self.layout: Layout = plan(list(self.regions.values()), name=body.name)

    # --- statements -----------------------------------------------------------------------------

    def _function(self) -> list[str]:
        for name in self.plan.arrays:
            width = 4 * max(1, constant(product(self.shape_of(self.inside[name]))))
            self._region(f"b_{name}", self._array_type(name), width, staged=False)
        for name, node in self.inside.items():
            if op_def(node.op).kind is Kind.STORE:
                entry = self.body.type_of(node.inputs[1])
                self._result(name, entry.dtype, constant(product(self.shape_of(node))))
            elif name in self.sinks:
                self._result(name, node.type.dtype, constant(product(self.shape_of(node))))
        lines: list[str] = []
        for nest in self.plan.nests:
            match nest.kind:
                case "reduce":
                    found = self._reduce(nest)
                case "call":
                    found = self._call(self.inside[nest.sinks[0]])
                case _:
                    found = self._loop(nest)
            lines += ["{", *("  " + line for line in found), "}", "asc_syncthreads();"]
        return lines[:-1]

    def _array_type(self, name: str) -> str:
        return "int32_t" if self.inside[name].type.dtype.name == "i32" else "float"

    def _region(
        self, name: str, ctype: str, width: int, *, staged: bool, shared: bool = False
    ) -> str:
        self.regions.setdefault(name, Region(name, ctype, width, staged, shared))
        return name

    def _result(self, name: str, dtype: object, count: int) -> None:
        assert isinstance(dtype, DType)
        ctype = storage(dtype).ctype
        self._region(f"o_{name}", ctype, max(1, count) * SIZES[ctype], staged=True)

    def _at(self, region: str, offset: str) -> str:
        found = self.regions[region]
        if found.shared:
            return f"{region}[{offset}]"
        return f"{region}[row * {found.row_bytes // SIZES[found.ctype]} + {offset}]"

    def _loop(self, nest: Nest) -> list[str]:
        """Every thread takes elements of all rows of the tile; rotated pairs lie together."""
        shape = nest.shape or (1,)
        *outer, width = shape
        half = width // 2
        if nest.pairing == "half":
            elements = [("j", f"(j + {half})", "-"), (f"(j + {half})", "j", "")]
        elif nest.pairing == "interleaved":
            elements = [("(2 * j)", "(2 * j + 1)", "-"), ("(2 * j + 1)", "(2 * j)", "")]
        else:
            elements = [("j", "", "")]
        index = tuple(f"i{axis}" for axis in range(len(outer)))
        inner: list[str] = []
        for last, other, sign in elements:
            state = _Nest((*index, last) if nest.shape else (), nest.stage, (other, sign))
            for sink in nest.sinks:
                self._store(state, self.inside[sink])
            inner += ["{", *("  " + line for line in state.lines), "}"]
        return _spread((*outer, half if nest.pairing else width), inner)

    def _store(self, nest: _Nest, node: Node) -> None:
        offset = _offset(nest.index, self.shape_of(node))
        if op_def(node.op).kind is Kind.STORE:
            source = node.inputs[1]
            value = self._read(nest, source, 3, node)
            stored = storage(self.body.type_of(source).dtype).store.format(value)
            nest.lines.append(f"{self._at(f'o_{node.name}', offset)} = {stored};")
            return
        value = self._value(nest, node)
        if node.name in self.plan.arrays:
            nest.lines.append(f"{self._at(f'b_{node.name}', offset)} = {value};")
        if node.name in self.sinks:
            stored = storage(node.type.dtype).store.format(value)
            nest.lines.append(f"{self._at(f'o_{node.name}', offset)} = {stored};")

    def _value(self, nest: _Nest, node: Node) -> str:
        if node.name in nest.done:
            return nest.done[node.name]
        name = f"t_{node.name}"
        nest.lines.append(f"const float {name} = {self._expression(nest, node)};")
        nest.done[node.name] = name
        return name

    def _expression(self, nest: _Nest, node: Node) -> str:
        definition, index = op_def(node.op), nest.index
        if definition.kind is Kind.ELEMENTWISE:
            assert definition.scalar is not None
            names = {
                f"operand{i}": self._read(nest, value, node.type.rank, node)
                for i, value in enumerate(node.inputs)
            }
            return print_scalar(definition.scalar(node.attr, *map(Var, names)), names, "cpp")
        source = node.inputs[0]
        if node.op == "rotate_pairs":
            other, sign = nest.pair
            return f"{sign}{self._element(source, (*index[:-1], other), node.type.rank)}"
        if node.op == "slice_last":
            shifted = (*index[:-1], f"({index[-1]} + {node.attr['start']})")
            return self._element(source, shifted, node.type.rank)
        if node.op == "gather_rows":
            return self._element(source, index, node.type.rank, chosen=node.inputs[1])
        raise LowerError(f"{node.op} '{node.name}': has no AscendC row form")

    def _read(self, nest: _Nest, value: str, rank: int, user: Node) -> str:
        """Return an operand at the element computed: in this nest, or from the buffer."""
        node = self.inside.get(value)
        same = node is not None and self.shape_of(node) == self._walked(user)
        kept = value in self.plan.arrays and self.plan.stage[value] < nest.stage
        if node is not None and same and not kept and node.op not in VIEWS:
            return self._value(nest, node)
        return self._element(value, nest.index, rank)

    def _walked(self, user: Node) -> tuple[int, ...]:
        if op_def(user.op).kind is Kind.REDUCE:
            reads = self.body.type_of(user.inputs[0])
            return inner_shape(reads, reads.rank, self.rows)
        return self.shape_of(user)

    def _element(self, value: str, index: Sequence[str], rank: int, *, chosen: str = "") -> str:
        """Return the load of one element, broadcast by extents of 1."""
        type_ = self.body.type_of(value)
        root = value
        while root in self.inside and self.inside[root].op in VIEWS:
            root = self.inside[root].inputs[0]
        if value in self.inside:
            shape = self.shape_of(self.inside[value])
        elif chosen:
            shape = tuple(constant(d) for d in type_.shape[1:])
        else:
            shape = inner_shape(type_, rank, self.rows)
        offset = _offset(index[len(index) - len(shape) :] if shape else (), shape)
        if root in self.inside:
            return self._at(f"b_{root}", offset)
        if value in self.packed:
            raise LowerError(f"weight '{value}': is a matrix: want a plain operand")
        rowwise = value not in self.body.weight and has_rows(type_, rank, self.rows)
        region = self._operand(root, shape, rowwise=rowwise, chosen=chosen)
        return storage(type_.dtype).load.format(self._at(region, offset))

    def _operand(self, name: str, shape: tuple[int, ...], *, rowwise: bool, chosen: str) -> str:
        """Note that a tile needs this tensor; return the region it is brought to."""
        ctype = storage(self.body.type_of(name).dtype).ctype
        width = max(1, constant(product(shape))) * SIZES[ctype]
        how = "indexed" if chosen else "rows" if rowwise else "shared"
        region = f"g_{name}" if chosen else f"x_{name}"
        self._region(region, ctype, width, staged=how != "shared", shared=how == "shared")
        self.copies.setdefault((name, how), Copy(how, name, region, width, chosen))
        return region

    # --- reductions and whole rows --------------------------------------------------------------

    def _reduce(self, nest: Nest) -> list[str]:
        node = self.inside[nest.sinks[0]]
        *outer, width = nest.shape
        start, step = _REDUCE[node.op]
        index = tuple(f"i{axis}" for axis in range(len(outer)))
        state = _Nest((*index, "j"), nest.stage)
        rank = self.body.type_of(node.inputs[0]).rank
        value = self._read(state, node.inputs[0], rank, node)
        inner = [
            f"float sum = {start};",
            f"for (int32_t j = lane; j < {width}; j += {WARP}) {{",
            *("  " + line for line in [*state.lines, step.format("sum", value)]),
            "}",
            f"for (int32_t stride = {WARP // 2}; stride; stride /= 2) {{",
            "  const float other = asc_shfl_down(sum, stride);",
            "  " + step.format("sum", "other"),
            "}",
        ]
        offset = _offset(index, tuple(outer))
        kept = [f"{self._at(f'b_{node.name}', offset)} = sum;"]
        if node.name in self.sinks:
            kept.append(f"{self._at(f'o_{node.name}', offset)} = sum;")
        inner += ["if (lane == 0) {", *("  " + line for line in kept), "}"]
        return _spread(tuple(outer), inner, warps=True)

    def _call(self, node: Node) -> list[str]:
        if node.op == "embedding":
            return self._embedding(node)
        if node.op == "argmax":
            return self._argmax(node)
        raise LowerError(f"{node.op} '{node.name}': has no AscendC form: have embedding, argmax")

    def _embedding(self, node: Node) -> list[str]:
        """The row of the table that the id names; NaN for an id outside."""
        ids, table = node.inputs
        rows, width = (constant(d) for d in self.body.type_of(table).shape)
        self._region(f"g_{table}", "uint16_t", 2 * width, staged=True)
        copy = Copy("indexed", table, f"g_{table}", 2 * width, ids)
        self.copies.setdefault((table, "indexed"), copy)
        self._operand(ids, (), rowwise=True, chosen="")
        lines = [
            f"const int32_t id = {self._at(f'x_{ids}', '0')};",
            'float value = __builtin_nanf("");',
            f"if (id >= 0 && id < {rows}) value = tw_bf16_to_f32({self._at(f'g_{table}', 'j')});",
        ]
        if node.name in self.plan.arrays:
            lines.append(f"{self._at(f'b_{node.name}', 'j')} = value;")
        if node.name in self.sinks:
            stored = storage(node.type.dtype).store.format("value")
            lines.append(f"{self._at(f'o_{node.name}', 'j')} = {stored};")
        return _spread((width,), lines)

    def _argmax(self, node: Node) -> list[str]:
        """The first largest entry of one row by a warp; a row with NaN gives 0."""
        type_ = self.body.type_of(node.inputs[0])
        *outer, width = inner_shape(type_, type_.rank, self.rows)
        if any(e != 1 for e in outer):
            raise LowerError(f"argmax '{node.name}': got {outer} rows in a row, want one")
        index = ("0",) * len(outer)
        value = self._element(node.inputs[0], (*index, "j"), type_.rank)
        target = f"o_{node.name}" if node.name in self.sinks else f"b_{node.name}"
        better = "(other > best || (other == best && where < at))"
        inner = [
            "float best = -__builtin_inff();",
            "int32_t at = 2147483647, bad = 0;",
            f"for (int32_t j = lane; j < {width}; j += {WARP}) {{",
            f"  const float value = {value};",
            "  bad |= value != value;",
            "  if (value > best || at == 2147483647) { best = value; at = j; }",
            "}",
            f"for (int32_t stride = {WARP // 2}; stride; stride /= 2) {{",
            "  const float other = asc_shfl_down(best, stride);",
            "  const int32_t where = asc_shfl_down(at, stride);",
            "  bad |= asc_shfl_down(bad, stride);",
            f"  if {better} {{ best = other; at = where; }}",
            "}",
            f"if (lane == 0) {self._at(target, '0')} = bad ? 0 : at;",
        ]
        return _spread((), inner, warps=True)


def _spread(shape: tuple[int, ...], inner: list[str], *, warps: bool = False) -> list[str]:
    """Share the elements of all rows of the tile among threads, or among warps."""
    count = constant(product(shape)) if shape else 1
    first = f"threadIdx.x / {WARP}" if warps else "threadIdx.x"
    step = THREADS // WARP if warps else THREADS
    lines = [f"for (int32_t e = {first}; e < rows * {count}; e += {step}) {{"]
    lines.append(f"  const int32_t row = e{f' / {count}' if count != 1 else ''};")
    if warps:
        lines.append(f"  const int32_t lane = threadIdx.x % {WARP};")
    stride = 1
    names = [f"i{axis}" for axis in range(len(shape) if warps else len(shape) - 1)]
    names += [] if warps else ["j"]
    for name, extent in reversed(list(zip(names, shape, strict=False))):
        part = "e" if stride == 1 else f"e / {stride}"
        lines.append(f"  const int32_t {name} = {part} % {extent};")
        stride *= extent
    return [*lines, *("  " + line for line in inner), "}"]


def _offset(index: Sequence[str], shape: Sequence[int]) -> str:
    """Row-major offset; an axis of extent 1 is broadcast."""
    terms, stride = [], 1
    for name, extent in zip(reversed(index), reversed(shape), strict=True):
        if extent != 1:
            terms.append(name if stride == 1 else f"{name} * {stride}")
        stride *= extent
    return " + ".join(reversed(terms)) or "0"
