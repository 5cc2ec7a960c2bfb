"""Ops of row kernels that are neither elementwise nor moves, in Triton: one table row an op, which
prints its value at an index. Functions over blocks lie in templates/triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tilewright.codegen.emit.shapes import constant, inner_shape
from tilewright.codegen.emit.triton_places import Index, at, block_form, power_of_two, whole
from tilewright.codegen.emit.triton_values import Evaluate, Scope, Values
from tilewright.codegen.expr import print_scalar
from tilewright.graph import Node
from tilewright.graph.dims import to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.scalar import Const
from tilewright.graph.types import DType, TensorType


@dataclass(frozen=True)
class Call:
    """One node at one index: its operands, and where statements go."""

    values: Values
    scope: Scope
    node: Node
    index: tuple[Index, ...]
    row: Index

    def type_of(self, i: int) -> TensorType:
        return self.values.body.type_of(self.node.inputs[i])

    def shape(self, i: int) -> tuple[int, ...]:
        """Shape of an operand within one row."""
        type_ = self.type_of(i)
        return inner_shape(type_, type_.rank, self.values.rows)

    def operand(self, i: int, index: tuple[Index, ...]) -> str:
        """Return an operand at an index over its own shape within the row."""
        rank = self.type_of(i).rank
        return self.values.operand(self.scope, self.node.inputs[i], index, rank, self.row)

    def once(self, key: str, text: str) -> str:
        """Name a text, once for all places that ask for it under this key: a word, and where."""
        full, word = (self.node.name, self.row.text, key), key.partition("@")[0]
        return self.values.once(self.scope, full, f"{self.node.name}_{word}", text)

    def pointer(self, i: int) -> str:
        """Return the pointer to all of an operand: a state, page tables."""
        name = self.node.inputs[i]
        if name in self.values.inside:
            raise LowerError(
                f"{self.node.op} '{self.node.name}': operand '{name}' is computed in the same "
                "kernel: want memory"
            )
        return name

    def extent(self, i: int, axis: int) -> str:
        """Return an extent of an operand that may be known only at run time."""
        tree = to_json(self.type_of(i).shape[axis])
        if isinstance(tree, list):
            raise LowerError(
                f"{self.node.op} '{self.node.name}': extent {tree} has no Triton form"
            )
        return str(tree)

    def ring(self, tables: int, rows: int) -> str:
        """Return the pointer to the page table of this row's request, and its length."""
        pages = self.extent(tables, 1)
        request = f"{self.operand(rows, ())}.to(tl.int64)"
        ring = self.once("ring", f"{self.pointer(tables)} + {request} * {pages}")
        return f"{ring}, {pages}"

    def attr(self, name: str) -> int:
        return int(str(self.node.attr[name]))

    def stream(self) -> tuple[int, Index]:
        """The known first position of a two-axis index, and the last."""
        first, last = self.index
        if first.number is None:
            raise LowerError(
                f"{self.node.op} '{self.node.name}': too many streams for one row: "
                f"got {self.values.shape_of(self.node)[0]}, want at most 16"
            )
        return first.number, last


_POOLED = 8  # rows of a window that are added by one tree: part of the bits
Text = Callable[[Call], str]


def _literal(value: float) -> str:
    return print_scalar(Const(value), {}, "triton")


def _float(call: Call, name: str) -> str:
    value = call.node.attr[name]
    assert isinstance(value, float)
    return _literal(value)


# --- streams, slots -----------------------------------------------------------------------------


def _repeat(c: Call) -> str:
    return c.operand(0, c.index[1:])


def _take(c: Call) -> str:
    return c.operand(0, (at(c.attr("index")), *c.index))


def _sum_slots(c: Call) -> str:
    """Slots in ascending order."""
    terms = [c.operand(0, (at(slot), *c.index)) for slot in range(c.shape(0)[0])]
    return _in_order(terms)


def _collapse(c: Call) -> str:
    terms = [
        f"({c.operand(1, (at(i),))} * {c.operand(0, (at(i), *c.index))})"
        for i in range(c.shape(0)[0])
    ]
    return _in_order(terms)


def _update(c: Call) -> str:
    count, (k, last) = c.shape(0)[0], c.stream()
    terms = [f"({c.operand(2, (at(count + k),))} * {c.operand(1, (last,))})"]
    for j in range(count):
        comb = c.operand(2, (at(2 * count + j * count + k),))
        terms.append(f"({comb} * {c.operand(0, (at(j), last))})")
    return _in_order(terms)


def _in_order(terms: list[str]) -> str:
    total = terms[0]
    for term in terms[1:]:
        total = f"({total} + {term})"
    return total


def _mix(c: Call) -> str:
    """All numbers of a mix stand in one block, as they lie in memory."""
    (width,) = c.values.shape_of(c.node)
    (last,) = c.values.passes(c.scope, width, width, across=False)
    if (c.node.name, "mix") not in c.scope.done:
        scales = ", ".join(c.operand(1, (at(i),)) for i in range(3))
        operands = f"{c.operand(0, (last,))}, {scales}, {c.operand(2, (last,))}"
        shape = f"{_float(c, 'eps')}, {c.attr('streams')}, {c.attr('iterations')}, {last.size}"
        mixed = c.values.name(c.scope, c.node.name, f"tw_hyper_mix({operands}, {shape})")
        c.scope.done[c.node.name, "mix"] = mixed
    mixed = c.scope.done[c.node.name, "mix"]
    return _element(c, mixed, c.index[0], last)


def _element(c: Call, block: str, index: Index, last: Index) -> str:
    """One element of a block, or the block itself where all are asked for."""
    if index.text == last.text:
        return block
    if index.number is None:
        raise LowerError(f"{c.node.op} '{c.node.name}': is read at {index.text}: want a number")
    return f"tw_element({block}, {index.number})"


def _gather_last(c: Call) -> str:
    """An entry chosen by an index; NaN (0 for ints) for one outside."""
    (count,) = c.shape(0)
    chosen = c.operand(1, c.index)
    inside = f"({chosen} >= 0) & ({chosen} < {count})"
    known = c.values.once(c.scope, (chosen, str(count), "known"), "known", inside)
    last = c.index[-1]
    moved = replace(last, text=chosen, mask=known, block=last.block, base=0, size=0)
    if last.number is not None:
        safe = f"tl.where({known}, {chosen}, 0)"
        moved = Index(c.values.once(c.scope, (chosen, "safe"), "safe", safe), "", block=False)
    dtype = c.node.type.dtype
    absent = "0" if isinstance(dtype, DType) and dtype.kind == "int" else "float('nan')"
    return f"tl.where({known}, {c.operand(0, (moved,))}, {absent})"


def _modulo(c: Call) -> str:
    x, divisor = c.operand(0, c.index), c.attr("divisor")
    return f"tw_modulo({x}, {divisor})"


# --- pages --------------------------------------------------------------------------------------


def _page_slots(c: Call) -> str:
    where = f"{c.operand(0, ())}, {c.attr('ratio')}, {c.attr('entries')}"
    return f"tw_page_slot({c.ring(2, 1)}, {where})"


def _pool_window(c: Call) -> str:
    state = c.type_of(0)
    if str(state.dtype) not in ("f32", "bf16"):
        raise LowerError(f"pool_window '{c.node.name}': rows are {state}, want f32 or bf16")
    (last,), overlap = c.index, bool(c.node.attr["overlap"])
    entries, width = constant(state.shape[1]), constant(state.shape[2])
    if not last.size:
        raise LowerError(f"pool_window '{c.node.name}': is read at {last.text}: want a block")
    ring = c.ring(4, 3)
    pages = f"{c.pointer(0)}, {c.pointer(1)}, {ring}, {c.operand(2, ())}"
    columns, ratio = width // 2 if overlap else width, c.attr("ratio")
    rows = min(_POOLED, power_of_two(2 * ratio if overlap else ratio))
    shape = f"{columns}, {ratio}, {overlap}, {width}, {entries}, {rows}, {last.size}"
    return f"tw_pool_window({pages}, {last.text}, {shape})"


def _ngram_rows(c: Call) -> str:
    """Row of one n-gram: the hash of its size, modulo the prime of its head, after the rows of the
    tables before it."""
    multipliers, primes = (_ints(c, name) for name in ("multipliers", "primes"))
    sizes = len(multipliers)
    heads, mixed = len(primes) // (sizes - 1), _hashes(c, multipliers)
    starts = [sum(primes[:i]) for i in range(len(primes))]
    number = c.index[-1].number
    if number is not None:
        grams = mixed[number // heads]
        return f"tw_ngram_row({grams}, {primes[number]}, {starts[number]})"
    text = c.index[-1].text
    chosen = [f"{text} // {heads}", text, text]
    tables = [mixed, [str(p) for p in primes], [str(s) for s in starts]]
    operands = [_chosen(t, table) for t, table in zip(chosen, tables, strict=True)]
    return f"tw_ngram_row({', '.join(operands)})"


def _ints(c: Call, name: str) -> tuple[int, ...]:
    values = c.node.attr[name]
    assert isinstance(values, tuple)
    return tuple(int(str(v)) for v in values)


def _hashes(c: Call, multipliers: tuple[int, ...]) -> list[str]:
    """Hashes of 2, 3, .. tokens; products wrap around at 64 bits."""
    entries = constant(c.type_of(0).shape[1])
    ring, position = c.ring(3, 2), c.operand(1, ())
    found = list[str]()
    for back, multiplier in enumerate(multipliers):
        entry = f"{c.pointer(0)}, {ring}, {position} - {back}, {entries}, {c.attr('pad')}"
        product = f"tw_ngram_id({entry}) * {multiplier}"
        mixed = f"{found[-1]} ^ ({product})" if found else product
        found.append(c.once(f"hash{back}", mixed))
    return found[1:]


def _chosen(index: str, table: list[str]) -> str:
    """An entry of a short table, by comparisons."""
    text = table[-1]
    for i in reversed(range(len(table) - 1)):
        text = f"tl.where(({index}) == {i}, {table[i]}, {text})"
    return text


# --- transforms ---------------------------------------------------------------------------------


def _hadamard(c: Call) -> str:
    width, last = c.shape(0)[-1], c.index[-1]
    factor = _literal(float(width) ** -0.5)
    x = c.operand(0, c.index)
    if width == 1:
        return f"({x} * {factor})"
    if last.size != width:
        raise LowerError(
            f"hadamard '{c.node.name}': line is not in one block: got {last.size} of {width}"
        )
    return f"tw_hadamard({whole(x, c.index)}, {factor}, {block_form(c.index)})"


ROUTINES: Mapping[str, Text] = {
    "repeat_streams": _repeat,
    "take_stream": _take,
    "sum_slots": _sum_slots,
    "hyper_mix": _mix,
    "hyper_collapse": _collapse,
    "hyper_update": _update,
    "gather_last": _gather_last,
    "modulo": _modulo,
    "page_slots": _page_slots,
    "pool_window": _pool_window,
    "ngram_rows": _ngram_rows,
    "hadamard": _hadamard,
}


def evaluations(routines: Mapping[str, Text]) -> Mapping[str, Evaluate]:
    """Return the table as `Values` asks for it."""

    def bound(text: Text) -> Evaluate:
        return lambda values, scope, node, index, row: text(
            Call(values, scope, node, index, row)
        )

    return {op: bound(text) for op, text in routines.items()}


