"""Prints a row program as C++: loop nests over the inner shape of one row, in the planned order.

Loops are plain scalar code that compilers vectorise; without associative-math flags that cannot
change bits. Reductions name their lanes and their tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.row_access import (
    RowAccess,
    Sink,
    array_name,
    is_int,
    looped,
)
from tilewright.codegen.emit.row_calls import call_lines
from tilewright.codegen.emit.row_order import Nest, Run
from tilewright.codegen.emit.row_plan import RowPlanner
from tilewright.codegen.emit.shapes import inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.scalar import Var

MAX_ROW_BYTES = 4 << 20  # arrays of one row stand on a worker's stack


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
        self.body, self.lanes = body, lanes
        self.inside = {n: body.node[n] for n in names}
        self.plan = RowPlanner(body, names, rows, frozenset(sinks)).plan()
        self.access = RowAccess(body, rows, self.plan, self.inside, sinks)

    def text(self) -> str:
        """Return the statements of the program, indented by two spaces."""
        sizes = {n: self.access.declaration(n) for n in self.plan.arrays}
        total = sum(size for _, size in sizes.values())
        if total > MAX_ROW_BYTES:
            raise LowerError(
                f"row kernel '{self.body.name}': arrays of one row are too large: "
                f"got {total} bytes, want at most {MAX_ROW_BYTES}"
            )
        lines = [line for name, (line, _) in sizes.items() if name not in self.plan.local]
        for run in self.plan.runs:
            lines += self._run(run, [sizes[name][0] for name in run.local])
        return "\n".join("  " + line for line in lines)

    def _run(self, run: Run, lines: list[str]) -> list[str]:
        """Nests inside of their outer loops; skipped in rows that store nothing of them."""
        for nest in run.nests:
            lines = lines + self._nest(nest)
        lines = looped(lines, run.outer)
        if run.guard is None:
            return lines
        slots = [
            f"{array_name(s)}[0]" if s in self.inside else f"args.{s}[row]"
            for s in sorted(run.guard)
        ]
        condition = " || ".join(f"{slot} >= 0" for slot in slots)
        return [f"if ({condition}) {{", *("  " + line for line in lines), "}"]

    def _nest(self, nest: Nest) -> list[str]:
        match nest.kind:
            case "reduce":
                return self._reduce(nest)
            case "call":
                return call_lines(self.access, self.inside[nest.sinks[0]])
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
        return inner

    def _store(self, nest: _Nest, node: Node) -> None:
        """Put one element where it goes."""
        if op_def(node.op).kind is Kind.STORE:
            nest.lines.append(self._append(nest, node))
            return
        nest.lines += self.access.store(node, nest.index, self._value(nest, node))

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
        name, ctype = f"t_{node.name}", self.access.element_type(node.name)
        nest.lines.append(f"const {ctype} {name} = {self._expression(nest, node)};")
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
        index, rank, as_int = nest.index, node.type.rank, is_int(node.type)
        if node.op == "rotate_pairs":
            other, sign = nest.pair
            return f"{sign}{self.access.element(source, (*index[:-1], other), rank)}"
        if node.op == "slice_last":
            shifted = (*index[:-1], f"({index[-1]} + {node.attr['start']})")
            return self.access.element(source, shifted, rank, as_int=as_int)
        if node.op == "gather_rows":
            chosen = self._chosen_row(node.inputs[1])
            return self.access.element(source, index, rank, row=chosen, as_int=as_int)
        raise LowerError(f"{node.op} '{node.name}': has no C++ row form")

    def _chosen_row(self, rows: str) -> str:
        root = self.access.root(rows)
        return f"{array_name(root)}[0]" if root in self.inside else f"args.{rows}[row]"

    def _read(self, nest: _Nest, value: str, rank: int, user: Node) -> str:
        """Return an operand at the element computed: in this nest, or from memory."""
        node = self.inside.get(value)
        same = node is not None and self.access.shape(node) == self._walked(user)
        # An array is complete only in a later stage: within a stage, nests stand in any order.
        kept = value in self.plan.arrays and self.plan.stage[value] < nest.stage
        if node is not None and same and not kept and node.op not in VIEWS:
            text = self._value(nest, node)
            return f"((float){text})" if is_int(node.type) else text
        return self.access.element(value, nest.index, rank)

    def _walked(self, user: Node) -> tuple[int, ...]:
        """Inner shape a user walks when it reads operands element by element."""
        if op_def(user.op).kind is Kind.REDUCE:
            reads = self.body.type_of(user.inputs[0])
            return inner_shape(reads, reads.rank, self.access.rows)
        return self.access.shape(user)

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
        index = [f"i{axis}" for axis in range(len(outer))]
        lines += self.access.store(node, [*index, "0"], "lane[0]")
        return ["{", *("  " + line for line in lines), "}"]


_REDUCE = {
    "reduce_sum": ("0.0f", "{0} = {0} + {1};"),
    "reduce_max": ("-__builtin_inff()", "{0} = tw_max({0}, {1});"),
}

__all__ = ["RowPrinter", "Sink"]
