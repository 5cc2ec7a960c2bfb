"""Prints a row program as AscendC: transfers of a tile of rows, and one SIMT function over it.

Threads share the elements of a nest; a barrier ends each. A sum names its lanes: a warp takes one
row's, each lane adds in order, then a fixed tree of shuffles. Ops on whole rows are printed by
ascendc_calls.py. Values between nests stand in the unified buffer, bf16 and quantised ones as bf16,
which holds them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.ascendc_calls import call_lines
from tilewright.codegen.emit.ascendc_memory import Layout, Region, plan
from tilewright.codegen.emit.ascendc_text import BARRIER, WARP, block, spread
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.row_access import is_int, offset
from tilewright.codegen.emit.row_order import Nest
from tilewright.codegen.emit.row_plan import RowPlanner
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, product, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.scalar import Var
from tilewright.graph.types import BF16, BlockFormat, ElementType

_REDUCE = {
    "reduce_sum": ("0.0f", "{0} = {0} + {1};"),
    "reduce_max": ("-__builtin_inff()", "{0} = tw_max({0}, {1});"),
}
_CHEAP = ("add", "cast", "mul", "scale", "shift", "square", "sub")
SIZES = {"float": 4, "uint16_t": 2, "int32_t": 4, "uint8_t": 1}


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
    suffix: str = ""
    turned: dict[str, str] = field(default_factory=dict)  # of the pair's other element

    def other(self) -> _Nest:
        """The nest at the pair's other element."""
        index = (*self.index[:-1], self.pair[0])
        return _Nest(index, self.stage, lines=self.lines, done=self.turned, suffix="_other")


class AscendRows:
    """The row program of some nodes of a body. `sinks` maps nodes to the tensor they go to.

    `pointers` are tensors that threads read in global memory, `extents` run-time numbers they need.
    `far` operands are not brought, `again` values are not kept but computed where they are read:
    rows are so long that the buffer would not hold all.
    """

    def __init__(
        self,
        body: Graph,
        names: Sequence[str],
        rows: Dim,
        sinks: Mapping[str, str],
        lanes: int,
        *,
        far: frozenset[str] = frozenset(),
        again: frozenset[str] = frozenset(),
    ) -> None:
        if lanes != WARP:
            raise LowerError(f"row kernel '{body.name}': lanes: got {lanes}, want a warp of {WARP}")
        self.body, self.rows, self.sinks, self.far = body, rows, sinks, far
        self.inside = {n: body.node[n] for n in names}
        planner = RowPlanner(body, names, rows, frozenset(sinks), swaps_apart=False)
        self.plan, self.shape_of = planner.plan(), planner.shape
        self.windows = self._windows()
        self.again = self._computed_again() | again
        self.packed = matrix_weights(body)
        self.copies: dict[tuple[str, str], Copy] = {}
        self.regions: dict[str, Region] = {}
        self.pointers: dict[str, str] = {}
        self.extents: dict[str, None] = {}
        self.function = self._function()

    @cached_property
    def layout(self) -> Layout:
        return plan(list(self.regions.values()), name=self.body.name)

    # --- statements -----------------------------------------------------------------------------

    def _function(self) -> list[str]:
        for name in self.plan.arrays:
            node = self.inside[name]
            if name in self.sinks or name in self.windows | self.again:
                continue  # the result or the operand is read, or what is cheap is computed again
            self._held(f"b_{name}", self.held_dtype(node), self.size(node), staged=False)
        for name, node in self.inside.items():
            if op_def(node.op).kind is Kind.STORE:
                entry = self.body.type_of(node.inputs[1])
                if isinstance(self.body.type_of(node.inputs[0]).dtype, BlockFormat):
                    self._packed_row(node)
                else:
                    self._held(f"o_{name}", entry.dtype, self.size(node), staged=True)
            elif name in self.sinks:
                self._held(f"o_{name}", node.type.dtype, self.size(node), staged=True)
        lines: list[str] = []
        for nest in self.plan.nests:
            if self.windows | self.again >= set(nest.sinks):
                continue
            match nest.kind:
                case "reduce":
                    found = self._reduce(nest)
                case "call":
                    found = call_lines(self, self.inside[nest.sinks[0]])
                case _:
                    found = self._loop(nest)
            lines += [*block(found), BARRIER]
        return lines[:-1]

    def _windows(self) -> frozenset[str]:
        """Kept values that are parts of an operand's row: they are read there."""
        return frozenset(
            name
            for name in self.plan.arrays
            if self.inside[name].op == "slice_last"
            and len(self.shape_of(self.inside[name])) == 1
            and self.inside[name].inputs[0] not in self.inside
            and name not in self.sinks
        )

    def longest_kept(self) -> str | None:
        """The largest kept value that could be computed again where it is read."""
        kept = [
            self.inside[name]
            for name in self.plan.arrays
            if name not in self.windows | self.again and name not in self.sinks
        ]
        found = [
            (self.regions[f"b_{node.name}"].row_bytes, node.name)
            for node in kept
            if op_def(node.op).kind is Kind.ELEMENTWISE
            and all(self._walks(self.body.node[u], node.name) for u in self.body.users[node.name])
        ]
        return max(found)[1] if found else None

    def _computed_again(self) -> frozenset[str]:
        """Kept values that are cheap to compute where they are read: one step from operands, or
        what a rotation reads at both elements of a pair."""
        found = set()
        for node in (self.inside[name] for name in self.plan.arrays):
            users = [self.body.node[name] for name in self.body.users[node.name]]
            near = all(self._in_memory(i) for i in node.inputs)
            turned = any(u.op == "rotate_pairs" for u in users)
            cheap = node.op in _CHEAP and node.name not in self.sinks and (near or turned)
            if cheap and all(self._walks(u, node.name) for u in users):
                found.add(node.name)
        return frozenset(found)

    def _in_memory(self, value: str) -> bool:
        root = self.root(value)
        return root not in self.inside or root in self.windows

    def _walks(self, user: Node, value: str) -> bool:
        kinds = (Kind.ELEMENTWISE, Kind.REDUCE)
        walks = op_def(user.op).kind in kinds or user.op == "rotate_pairs"
        if user.name not in self.inside or not walks:
            return False
        return self._walked(user) == self.shape_of(self.inside[value])

    def held_dtype(self, node: Node) -> ElementType:
        """Return how a value is kept: what is only rounded to bf16 afterwards is rounded first."""
        users = [self.body.node[name] for name in self.body.users[node.name]]
        rounded = users and all(
            u.op == "cast" and u.type.dtype == BF16 and u.name in self.inside for u in users
        )
        return BF16 if rounded and node.name not in self.sinks else node.type.dtype

    def size(self, node: Node) -> int:
        return max(1, constant(product(self.shape_of(node))))

    def region(
        self, name: str, ctype: str, width: int, *, staged: bool, shared: bool = False
    ) -> str:
        """Note a part of the buffer with `width` bytes a row; return its name."""
        self.regions.setdefault(name, Region(name, ctype, width, staged, shared))
        return name

    def _held(self, name: str, dtype: ElementType, count: int, *, staged: bool) -> None:
        ctype = storage(dtype).ctype
        self.region(name, ctype, count * SIZES[ctype], staged=staged)

    def _packed_row(self, node: Node) -> None:
        state = self.body.type_of(node.inputs[0])
        assert isinstance(state.dtype, BlockFormat)
        row_bytes = state.dtype.row_bytes(constant(state.shape[-1]))
        self.region(f"o_{node.name}", "uint8_t", row_bytes, staged=True)

    def held(self, name: str, place: str) -> str:
        """Return an element of a node that later nests read."""
        return self.at(f"{'o' if name in self.sinks else 'b'}_{name}", place)

    def at(self, region: str, place: str) -> str:
        """Return an element of this row's part of a region."""
        found = self.regions[region]
        if found.shared:
            return f"{region}[{place}]"
        return f"{region}[row * {found.row_bytes // SIZES[found.ctype]} + {place}]"

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
            inner += block(state.lines)
        return spread((*outer, half if nest.pairing else width), inner)

    def _store(self, nest: _Nest, node: Node) -> None:
        place = offset(nest.index, self.shape_of(node))
        if op_def(node.op).kind is Kind.STORE:
            source = node.inputs[1]
            value = self._read(nest, source, 3, node)
            stored = storage(self.body.type_of(source).dtype).store.format(value)
            nest.lines.append(f"{self.at(f'o_{node.name}', place)} = {stored};")
            return
        nest.lines += self.stores(node, place, self._value(nest, node))

    def stores(self, node: Node, place: str, value: str) -> list[str]:
        """Return the statements that put an element of a node where it goes."""
        stored = storage(self.held_dtype(node)).store.format(value)
        kept = node.name in self.plan.arrays and node.name not in self.windows | self.again
        if kept or node.name in self.sinks:
            return [f"{self.held(node.name, place)} = {stored};"]
        return []

    def _value(self, nest: _Nest, node: Node) -> str:
        if node.name in nest.done:
            return nest.done[node.name]
        name, ctype = f"t_{node.name}{nest.suffix}", "int32_t" if is_int(node.type) else "float"
        nest.lines.append(f"const {ctype} {name} = {self._expression(nest, node)};")
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
        source, rank, as_int = node.inputs[0], node.type.rank, is_int(node.type)
        if node.op == "rotate_pairs":
            other, sign = nest.pair
            if source in self.again:
                return f"{sign}{self._value(nest.other(), self.inside[source])}"
            return f"{sign}{self.element(source, (*index[:-1], other), rank)}"
        if node.op == "slice_last":
            shifted = (*index[:-1], f"({index[-1]} + {node.attr['start']})")
            return self.element(source, shifted, rank, as_int=as_int)
        if node.op == "gather_rows":
            return self.element(source, index, rank, chosen=node.inputs[1], as_int=as_int)
        raise LowerError(f"{node.op} '{node.name}': has no AscendC row form")

    def _read(self, nest: _Nest, value: str, rank: int, user: Node) -> str:
        """Return an operand at the element computed: in this nest, or from the buffer."""
        node = self.inside.get(value)
        same = node is not None and self.shape_of(node) == self._walked(user)
        early = value in self.plan.arrays and self.plan.stage[value] < nest.stage
        kept = early and value not in self.again
        if node is not None and same and not kept and node.op not in VIEWS:
            text = self._value(nest, node)
            return f"((float){text})" if is_int(node.type) else text
        return self.element(value, nest.index, rank)

    def _walked(self, user: Node) -> tuple[int, ...]:
        if op_def(user.op).kind is Kind.REDUCE:
            reads = self.body.type_of(user.inputs[0])
            return inner_shape(reads, reads.rank, self.rows)
        return self.shape_of(user)

    # --- operands -------------------------------------------------------------------------------

    def root(self, value: str) -> str:
        """Return the value whose elements a view's are."""
        while value in self.inside and self.inside[value].op in VIEWS:
            value = self.inside[value].inputs[0]
        return value

    def element(
        self, value: str, index: Sequence[str], rank: int, *, chosen: str = "", as_int: bool = False
    ) -> str:
        """Return the load of one element, broadcast by extents of 1."""
        type_, root = self.body.type_of(value), self.root(value)
        if value in self.inside:
            shape = self.shape_of(self.inside[value])
        elif chosen:
            shape = tuple(constant(d) for d in type_.shape[1:])
        else:
            shape = inner_shape(type_, rank, self.rows)
        place, dtype = offset(index[len(index) - len(shape) :] if shape else (), shape), type_.dtype
        if root in self.windows:
            window = self.inside[root]
            moved = f"({place} + {window.attr['start']})"
            return self.element(window.inputs[0], (moved,), window.type.rank, as_int=as_int)
        if root in self.inside:
            loaded, dtype = self.held(root, place), self.held_dtype(self.inside[root])
        else:
            if value in self.packed:
                raise LowerError(f"weight '{value}': is a matrix: want a plain operand")
            rowwise = value not in self.body.weight and has_rows(type_, rank, self.rows)
            if root in self.far and not chosen:
                pointer = self.whole(root, storage(dtype).ctype)
                count = max(1, constant(product(shape)))
                start = f"(int64_t)(first_row + row) * {count} + " if rowwise else ""
                loaded = f"{pointer}[{start}{place}]"
            else:
                region = self.operand(root, shape, rowwise=rowwise, chosen=chosen)
                loaded = self.at(region, place)
        return loaded if as_int else storage(dtype).load.format(loaded)

    def operand(self, name: str, shape: tuple[int, ...], *, rowwise: bool, chosen: str = "") -> str:
        """Note that a tile needs this tensor; return the region it is brought to."""
        if chosen and chosen in self.inside:
            raise LowerError(f"gather_rows '{name}': rows are computed here, want an operand")
        ctype = storage(self.body.type_of(name).dtype).ctype
        width = max(1, constant(product(shape))) * SIZES[ctype]
        how = "indexed" if chosen else "rows" if rowwise else "shared"
        region = f"g_{name}" if chosen else f"x_{name}"
        self.region(region, ctype, width, staged=how != "shared", shared=how == "shared")
        self.copies.setdefault((name, how), Copy(how, name, region, width, chosen))
        return region

    def whole(self, name: str, ctype: str) -> str:
        """Return the pointer to a tensor in global memory: a state, page tables, a table."""
        self.pointers[name] = ctype
        return name

    def extent(self, name: str, axis: int) -> str:
        """Return an extent that may be known only at run time."""
        tree = to_json(self.body.type_of(name).shape[axis])
        if isinstance(tree, list):
            raise LowerError(f"operand '{name}': extent {tree} has no AscendC form")
        if isinstance(tree, str):
            self.extents[tree] = None
        return str(tree)

    # --- reductions -----------------------------------------------------------------------------

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
        kept = self.stores(node, offset(index, tuple(outer)), "sum")
        inner += ["if (lane == 0) {", *("  " + line for line in kept), "}"]
        return spread(tuple(outer), inner, warps=True)
