"""Ops on whole rows as AscendC: one table row an op, which prints loops over all rows of a tile
that threads or warps share. Functions they call lie in templates/ascendc/tw_ascend_rows.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.codegen.emit.ascendc_quant import append_rows, hadamard, quantise
from tilewright.codegen.emit.ascendc_text import WARP, spread
from tilewright.codegen.emit.cpp_types import panel_format, storage
from tilewright.codegen.emit.row_access import is_int, offset
from tilewright.codegen.emit.shapes import constant, inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.graph import Node
from tilewright.graph.dims import product
from tilewright.graph.errors import LowerError
from tilewright.graph.scalar import Const
from tilewright.graph.types import BlockFormat, TensorType

if TYPE_CHECKING:
    from tilewright.codegen.emit.ascendc_rows import AscendRows


@dataclass(frozen=True)
class Call:
    """One whole-row op in a row program: its operands by number."""

    rows: AscendRows
    node: Node

    def type_of(self, i: int) -> TensorType:
        return self.rows.body.type_of(self.node.inputs[i])

    def shape(self, i: int) -> tuple[int, ...]:
        """Shape of an operand within one row."""
        type_ = self.type_of(i)
        return inner_shape(type_, type_.rank, self.rows.rows)

    def size(self, i: int) -> int:
        return max(1, constant(product(self.shape(i))))

    def at(self, i: int, *index: str) -> str:
        """Return the load of an element of an operand; an int stays one."""
        type_ = self.type_of(i)
        return self.rows.element(self.node.inputs[i], index, type_.rank, as_int=is_int(type_))

    def flat(self, i: int, place: str) -> str:
        """Return the load of an element by its number in the row."""
        shape = self.shape(i)
        index = [f"({place})" if axis == len(shape) - 1 else "0" for axis in range(len(shape))]
        return self.at(i, *index)

    def stores(self, place: str, value: str) -> list[str]:
        return self.rows.stores(self.node, place, value)

    def whole(self, i: int, ctype: str = "int32_t") -> str:
        return self.rows.whole(self.rows.root(self.node.inputs[i]), ctype)

    def ring(self, tables: int, row: str) -> str:
        """Return the arguments that name a request's ring of pages."""
        return f"{self.whole(tables)}, {self.rows.extent(self.node.inputs[tables], 1)}, {row}"

    def attr(self, name: str) -> int:
        return int(str(self.node.attr[name]))


def call_lines(rows: AscendRows, node: Node) -> list[str]:
    """Return the statements that compute a node for all rows; LowerError lists the known ops."""
    if node.op not in _ROUTINES:
        known = ", ".join(_ROUTINES)
        raise LowerError(f"{node.op} '{node.name}': has no AscendC row form: have {known}")
    return _ROUTINES[node.op](Call(rows, node))


# --- rows of tables, largest entries ------------------------------------------------------------


def _embedding(c: Call) -> list[str]:
    """Rows of a table that ids name, NaN for an id outside. Transfers bring them where the ids are
    an operand with one id a row; else threads read the table."""
    rows, width = (constant(d) for d in c.type_of(1).shape)
    ids, table = c.node.inputs
    shape = c.shape(0)
    if not shape and ids not in c.rows.inside and not isinstance(c.type_of(1).dtype, BlockFormat):
        load = _brought_row(c, table, ids, width)
    else:
        load = _read_row(c, width)
    index = [f"i{axis}" for axis in range(len(shape))]
    place = offset([*index, "j"], (*shape, width))
    lines = [
        f"const int32_t id = {c.at(0, *index)};",
        'float value = __builtin_nanf("");',
        f"if (id >= 0 && id < {rows}) value = {load};",
        *c.stores(place, "value"),
    ]
    return spread((*shape, width), lines)


def _table(c: Call) -> tuple[str, str, int]:
    """How entries of a plain table lie: C type, load, bytes. All but fp32 are packed as bf16."""
    form = storage(c.type_of(1).dtype) if str(c.type_of(1).dtype) == "f32" else None
    if form is not None:
        return "float", "{0}", 4
    return "uint16_t", "tw_bf16_to_f32({0})", 2


def _brought_row(c: Call, table: str, ids: str, width: int) -> str:
    from tilewright.codegen.emit.ascendc_rows import Copy

    ctype, load, size = _table(c)
    region = c.rows.region(f"g_{table}", ctype, size * width, staged=True)
    copy = Copy("indexed", table, region, size * width, ids)
    c.rows.copies.setdefault((table, "indexed"), copy)
    return load.format(c.rows.at(region, "j"))


def _read_row(c: Call, width: int) -> str:
    dtype = c.type_of(1).dtype
    if isinstance(dtype, BlockFormat) and panel_format(dtype).startswith("fp8_rows"):
        row = f"{c.whole(1, 'uint8_t')} + (int64_t)id * {dtype.row_bytes(width)}"
        scale = f"tw_ue8m0_value(({row})[{width} + j / {dtype.block[1]}])"
        return f"tw_mul(tw_e4m3_value(({row})[j]), {scale})"
    ctype, load, _ = _table(c)
    return load.format(f"{c.whole(1, ctype)}[(int64_t)id * {width} + j]")


def _argmax(c: Call) -> list[str]:
    """The first largest entry of a line by a warp; a line with NaN gives 0."""
    *outer, width = c.shape(0)
    index = [f"i{axis}" for axis in range(len(outer))]
    better = "(other > best || (other == best && where < at))"
    inner = [
        "float best = -__builtin_inff();",
        "int32_t at = 2147483647, bad = 0;",
        f"for (int32_t j = lane; j < {width}; j += {WARP}) {{",
        f"  const float value = {c.at(0, *index, 'j')};",
        "  bad |= value != value;",
        "  if (value > best || at == 2147483647) { best = value; at = j; }",
        "}",
        f"for (int32_t stride = {WARP // 2}; stride; stride /= 2) {{",
        "  const float other = asc_shfl_down(best, stride);",
        "  const int32_t where = asc_shfl_down(at, stride);",
        "  bad |= asc_shfl_down(bad, stride);",
        f"  if {better} {{ best = other; at = where; }}",
        "}",
        "if (lane == 0) {",
        *("  " + line for line in c.stores(offset(index, tuple(outer)), "(bad ? 0 : at)")),
        "}",
    ]
    return spread(tuple(outer), inner, warps=True)


def _top_k(c: Call) -> list[str]:
    """A warp finds one entry after the other: the largest below the last, ties to the first."""
    *outer, width = c.shape(0)
    count, index = c.attr("k"), [f"i{axis}" for axis in range(len(outer))]
    value = "at" if c.node.op == "top_k_indices" else "tw_key_value(best)"
    place = offset([*index, "s"], (*outer, count))
    inner = [
        "uint32_t bound = 0xffffffffu;",
        "int32_t last = -1;",
        f"for (int32_t s = 0; s < {count}; ++s) {{",
        "  uint32_t best = 0;",
        "  int32_t at = 2147483647;",
        f"  for (int32_t j = lane; j < {width}; j += {WARP}) {{",
        f"    const uint32_t key = tw_order_key({c.at(0, *index, 'j')});",
        "    const bool left = key < bound || (key == bound && j > last);",
        "    if (left && (at == 2147483647 || key > best)) { best = key; at = j; }",
        "  }",
        f"  for (int32_t stride = {WARP // 2}; stride; stride /= 2) {{",
        "    const uint32_t key = asc_shfl_xor(best, stride);",
        "    const int32_t where = asc_shfl_xor(at, stride);",
        "    const bool found = where != 2147483647;",
        "    const bool better = key > best || (key == best && where < at);",
        "    if (found && (at == 2147483647 || better)) { best = key; at = where; }",
        "  }",
        "  bound = best;",
        "  last = at;",
        "  if (lane == 0) {",
        *("    " + line for line in c.stores(place, value)),
        "  }",
        "}",
    ]
    return spread(tuple(outer), inner, warps=True)


# --- hyper-connections, experts -----------------------------------------------------------------


def _hyper_mix(c: Call) -> list[str]:
    """A thread computes the mix of a row: sums in the order of the op's reference."""
    n, eps = c.attr("streams"), _literal(c.node.attr["eps"])

    def put(place: str, value: str) -> str:
        return " ".join(c.stores(place, value))

    def logit(i: str, part: int) -> str:
        return f"tw_mul({c.flat(0, i)}, {c.flat(1, str(part))}) + {c.flat(2, i)}"

    pre, post = f"tw_sigmoid({logit('i', 0)}) + {eps}", f"2.0f * tw_sigmoid({logit('i', 1)})"
    inner = [
        f"for (int32_t i = 0; i < {n}; ++i) {{ {put('i', pre)} }}",
        f"for (int32_t i = {n}; i < {2 * n}; ++i) {{ {put('i', post)} }}",
        f"float comb[{n}][{n}];",
        f"for (int32_t a = 0; a < {n}; ++a) {{",
        f"  for (int32_t b = 0; b < {n}; ++b) {{",
        f"    const int32_t i = {2 * n} + a * {n} + b;",
        f"    comb[a][b] = {logit('i', 2)};",
        "  }",
        "  float most = comb[a][0], sum = 0.0f;",
        f"  for (int32_t b = 1; b < {n}; ++b) most = tw_max(most, comb[a][b]);",
        f"  for (int32_t b = 0; b < {n}; ++b) comb[a][b] = tw_exp(comb[a][b] - most);",
        f"  for (int32_t b = 0; b < {n}; ++b) sum = sum + comb[a][b];",
        f"  for (int32_t b = 0; b < {n}; ++b) comb[a][b] = comb[a][b] / sum + {eps};",
        "}",
        f"for (int32_t step = 0; step < {2 * c.attr('iterations') - 1}; ++step)",
        f"  for (int32_t a = 0; a < {n}; ++a) {{  // even steps: columns, odd ones: rows",
        "    float sum = step % 2 ? comb[a][0] : comb[0][a];",
        f"    for (int32_t b = 1; b < {n}; ++b) sum = sum + (step % 2 ? comb[a][b] : comb[b][a]);",
        f"    sum = sum + {eps};",
        f"    for (int32_t b = 0; b < {n}; ++b) {{",
        "      if (step % 2) comb[a][b] = comb[a][b] / sum;",
        "      else comb[b][a] = comb[b][a] / sum;",
        "    }",
        "  }",
        f"for (int32_t a = 0; a < {n}; ++a)",
        f"  for (int32_t b = 0; b < {n}; ++b) {{ {put(f'{2 * n} + a * {n} + b', 'comb[a][b]')} }}",
    ]
    return spread((), inner)


def _literal(value: object) -> str:
    return print_scalar(Const(float(str(value))), {}, "cpp")


def _hyper_collapse(c: Call) -> list[str]:
    streams, width = c.shape(0)
    terms = [f"tw_mul({c.at(1, str(i))}, {c.at(0, str(i), 'j')})" for i in range(streams)]
    return spread((width,), [*_added(terms), *c.stores("j", "total")])


def _hyper_update(c: Call) -> list[str]:
    n, width = c.shape(0)
    terms = [f"tw_mul({c.at(2, f'({n} + i0)')}, {c.at(1, 'j')})"]
    for s in range(n):
        terms.append(f"tw_mul({c.at(2, f'({2 * n + s * n} + i0)')}, {c.at(0, str(s), 'j')})")
    return spread((n, width), [*_added(terms), *c.stores(f"i0 * {width} + j", "total")])


def _sum_slots(c: Call) -> list[str]:
    slots, width = c.shape(0)
    terms = [c.at(0, str(s), "j") for s in range(slots)]
    return spread((width,), [*_added(terms), *c.stores("j", "total")])


def _added(terms: list[str]) -> list[str]:
    """Terms in their order."""
    return [f"float total = {terms[0]};", *(f"total = total + {term};" for term in terms[1:])]


def _repeat(c: Call) -> list[str]:
    streams, width = c.attr("streams"), c.size(0)
    return spread((streams, width), c.stores(f"i0 * {width} + j", c.flat(0, "j")))


def _take(c: Call) -> list[str]:
    width = c.shape(0)[1]
    return spread((width,), c.stores("j", c.at(0, str(c.attr("index")), "j")))


def _gather_last(c: Call) -> list[str]:
    lines = [
        f"const int32_t id = {c.at(1, 'j')};",
        f"const bool known = id >= 0 && id < {c.size(0)};",
    ]
    absent = "0" if is_int(c.node.type) else '__builtin_nanf("")'
    return spread((c.size(1),), [*lines, *c.stores("j", f"(known ? {c.at(0, 'id')} : {absent})")])


def _modulo(c: Call) -> list[str]:
    divisor, shape = c.attr("divisor"), c.shape(0)
    lines = [f"const int32_t rest = {c.flat(0, 'j')} % {divisor};"]
    found = c.stores("j", f"(rest < 0 ? rest + {divisor} : rest)")
    return spread((constant(product(shape)) if shape else 1,), [*lines, *found])


# --- pages --------------------------------------------------------------------------------------


def _page_slots(c: Call) -> list[str]:
    where = f"{c.at(0)}, {c.attr('ratio')}, {c.attr('entries')}"
    return spread((), c.stores("0", f"tw_page_slot({c.ring(2, c.at(1))}, {where})"))


def _pool_window(c: Call) -> list[str]:
    """Softmax of the gates over the rows of a window, per channel, times the values: oldest first,
    the maximum and then the sums."""
    state, ratio, overlap = c.type_of(0), c.attr("ratio"), bool(c.node.attr["overlap"])
    if str(state.dtype) not in ("f32", "bf16"):
        raise LowerError(f"pool_window '{c.node.name}': rows are {state}, want f32 or bf16")
    form, width = storage(state.dtype), c.rows.size(c.node)
    count, stride = (2 * ratio, 2 * width) if overlap else (ratio, width)
    column = f"j + (s >= {ratio} ? {width} : 0)" if overlap else "j"
    slot = f"tw_entry_slot({c.ring(4, 'request')}, position - {count - 1} + s, {state.shape[1]})"
    value, gate = (
        form.load.format(f"{c.whole(i, form.ctype)}[at * {stride} + {column}]") for i in (0, 1)
    )
    inner = [
        f"const int32_t position = {c.at(2)}, request = {c.at(3)};",
        "float result = 0.0f;",
        f"if (position >= 0 && (position + 1) % {ratio} == 0) {{",
        f"  const int32_t first = position + 1 < {count} ? {count - 1} - position : 0;",
        "  float most = -__builtin_inff(), total = 0.0f, sum = 0.0f;",
        f"  for (int32_t s = first; s < {count}; ++s) {{",
        f"    const int64_t at = {slot};",
        f"    most = tw_max(most, {gate});",
        "  }",
        f"  for (int32_t s = first; s < {count}; ++s) {{",
        f"    const int64_t at = {slot};",
        f"    const float weight = tw_exp({gate} - most);",
        "    total = total + weight;",
        f"    sum = sum + tw_mul(weight, {value});",
        "  }",
        "  result = sum / total;",
        "}",
        *c.stores("j", "result"),
    ]
    return spread((width,), inner)


def _ngram_rows(c: Call) -> list[str]:
    """Products wrap: they are unsigned; remainders are those of signed numbers, never negative."""
    multipliers, primes = (_ints(c, name) for name in ("multipliers", "primes"))
    heads, entries = len(primes) // (len(multipliers) - 1), c.type_of(0).shape[1]
    history = c.whole(0)
    inner = [f"const int32_t position = {c.at(1)}, request = {c.at(2)};", "uint64_t mixed = 0;"]
    first = 0
    for back, multiplier in enumerate(multipliers):
        slot = f"tw_entry_slot({c.ring(3, 'request')}, position - {back}, {entries})"
        held = f"position >= {back} ? {history}[{slot}] : {c.attr('pad')}"
        product_ = f"(uint64_t)(int64_t)({held}) * (uint64_t){multiplier}LL"
        inner.append(f"mixed = mixed ^ {product_};")
        for i in range((back - 1) * heads, back * heads) if back else ():
            rest = f"((int64_t)mixed % {primes[i]}LL + {primes[i]}LL) % {primes[i]}LL"
            inner += c.stores(str(i), f"(int32_t)({rest} + {first}LL)")
            first += primes[i]
    return spread((), inner)


def _ints(c: Call, name: str) -> tuple[int, ...]:
    values = c.node.attr[name]
    assert isinstance(values, tuple)
    return tuple(int(str(v)) for v in values)


_ROUTINES: Mapping[str, Callable[[Call], list[str]]] = {
    "embedding": _embedding,
    "argmax": _argmax,
    "top_k_indices": _top_k,
    "top_k_values": _top_k,
    "quantise": quantise,
    "hadamard": hadamard,
    "append_rows": append_rows,
    "hyper_mix": _hyper_mix,
    "hyper_collapse": _hyper_collapse,
    "hyper_update": _hyper_update,
    "sum_slots": _sum_slots,
    "repeat_streams": _repeat,
    "take_stream": _take,
    "gather_last": _gather_last,
    "modulo": _modulo,
    "page_slots": _page_slots,
    "pool_window": _pool_window,
    "ngram_rows": _ngram_rows,
}
