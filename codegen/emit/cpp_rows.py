"""Prints a row program as C++: loop nests over the inner shape of one row, in the planned order.

Loops are plain scalar code that compilers vectorise; without associative-math flags that cannot
change bits. Reductions name their lanes and their tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.cpp_types import panel_format, storage
from tilewright.codegen.emit.row_plan import Nest, RowPlanner
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, product
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.scalar import Var
from tilewright.graph.types import DType, TensorType

MAX_ROW_BYTES = 4 << 20  # arrays of one row stand on a worker's stack


@dataclass(frozen=True)
class Sink:
    """Where a node's row goes: an output tensor, or a float array named `target`."""

    kind: str  # output | array
    target: str


@dataclass
class _Nest:
    """Statements of the nest being printed, and the values it has computed so far."""

    index: tuple[str, ...]
    stage: int
    pair: tuple[str, str] = ("", "")
    lines: list[str] = field(default_factory=list)
    done: dict[str, str] = field(default_factory=dict)


class RowPrinter:
    """Prints the program that computes some nodes of a body for row `row`."""

    def __init__(
        self, body: Graph, names: Sequence[str], rows: Dim, sinks: Mapping[str, Sink], lanes: int
    ) -> None:
        self.body, self.rows, self.sinks, self.lanes = body, rows, sinks, lanes
        self.inside = {n: body.node[n] for n in names}
        planner = RowPlanner(body, names, rows, frozenset(sinks))
        self.plan, self.shape_of = planner.plan(), planner.shape
        self.packed = matrix_weights(body)

    def text(self) -> str:
        """Return the statements of the program, indented by two spaces."""
        lines = self._declarations()
        for nest in self.plan.nests:
            lines += self._nest(nest)
        return "\n".join("  " + line for line in lines)

    def _declarations(self) -> list[str]:
        lines, total = [], 0
        for name in self.plan.arrays:
            length = max(1, constant(product(self.shape_of(self.inside[name]))))
            total += 4 * length
            ctype = "int32_t" if self.inside[name].type.dtype.name == "i32" else "float"
            lines.append(f"alignas(64) {ctype} {_array(name)}[{length}];")
        if total > MAX_ROW_BYTES:
            raise LowerError(
                f"row kernel '{self.body.name}': arrays of one row are too large: "
                f"got {total} bytes, want at most {MAX_ROW_BYTES}"
            )
        return lines

    def _nest(self, nest: Nest) -> list[str]:
        match nest.kind:
            case "reduce":
                return self._reduce(nest)
            case "call":
                return self._call(self.inside[nest.sinks[0]])
            case _:
                return self._loop(nest)

    def _loop(self, nest: Nest) -> list[str]:
        """One pass over the elements; rotated pairs are walked together."""
        *outer, width = nest.shape or (1,)
        index = tuple(f"i{axis}" for axis in range(len(outer)))
        half = width // 2
        if nest.pairing == "half":
            passes = [[("j", f"(j + {half})", "-")], [(f"(j + {half})", "j", "")]]
        elif nest.pairing == "interleaved":
            passes = [[("(2 * j)", "(2 * j + 1)", "-"), ("(2 * j + 1)", "(2 * j)", "")]]
        else:
            passes = [[("j", "", "")]]
        count = half if nest.pairing else width
        inner: list[str] = []
        for elements in passes:
            body: list[str] = []
            for last, other, sign in elements:
                state = _Nest((*index, last) if nest.shape else (), nest.stage, (other, sign))
                for sink in nest.sinks:
                    self._store(state, self.inside[sink])
                body += ["{", *("  " + line for line in state.lines), "}"]
            inner += [f"for (int64_t j = 0; j < {count}; ++j) {{", *("  " + s for s in body), "}"]
        return _looped(inner, outer)

    def _store(self, nest: _Nest, node: Node) -> None:
        """Put one element where it goes."""
        if op_def(node.op).kind is Kind.STORE:
            nest.lines.append(self._append(nest, node))
            return
        value, offset = self._value(nest, node), _offset(nest.index, self.shape_of(node))
        if node.name in self.plan.arrays:
            nest.lines.append(f"{_array(node.name)}[{offset}] = {value};")
        sink = self.sinks.get(node.name)
        if sink is None:
            return
        if sink.kind == "array":
            nest.lines.append(f"{sink.target}[{offset}] = {value};")
        else:
            width = constant(product(self.shape_of(node)))
            stored = storage(node.type.dtype).store.format(value)
            nest.lines.append(f"args.{sink.target}[row * {width} + {offset}] = {stored};")

    def _append(self, nest: _Nest, node: Node) -> str:
        """Store an entry in its cache slot: [blocks, heads, block_size, width]."""
        cache, x, slots = node.inputs
        _, heads, block_size, width = self.body.type_of(cache).shape
        value = storage(self.body.type_of(x).dtype).store.format(self._read(nest, x, 3, node))
        head, last = nest.index
        slot = f"args.{slots}[row]"
        block = f"((int64_t)({slot} / {block_size}) * {heads} + {head}) * {block_size}"
        return f"args.{cache}[({block} + {slot} % {block_size}) * {width} + {last}] = {value};"

    def _value(self, nest: _Nest, node: Node) -> str:
        """Return the variable of a node's element, computing it first if this nest has not."""
        if node.name in nest.done:
            return nest.done[node.name]
        name = f"t_{node.name}"
        nest.lines.append(f"const float {name} = {self._expression(nest, node)};")
        nest.done[node.name] = name
        return name

    def _expression(self, nest: _Nest, node: Node) -> str:
        definition = op_def(node.op)
        if definition.kind is Kind.ELEMENTWISE:
            assert definition.scalar is not None
            operands = [f"operand{i}" for i in range(len(node.inputs))]
            names = {
                o: self._read(nest, value, node.type.rank, node)
                for o, value in zip(operands, node.inputs, strict=True)
            }
            return print_scalar(definition.scalar(node.attr, *map(Var, operands)), names, "cpp")
        (source, *_) = node.inputs
        index = nest.index
        if node.op == "rotate_pairs":
            other, sign = nest.pair
            return f"{sign}{self._element(source, (*index[:-1], other), node.type.rank)}"
        if node.op == "slice_last":
            shifted = (*index[:-1], f"({index[-1]} + {node.attr['start']})")
            return self._element(source, shifted, node.type.rank)
        if node.op == "gather_rows":
            return self._element(source, index, node.type.rank, row=f"args.{node.inputs[1]}[row]")
        raise LowerError(f"{node.op} '{node.name}': has no C++ row form")

    def _read(self, nest: _Nest, value: str, rank: int, user: Node) -> str:
        """Return an operand at the element computed: in this nest, or from memory."""
        node = self.inside.get(value)
        same = node is not None and self.shape_of(node) == _walked(self, user)
        # An array is complete only in a later stage: within a stage, nests stand in any order.
        kept = value in self.plan.arrays and self.plan.stage[value] < nest.stage
        if node is not None and same and not kept and node.op not in VIEWS:
            return self._value(nest, node)
        return self._element(value, nest.index, rank)

    def _element(self, value: str, index: Sequence[str], rank: int, row: str = "row") -> str:
        """Return the load of one element, broadcast by extents of 1."""
        type_ = self.body.type_of(value)
        if value in self.inside:
            shape = self.shape_of(self.inside[value])
        elif row != "row":  # a row chosen by an index: the operand has another number of rows
            shape = tuple(constant(d) for d in type_.shape[1:])
        else:
            shape = inner_shape(type_, rank, self.rows)
        used = index[len(index) - len(shape) :] if shape else ()
        offset = _offset(used, shape)
        root = self._root(value)
        if root in self.inside:
            return f"{_array(root)}[{offset}]"
        if value in self.packed:
            raise LowerError(f"weight '{value}': is packed in panels: want a plain operand")
        base = (
            f"{row} * {constant(product(shape))} + "
            if self._rowwise(value, type_, rank, row)
            else ""
        )
        return storage(type_.dtype).load.format(f"args.{root}[{base}{offset}]")

    def _rowwise(self, value: str, type_: TensorType, rank: int, row: str) -> bool:
        if row != "row":
            return True
        return value not in self.body.weight and has_rows(type_, rank, self.rows)

    def _root(self, value: str) -> str:
        while value in self.inside and self.inside[value].op in VIEWS:
            value = self.inside[value].inputs[0]
        return value

    def _reduce(self, nest: Nest) -> list[str]:
        """Fixed lanes, each summed in order, then a fixed tree (masked tail)."""
        node = self.inside[nest.sinks[0]]
        *outer, width = nest.shape
        lanes = self.lanes
        start, step = _REDUCE[node.op]
        state = _Nest((*(f"i{axis}" for axis in range(len(outer))), "(j + l)"), nest.stage)
        value = self._read(state, node.inputs[0], self.body.type_of(node.inputs[0]).rank, node)
        body = [*state.lines, step.format("lane[l]", value)]
        full, tail = width // lanes * lanes, width % lanes
        lines = [f"float lane[{lanes}];", f"for (int l = 0; l < {lanes}; ++l) lane[l] = {start};"]
        if full:
            lines += [
                f"for (int64_t j = 0; j < {full}; j += {lanes})",
                f"  for (int l = 0; l < {lanes}; ++l) {{",
                *("    " + b for b in body),
                "  }",
            ]
        if tail:
            lines += [
                "{",
                f"  const int64_t j = {full};",
                f"  for (int l = 0; l < {tail}; ++l) {{",
                *("    " + b for b in body),
                "  }",
                "}",
            ]
        stride = lanes // 2
        while stride:
            lines.append(
                f"for (int l = 0; l < {stride}; ++l) "
                + step.format("lane[l]", f"lane[l + {stride}]")
            )
            stride //= 2
        offset = _offset(tuple(f"i{axis}" for axis in range(len(outer))), tuple(outer))
        lines.append(f"{_array(node.name)}[{offset}] = lane[0];")
        sink = self.sinks.get(node.name)
        if sink is not None and sink.kind == "array":
            lines.append(f"{sink.target}[{offset}] = lane[0];")
        elif sink is not None:
            count = constant(product(tuple(outer)))
            lines.append(f"args.{sink.target}[row * {count} + {offset}] = lane[0];")
        return _looped(["{", *("  " + line for line in lines), "}"], outer)

    def _call(self, node: Node) -> list[str]:
        """Ops that work on a whole row at once: table rows, argmax, top-k."""
        if node.op == "embedding":
            return self._embedding(node)
        *outer, width = self._row_of(node.inputs[0])
        index = tuple(f"i{axis}" for axis in range(len(outer)))
        source = self._pointer(node.inputs[0], index, (*outer, width))
        if node.op == "argmax":
            target, count = self._result(node), 1
            offset = _offset(index, tuple(outer))
            lines = [f"{target}[{offset}] = tw_argmax_row({source}, {width});"]
        else:
            count = int(str(node.attr["k"]))
            at = f"({_offset(index, tuple(outer))}) * {count}"
            target = f"{self._result(node)} + {at}"
            scratch = [
                f"const int64_t bytes = tw_top_k_bytes({count});",
                "alignas(64) uint8_t scratch[bytes > 0 ? bytes : 1];",
            ]
            if node.op == "top_k_indices":
                call = f"{source}, {width}, {count}, {target}, nullptr, scratch"
            else:
                scratch.insert(0, f"int32_t indices[{count}];")
                call = f"{source}, {width}, {count}, indices, {target}, scratch"
            lines = [*scratch, f"tw_top_k_row({call});"]
        body = _looped(["{", *("  " + line for line in lines), "}"], outer)
        return body + self._copied(node) if node.name in self.plan.arrays else body

    def _row_of(self, value: str) -> tuple[int, ...]:
        type_ = self.body.type_of(value)
        return inner_shape(type_, type_.rank, self.rows)

    def _pointer(self, value: str, index: tuple[str, ...], shape: tuple[int, ...]) -> str:
        """Return a float pointer to the last axis of an operand at `index`."""
        root = self._root(value)
        start = f"({_offset(index, shape[:-1])}) * {shape[-1]}"
        if root in self.inside:
            return f"{_array(root)} + {start}"
        if self.body.type_of(root).dtype.name != "f32":
            raise LowerError(
                f"select '{value}': got {self.body.type_of(root).dtype}, want f32 rows"
            )
        return f"args.{root} + row * {constant(product(shape))} + {start}"

    def _result(self, node: Node) -> str:
        """Return the pointer a whole-row op writes to."""
        if node.name in self.plan.arrays:
            return _array(node.name)
        return (
            f"(args.{self.sinks[node.name].target} + row * "
            f"{constant(product(self.shape_of(node)))})"
        )

    def _embedding(self, node: Node) -> list[str]:
        ids, table = node.inputs
        type_ = self.body.type_of(table)
        rows, width = (constant(d) for d in type_.shape)
        array = _array(node.name)
        lines = [
            f"const int64_t id = args.{ids}[row];",
            f"if (id < 0 || id >= {rows}) for (int64_t j = 0; j < {width}; ++j) "
            f'{array}[j] = __builtin_nanf("");',
            f"else tw_row_{panel_format(type_.dtype)}(args.{table}, id, {width}, {array});",
        ]
        return ["{", *("  " + line for line in [*lines, *self._copied(node)]), "}"]

    def _copied(self, node: Node) -> list[str]:
        """Copy a node's array to where else the node goes."""
        sink = self.sinks.get(node.name)
        if sink is None:
            return []
        width = constant(product(self.shape_of(node)))
        target = sink.target if sink.kind == "array" else f"args.{sink.target}"
        at = "j" if sink.kind == "array" else f"row * {width} + j"
        return [f"for (int64_t j = 0; j < {width}; ++j) {target}[{at}] = {_array(node.name)}[j];"]


_REDUCE = {
    "reduce_sum": ("0.0f", "{0} = {0} + {1};"),
    "reduce_max": ("-__builtin_inff()", "{0} = tw_max({0}, {1});"),
}


def _walked(printer: RowPrinter, user: Node) -> tuple[int, ...]:
    """Inner shape a user walks when it reads operands element by element."""
    if op_def(user.op).kind is Kind.REDUCE:
        reads = printer.body.type_of(user.inputs[0])
        return inner_shape(reads, reads.rank, printer.rows)
    return printer.shape_of(user)


def _array(name: str) -> str:
    return f"b_{name}"


def _looped(inner: list[str], outer: Sequence[int]) -> list[str]:
    for axis in reversed(range(len(outer))):
        header = f"for (int64_t i{axis} = 0; i{axis} < {outer[axis]}; ++i{axis}) {{"
        inner = [header, *("  " + line for line in inner), "}"]
    return inner


def _offset(index: Sequence[str], shape: Sequence[int]) -> str:
    """Row-major offset; an axis of extent 1 is broadcast."""
    terms, stride = [], 1
    for name, extent in zip(reversed(index), reversed(shape), strict=True):
        if extent != 1:
            terms.append(name if stride == 1 else f"{name} * {stride}")
        stride *= extent
    return " + ".join(reversed(terms)) or "0"


__all__ = ["RowPrinter", "Sink", "DType"]
