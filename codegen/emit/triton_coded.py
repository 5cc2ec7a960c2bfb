"""Rows of activation codes in Triton: e4m3 codes, and bytes of their scales, as a contraction that
multiplies codes reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.emit.triton_calls import Call
from tilewright.codegen.emit.triton_places import block_shape
from tilewright.codegen.emit.triton_quant import codes_of, groups_of
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat

UNIT = 32  # values of k that a scale's byte is for


@dataclass(frozen=True)
class CodedRows:
    """Pointers to codes [rows, k] and to bytes of scales [k / 128, rows, 4]; `num_rows`: the text
    of that number; `order`: of codes, as tw_coded_place says."""

    codes: str
    scales: str
    k: int
    num_rows: str
    order: int = 0


def coded_store(c: Call, rows: CodedRows) -> list[str]:
    """Return the statements that store one block of a row that a `quantise` node computes."""
    target, last = c.node.type.dtype, c.index[-1]
    assert isinstance(target, BlockFormat)
    if len(c.index) != 1 or not last.size or last.base % target.block[1]:
        raise LowerError(f"quantise '{c.node.name}': want whole rows of codes")
    found, row = groups_of(c), f"{c.row.text}.to(tl.int64)"
    limit = f", mask={last.text} < {rows.k}" if last.base + last.size > rows.k else ""
    flat = f"tl.reshape({codes_of(target).code}({found.values}), {block_shape(c.index)})"
    code = f"{flat}.to(tl.uint8).to(tl.float8e4nv, bitcast=True)"
    place = f"tw_coded_place({last.text}, {rows.order})"
    lines = [f"tl.store({rows.codes} + {row} * {rows.k} + {place}, {code}{limit})"]
    return [*lines, *_scale_bytes(c, rows, row, found.scales, found.group)]


def _scale_bytes(c: Call, rows: CodedRows, row: str, scales: str, group: int) -> list[str]:
    """A byte for every 32 values: scales of wider groups several times."""
    last = c.index[-1]
    count, wide = last.size // group, max(1, group // UNIT)
    byte = f"tl.reshape(tw_power_code({scales}), ({count}, 1)).to(tl.uint8)"
    if wide > 1:
        byte = f"tl.broadcast_to({byte}, ({count}, {wide}))"
    first = last.base // UNIT
    at = f"{first} + tl.arange(0, {count})[:, None] * {wide} + tl.arange(0, {wide})[None, :]"
    column = c.values.name(c.scope, "scale_at", at)
    used = -(-rows.k // UNIT)
    limit = f", mask={column} < {used}" if first + count * wide > used else ""
    place = f"{rows.scales} + tw_scale_place({column}, {row}, {rows.num_rows})"
    return [f"tl.store({place}, {byte}{limit})"]
