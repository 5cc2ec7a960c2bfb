"""Where the values of a row program lie, and how C++ text reads them: arrays of one row, rows of
output tensors, operands in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.row_plan import RowPlan, row_shape
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, product
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import ROUNDING_OPS
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.types import DType, TensorType

PLAIN = ("f32", "i32")  # what arrays of a row hold, and memory that can stand for one


@dataclass(frozen=True)
class Sink:
    """Where a node's row goes: an output tensor, or a float array named `target`."""

    kind: str  # output | array
    target: str


@dataclass(frozen=True)
class RowAccess:
    """The values of one row program: `inside` are its nodes, `sinks` those that leave it."""

    body: Graph
    rows: Dim
    plan: RowPlan
    inside: Mapping[str, Node]
    sinks: Mapping[str, Sink]

    def shape(self, node: Node) -> tuple[int, ...]:
        """Inner shape a node is computed over; a store walks its entries."""
        return row_shape(self.body, node, self.rows)

    def size(self, node: Node) -> int:
        return max(1, constant(product(self.shape(node))))

    def element_type(self, value: str) -> str:
        """C++ type of a value's elements in an array."""
        return "int32_t" if is_int(self.body.type_of(value)) else "float"

    def root(self, value: str) -> str:
        """Return the value whose elements a view's are."""
        while value in self.inside and self.inside[value].op in VIEWS:
            value = self.inside[value].inputs[0]
        return value

    def memory(self, name: str) -> str | None:
        """Return the place of a node's row that takes its array's place, if there is one."""
        sink = self.sinks.get(name)
        if sink is None:
            return None
        if sink.kind == "array":
            return sink.target
        node = self.inside[name]
        plain = isinstance(node.type.dtype, DType) and node.type.dtype.name in PLAIN
        return f"args.{sink.target} + row * {self.size(node)}" if plain else None

    def declaration(self, name: str) -> tuple[str, int]:
        """Declare the array of a node; return the line, and the bytes of stack it takes."""
        ctype, memory = self.element_type(name), self.memory(name)
        size = self.size(self.inside[name])
        if name in self.plan.local:
            size = self.shape(self.inside[name])[-1]
        if memory is not None:
            return f"{ctype}* const {array_name(name)} = {memory};", 0
        return f"alignas(64) {ctype} {array_name(name)}[{size}];", 4 * size

    def place(self, name: str, index: Sequence[str], shape: Sequence[int]) -> str:
        """Return the offset of an element in a node's array: that of its line, if there is one."""
        if name in self.plan.local:
            index, shape = index[-1:], shape[-1:]
        return offset(index, shape)

    def store(self, node: Node, index: Sequence[str], value: str) -> list[str]:
        """Return the statements that put an element of a node where it goes."""
        lines, shape = [], self.shape(node)
        held = node.name in self.plan.arrays
        if held:
            place = self.place(node.name, index, shape)
            lines.append(f"{array_name(node.name)}[{place}] = {value};")
        sink = self.sinks.get(node.name)
        if sink is None or held and self.memory(node.name) is not None:
            return lines
        at = offset(index, shape)
        if sink.kind == "array":
            return [*lines, f"{sink.target}[{at}] = {value};"]
        stored = stored_text(node, value)
        return [*lines, f"args.{sink.target}[row * {self.size(node)} + {at}] = {stored};"]

    def element(
        self, value: str, index: Sequence[str], rank: int, *, row: str = "row", as_int: bool = False
    ) -> str:
        """Return the load of one element, broadcast by extents of 1."""
        type_ = self.body.type_of(value)
        if value in self.inside:
            shape = self.shape(self.inside[value])
        elif row != "row":  # a row chosen by an index: the operand has another number of rows
            shape = tuple(constant(d) for d in type_.shape[1:])
        else:
            shape = inner_shape(type_, rank, self.rows)
        used = index[len(index) - len(shape) :] if shape else ()
        place, root = offset(used, shape), self.root(value)
        if root in self.inside:
            loaded = f"{array_name(root)}[{self.place(root, used, shape)}]"
            return f"((float){loaded})" if is_int(type_) and not as_int else loaded
        if value in matrix_weights(self.body):
            raise LowerError(f"weight '{value}': is packed in panels: want a plain operand")
        start = ""
        if row != "row" or self.rowwise(type_, rank):
            start = f"{row} * {constant(product(shape))} + "
        loaded = f"args.{root}[{start}{place}]"
        return loaded if as_int else storage(type_.dtype).load.format(loaded)

    def rowwise(self, type_: TensorType, rank: int) -> bool:
        """Say whether an operand in memory has one entry per row; a weight has where a kernel
        computes from weights alone."""
        return has_rows(type_, rank, self.rows)


def is_int(type_: TensorType) -> bool:
    return isinstance(type_.dtype, DType) and type_.dtype.kind == "int"


def stored_text(node: Node, value: str) -> str:
    """Return an element of a node as it lies in memory; what was rounded to bf16 is only cut."""
    if is_int(node.type):
        return value
    form = storage(node.type.dtype)
    if node.op in ROUNDING_OPS and form.code == "kDLBfloat":
        return f"(uint16_t)((uint32_t)tw_bits({value}) >> 16)"
    return form.store.format(value)


def array_name(name: str) -> str:
    return f"b_{name}"


def offset(index: Sequence[str], shape: Sequence[int]) -> str:
    """Row-major offset; an axis of extent 1 is broadcast."""
    terms, stride = [], 1
    for name, extent in zip(reversed(index), reversed(shape), strict=True):
        if extent != 1:
            terms.append(name if stride == 1 else f"{name} * {stride}")
        stride *= extent
    return " + ".join(reversed(terms)) or "0"


def looped(inner: list[str], outer: Sequence[int]) -> list[str]:
    """Return the statements inside of loops over `outer`, by i0, i1, ..."""
    for axis in reversed(range(len(outer))):
        header = f"for (int64_t i{axis} = 0; i{axis} < {outer[axis]}; ++i{axis}) {{"
        inner = [header, *("  " + line for line in inner), "}"]
    return inner
