"""Quantised rows as AscendC: a thread takes a group of values; packed rows are written by pairs of
groups, because the scales of a pair share two bytes that one thread must write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.codegen.emit.ascendc_text import spread
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.row_access import is_int, offset
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.expr import print_scalar
from tilewright.graph.errors import LowerError
from tilewright.graph.scalar import Const
from tilewright.graph.types import BlockFormat

if TYPE_CHECKING:
    from tilewright.codegen.emit.ascendc_calls import Call

_NAMES = {
    ("fp8_e4m3", "ue8m0"): "mxfp8",
    ("fp4_e2m1", "ue8m0"): "mxfp4",
    ("fp4_e2m1", "fp8_e4m3"): "nvfp4",
}


def format_name(target: BlockFormat) -> str:
    """Return the name that functions of a format end in; LowerError lists the known formats."""
    key = target.code.name, target.scale.name
    if key not in _NAMES or target.block[0] != 1:
        known = ", ".join(" with ".join(k) for k in _NAMES)
        raise LowerError(f"format '{target}': has no packed rows: have {known}")
    return _NAMES[key]


def _group_scale(name: str, value: str, coded: int, group: int) -> list[str]:
    """Statements that leave the range and the scale of group `g`; `value` reads element `c`."""
    last = f"(first + {group} < {coded} ? first + {group} : {coded})"
    return [
        f"const int32_t first = g * {group}, stop = {last};",
        "uint32_t most = 0u;",
        "for (int32_t c = first; c < stop; ++c) {",
        f"  const uint32_t size = tw_size_bits({value});",
        "  most = size > most ? size : most;",
        "}",
        f"const float scale = tw_scale_{name}(tw_from_size(most));",
    ]


def quantise(c: Call) -> list[str]:
    """What the format can store of each line."""
    target, (*outer, width) = c.node.type.dtype, c.shape(0)
    assert isinstance(target, BlockFormat)
    name, coded, group = format_name(target), width - target.tail, target.block[1]
    groups = -(-coded // group)
    index = [f"i{axis}" for axis in range(len(outer))]
    value, place = c.at(0, *index, "c"), offset([*index, "c"], (*outer, width))
    inner = [
        *_group_scale(name, value, coded, group),
        "for (int32_t c = first; c < stop; ++c) {",
        f"  const float held = tw_mul(tw_coded_{name}({value}, scale), scale);",
        *("  " + line for line in c.stores(place, "held")),
        "}",
    ]
    lines = spread((*outer, groups), ["const int32_t g = j;", *inner])
    if target.tail:
        tail = [f"const int32_t c = {coded} + j;"]
        rounded = f"tw_bf16_to_f32(tw_f32_to_bf16({value}))"
        lines += spread((*outer, target.tail), [*tail, *c.stores(place, rounded)])
    return lines


def hadamard(c: Call) -> list[str]:
    """Butterflies of strides 1, 2, 4, .. in the buffer, a barrier after each, then the factor."""
    *outer, width = c.shape(0)
    index, shape = [f"i{axis}" for axis in range(len(outer))], (*outer, width)
    region = c.rows.region(f"h_{c.node.name}", "float", 4 * c.rows.size(c.node), staged=False)

    def at(place: str) -> str:
        return c.rows.at(region, offset([*index, place], shape))

    lines = spread(shape, [f"{at('j')} = {c.at(0, *index, 'j')};"])
    stride = 1
    while stride < width:
        low = f"(j / {stride} * {2 * stride} + j % {stride})"
        high = f"({low} + {stride})"
        swap = [
            f"const float a = {at(low)}, b = {at(high)};",
            f"{at(low)} = a + b;",
            f"{at(high)} = a - b;",
        ]
        lines += ["asc_syncthreads();", *spread((*outer, width // 2), swap)]
        stride *= 2
    factor = print_scalar(Const(float(width) ** -0.5), {}, "cpp")
    scaled = c.stores(offset([*index, "j"], shape), f"tw_mul({at('j')}, {factor})")
    return [*lines, "asc_syncthreads();", *spread(shape, scaled)]


def append_rows(c: Call) -> list[str]:
    """The row to store, as it lies in the state; a transfer brings it to its slot."""
    state, region = c.type_of(0), f"o_{c.node.name}"
    width = constant(state.shape[2])
    if isinstance(state.dtype, BlockFormat):
        return _packed(c, state.dtype, width)
    value = c.at(1, "j")
    stored = value if is_int(state) else storage(state.dtype).store.format(value)
    return spread((width,), [f"{c.rows.at(region, 'j')} = {stored};"])


@dataclass(frozen=True)
class _Packing:
    """How one packed row lies in the buffer, and the value that goes there."""

    c: Call
    name: str
    target: BlockFormat
    width: int
    source: str

    @property
    def coded(self) -> int:
        return self.width - self.target.tail

    @property
    def groups(self) -> int:
        return -(-self.coded // self.target.block[1])

    @property
    def code_bytes(self) -> int:
        return -(-self.coded * self.target.code.bits // 8)

    @property
    def scale_at(self) -> int:
        return self.code_bytes + 2 * self.target.tail

    def at(self, place: str) -> str:
        return self.c.rows.at(f"o_{self.c.node.name}", place)

    def value(self, place: str) -> str:
        rank = self.c.rows.body.type_of(self.source).rank
        return self.c.rows.element(self.source, (place,), rank)

    def code(self, place: str) -> str:
        return f"tw_code_{self.name}(tw_coded_{self.name}({self.value(place)}, scale))"


def _packed(c: Call, target: BlockFormat, width: int) -> list[str]:
    """Codes, bf16 tail, scales. Scales are those of the values before they were quantised."""
    raw, name = c.rows.plan.packed_from.get(c.node.name), format_name(target)
    if raw is None and name == "nvfp4":
        raise LowerError(
            f"append_rows '{c.node.name}': values of {target} were quantised in another kernel, "
            "where their scales stayed: want both in one"
        )
    row = _Packing(c, name, target, width, raw or c.node.inputs[1])
    padded = -(-row.groups // 8) * 8 if target.tail else row.groups
    each = 2 if row.scale_at % 2 == 0 else padded  # groups of one thread
    lines = [
        f"for (int32_t g = j * {each}; g < j * {each} + {each} && g < {padded}; ++g) {{",
        f"  if (g >= {row.groups}) {row.at(f'{row.scale_at} + g')} = 0;",
        "  else {",
        *("    " + line for line in _packed_group(row)),
        "  }",
        "}",
    ]
    found = spread((-(-padded // each),), lines)
    return found + _packed_tail(row) if target.tail else found


def _packed_group(row: _Packing) -> list[str]:
    """Codes and scale of group `g`; an even element is in the low half of its byte."""
    if row.target.code.bits == 8:
        code = row.code("c")
        codes = [f"for (int32_t c = first; c < stop; ++c) {row.at('c')} = (uint8_t){code};"]
    else:
        high = f"(c + 1 < stop ? {row.code('(c + 1)')} << 4 : 0u)"
        codes = [
            "for (int32_t c = first; c < stop; c += 2)",
            f"  {row.at('c / 2')} = (uint8_t)({row.code('c')} | {high});",
        ]
    scale = f"(uint8_t)tw_scale_code_{row.name}(scale)"
    return [
        *_group_scale(row.name, row.value("c"), row.coded, row.target.block[1]),
        *codes,
        f"{row.at(f'{row.scale_at} + g')} = {scale};",
    ]


def _packed_tail(row: _Packing) -> list[str]:
    lines = [
        f"const uint32_t half = tw_f32_to_bf16({row.value(f'({row.coded} + j)')});",
        f"{row.at(f'{row.code_bytes} + 2 * j')} = (uint8_t)half;",
        f"{row.at(f'{row.code_bytes} + 2 * j + 1')} = (uint8_t)(half >> 8);",
    ]
    return spread((row.target.tail,), lines)
