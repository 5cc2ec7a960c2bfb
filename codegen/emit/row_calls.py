"""Ops that work on a whole row at once: one table row an op, which prints the call of one C++
function over arrays with constant sizes. The functions lie in templates/cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.codegen.emit.cpp_types import panel_format, storage
from tilewright.codegen.emit.row_access import (
    PLAIN,
    RowAccess,
    array_name,
    is_int,
    offset,
    stored_text,
)
from tilewright.codegen.emit.row_plan import works_on_lines
from tilewright.codegen.emit.shapes import constant, inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.graph import Graph, Node
from tilewright.graph.dims import product, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.scalar import Const
from tilewright.graph.types import BlockFormat, DType, TensorType


@dataclass
class RowCall:
    """What a call is printed from: pointers to the rows of its operands and to its result.

    `lines` are statements before the call: rows in memory of another type are widened there.
    """

    access: RowAccess
    node: Node
    lines: list[str] = field(default_factory=list)

    def type_of(self, i: int) -> TensorType:
        return self.access.body.type_of(self.node.inputs[i])

    def shape(self, i: int) -> tuple[int, ...]:
        """Shape of an operand within one row."""
        type_ = self.type_of(i)
        return inner_shape(type_, type_.rank, self.access.rows)

    def size(self, i: int) -> int:
        return constant(product(self.shape(i)))

    def row(self, i: int) -> str:
        """Return a pointer to one row of an operand: float, or int32_t where it is an int."""
        return self._floats(i, self._row(i), self.size(i))

    def line(self, i: int) -> str:
        """Return a pointer to the last axis of an operand, at the outer index at hand."""
        root, (*outer, width) = self.access.root(self.node.inputs[i]), self.shape(i)
        if root in self.access.plan.local:
            return array_name(root)
        return self._floats(i, _line(self._row(i), outer, width), width)

    def _row(self, i: int) -> str:
        """Return a pointer to one row of an operand as it lies in memory."""
        value, access = self.node.inputs[i], self.access
        type_, root = self.type_of(i), access.root(value)
        if root in access.inside:
            return array_name(root)
        rowwise = access.rowwise(type_, type_.rank)
        return f"args.{root} + row * {self.size(i)}" if rowwise else f"args.{root}"

    def _floats(self, i: int, pointer: str, count: int) -> str:
        """Return the pointer, or one to the same elements widened to fp32."""
        dtype = self.type_of(i).dtype
        inside = self.access.root(self.node.inputs[i]) in self.access.inside
        if inside or isinstance(dtype, DType) and dtype.name in PLAIN:
            return f"({pointer})"
        loaded = storage(dtype).load.format(f"({pointer})[j]")
        self.lines += [
            f"alignas(64) float l{i}[{count}];",
            f"for (int64_t j = 0; j < {count}; ++j) l{i}[j] = {loaded};",
        ]
        return f"l{i}"

    def result_line(self, width: int) -> str:
        """Return a pointer to where the last axis of the result goes, at the outer index."""
        if self.node.name in self.access.plan.local:
            return self.result
        return _line(self.result, self.shape(0)[:-1], width)

    def whole(self, i: int) -> str:
        """Return a pointer to all of an operand: a state, or page tables."""
        return f"args.{self.access.root(self.node.inputs[i])}"

    def extent(self, i: int, axis: int) -> str:
        """Return an extent of an operand that may be known only at run time."""
        tree = to_json(self.type_of(i).shape[axis])
        if isinstance(tree, list):
            raise LowerError(f"{self.node.op} '{self.node.name}': extent {tree} has no C++ form")
        return f"args.{tree}" if isinstance(tree, str) else str(tree)

    def ring(self, tables: int, rows: int) -> str:
        """Return the page table of this row's request."""
        at = f"{self.whole(tables)}, {self.extent(tables, 1)}"
        return f"tw_ring_of({at}, {self.row(rows)}[0])"

    def attr(self, name: str) -> int:
        return int(str(self.node.attr[name]))

    @property
    def result(self) -> str:
        """Pointer the row of the result is written to."""
        name = self.node.name
        if name in self.access.plan.arrays:
            return array_name(name)
        memory = self.access.memory(name)
        assert memory is not None, name
        return f"({memory})"


def _line(pointer: str, outer: Sequence[int], width: int) -> str:
    at = offset([f"i{axis}" for axis in range(len(outer))], outer)
    return pointer if at == "0" else f"{pointer} + ({at}) * {width}"


@dataclass(frozen=True)
class Routine:
    """How an op is called, and the header with the function."""

    header: str
    text: Callable[[RowCall], list[str]]


def call_lines(access: RowAccess, node: Node) -> list[str]:
    """Return the statements that compute one node's row, and copy it where else it goes."""
    call = RowCall(access, node)
    text = _routine(node).text(call)
    lines = [*call.lines, *text]
    if node.name in access.plan.arrays and access.memory(node.name) is None:
        lines += _copied(call)
    return ["{", *("  " + line for line in lines), "}"]


def _copied(call: RowCall) -> list[str]:
    """Copy what a call wrote to an array to where else it goes."""
    access, node = call.access, call.node
    if node.name not in access.sinks:
        return []
    outer = call.shape(0)[:-1] if works_on_lines(node) else ()
    count = access.size(node) // math.prod(outer)
    start = f"{_line('0', outer, count)} + j"
    stored = stored_text(node, f"{array_name(node.name)}[{start}]")
    target = f"args.{access.sinks[node.name].target}[row * {access.size(node)} + {start}]"
    return [f"for (int64_t j = 0; j < {count}; ++j) {target} = {stored};"]


def row_headers(body: Graph) -> list[str]:
    """Return the headers that the calls of a body need."""
    found = [ROUTINES[n.op].header for n in body.nodes if n.op in ROUTINES]
    return list(dict.fromkeys(found))


def _routine(node: Node) -> Routine:
    if node.op not in ROUTINES:
        raise LowerError(f"{node.op} '{node.name}': has no C++ row form")
    return ROUTINES[node.op]


# --- rows of tables, largest entries ------------------------------------------------------------


def _embedding(c: RowCall) -> list[str]:
    type_ = c.type_of(1)
    rows, width = (constant(d) for d in type_.shape)
    lines = [
        f"const int64_t id = {c.row(0)}[i];",
        f"float* const y = {c.result} + i * {width};",
        f"if (id < 0 || id >= {rows}) for (int64_t j = 0; j < {width}; ++j) "
        'y[j] = __builtin_nanf("");',
        f"else tw_row_{panel_format(type_.dtype)}({c.whole(1)}, id, {width}, y);",
    ]
    head = f"for (int64_t i = 0; i < {max(1, c.size(0))}; ++i) {{"
    return [head, *("  " + line for line in lines), "}"]


def _argmax(c: RowCall) -> list[str]:
    width = c.shape(0)[-1]
    return [f"*({c.result_line(1)}) = tw_argmax_row({c.line(0)}, {width});"]


def _top_k(c: RowCall) -> list[str]:
    width, count = c.shape(0)[-1], c.attr("k")
    lines = [
        f"const int64_t bytes = tw_top_k_bytes({count});",
        "alignas(64) uint8_t scratch[bytes > 0 ? bytes : 1];",
    ]
    target = c.result_line(count)
    if c.node.op == "top_k_indices":
        outputs = f"{target}, nullptr"
    else:
        lines.append(f"int32_t indices[{count}];")
        outputs = f"indices, {target}"
    return [*lines, f"tw_top_k_row({c.line(0)}, {width}, {count}, {outputs}, scratch);"]


# --- quantisation -------------------------------------------------------------------------------

_CODES = {
    ("fp8_e4m3", "ue8m0"): "tw::mxfp8",
    ("fp4_e2m1", "ue8m0"): "tw::mxfp4",
    ("fp4_e2m1", "fp8_e4m3"): "tw::nvfp4",
}


def _format(target: BlockFormat, width: int) -> str:
    """Return the template arguments of a quantised row."""
    key = target.code.name, target.scale.name
    if key not in _CODES or target.block[0] != 1:
        known = ", ".join(" with ".join(k) for k in _CODES)
        raise LowerError(f"format '{target}': has no packed rows: have {known}")
    return f"{_CODES[key]}, {width}, {target.block[1]}, {target.tail}"


def _quantise(c: RowCall) -> list[str]:
    target, width = c.node.type.dtype, c.shape(0)[-1]
    assert isinstance(target, BlockFormat)
    return [f"tw_quantise<{_format(target, width)}>({c.line(0)}, {c.result_line(width)});"]


def _hadamard(c: RowCall) -> list[str]:
    width = c.shape(0)[-1]
    factor = _literal(float(width) ** -0.5)
    return [f"tw_hadamard<{width}>({c.line(0)}, {factor}, {c.result_line(width)});"]


def _append_rows(c: RowCall) -> list[str]:
    state = c.type_of(0)
    width, target = constant(state.shape[2]), state.dtype
    slot = f"const int64_t slot = {c.row(2)}[0];"
    if isinstance(target, BlockFormat):
        raw = c.access.plan.packed_from.get(c.node.name)
        pack = "tw_pack_values" if raw is None else "tw_pack"
        source = c.row(1) if raw is None else _raw_row(c, raw)
        at = f"{c.whole(0)} + slot * {target.row_bytes(width)}"
        return [slot, f"if (slot >= 0) {pack}<{_format(target, width)}>({source}, {at});"]
    value = f"{c.row(1)}[j]"
    stored = value if is_int(state) else storage(target).store.format(value)
    loop = f"for (int64_t j = 0; j < {width}; ++j) y[j] = {stored};"
    lines = [f"auto* const y = {c.whole(0)} + slot * {width};", loop]
    return [slot, "if (slot >= 0) {", *("  " + line for line in lines), "}"]


def _raw_row(c: RowCall, value: str) -> str:
    """Return the row that was quantised: its scales are the ones to store."""
    source = Node(c.node.name, c.node.op, (value,), c.node.attrs, c.node.type)
    inner = RowCall(c.access, source, c.lines)
    return inner.row(0)


# --- hyper-connections, experts -----------------------------------------------------------------


def _hyper_mix(c: RowCall) -> list[str]:
    eps = c.node.attr["eps"]
    assert isinstance(eps, float)
    shape = f"{c.attr('streams')}, {c.attr('iterations')}"
    operands = ", ".join(c.row(i) for i in range(3))
    return [f"tw_hyper_mix<{shape}>({operands}, {_literal(eps)}, {c.result});"]


def _streams(name: str, count: int) -> Callable[[RowCall], list[str]]:
    """A function of streams [n, width] and further operands."""

    def text(c: RowCall) -> list[str]:
        streams, width = c.shape(0)
        operands = ", ".join(c.row(i) for i in range(count))
        return [f"{name}<{streams}, {width}>({operands}, {c.result});"]

    return text


def _repeat(c: RowCall) -> list[str]:
    return [f"tw_repeat({c.row(0)}, {c.size(0)}, {c.attr('streams')}, {c.result});"]


def _take(c: RowCall) -> list[str]:
    width = c.shape(0)[1]
    start = c.attr("index") * width
    return [f"tw_copy({_const(c, 0)}{c.row(0)} + {start}, {width}, {c.result});"]


def _const(c: RowCall, i: int) -> str:
    """A cast that lets templates deduce one type from arrays of a row and from operands."""
    return f"(const {c.access.element_type(c.node.inputs[i])}*)"


def _gather_last(c: RowCall) -> list[str]:
    x = f"{_const(c, 0)}{c.row(0)}"
    return [f"tw_gather({x}, {c.size(0)}, {c.row(1)}, {c.size(1)}, {c.result});"]


def _modulo(c: RowCall) -> list[str]:
    return [f"tw_modulo({c.row(0)}, {c.size(0)}, {c.attr('divisor')}, {c.result});"]


# --- pages --------------------------------------------------------------------------------------


def _page_slots(c: RowCall) -> list[str]:
    tables = f"{c.whole(2)}, {c.extent(2, 1)}"
    where = f"{c.row(1)}[0], {c.row(0)}[0], {c.attr('ratio')}, {c.attr('entries')}"
    return [f"{c.result}[0] = tw_page_slot({tables}, {where});"]


def _pool_window(c: RowCall) -> list[str]:
    overlap, state = bool(c.node.attr["overlap"]), c.type_of(0)
    if str(state.dtype) not in ("f32", "bf16"):
        raise LowerError(f"pool_window '{c.node.name}': rows are {state}, want f32 or bf16")
    entries, width = constant(state.shape[1]), c.access.size(c.node)
    shape = f"{c.attr('ratio')}, {str(overlap).lower()}, {width}"
    pages = f"{c.whole(0)}, {c.whole(1)}, {entries}, {c.ring(4, 3)}"
    return [f"tw_pool_window<{shape}>({pages}, {c.row(2)}[0], {c.result});"]


def _ngram_rows(c: RowCall) -> list[str]:
    multipliers, primes = (tuple(map(int, _ints(c, n))) for n in ("multipliers", "primes"))
    shape = f"{len(multipliers)}, {len(primes) // (len(multipliers) - 1)}"
    pages = f"{c.whole(0)}, {constant(c.type_of(0).shape[1])}, {c.ring(3, 2)}, {c.row(1)}[0]"
    return [
        f"static const int64_t multipliers[] = {{{', '.join(f'{m}LL' for m in multipliers)}}};",
        f"static const int64_t primes[] = {{{', '.join(f'{p}LL' for p in primes)}}};",
        f"tw_ngram_rows<{shape}>({pages}, multipliers, primes, {c.attr('pad')}, {c.result});",
    ]


def _ints(c: RowCall, name: str) -> tuple[str, ...]:
    values = c.node.attr[name]
    assert isinstance(values, tuple)
    return tuple(map(str, values))


def _literal(value: float) -> str:
    return print_scalar(Const(value), {}, "cpp")


ROUTINES: Mapping[str, Routine] = {
    "embedding": Routine("tw_contract_formats.h", _embedding),
    "argmax": Routine("tw_select.h", _argmax),
    "top_k_indices": Routine("tw_select.h", _top_k),
    "top_k_values": Routine("tw_select.h", _top_k),
    "quantise": Routine("tw_quant.h", _quantise),
    "hadamard": Routine("tw_quant.h", _hadamard),
    "append_rows": Routine("tw_quant.h", _append_rows),
    "hyper_mix": Routine("tw_hyper.h", _hyper_mix),
    "hyper_collapse": Routine("tw_hyper.h", _streams("tw_hyper_collapse", 2)),
    "hyper_update": Routine("tw_hyper.h", _streams("tw_hyper_update", 3)),
    "sum_slots": Routine("tw_rows.h", _streams("tw_sum_slots", 1)),
    "repeat_streams": Routine("tw_rows.h", _repeat),
    "take_stream": Routine("tw_rows.h", _take),
    "gather_last": Routine("tw_rows.h", _gather_last),
    "modulo": Routine("tw_rows.h", _modulo),
    "page_slots": Routine("tw_pages.h", _page_slots),
    "pool_window": Routine("tw_pages.h", _pool_window),
    "ngram_rows": Routine("tw_pages.h", _ngram_rows),
}
