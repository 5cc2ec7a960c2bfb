"""Triton texts that decode rows of paged states, some columns at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.codegen.emit.triton_rows import power_of_two
from tilewright.graph.types import BF16, BlockFormat, ElementType

COLUMNS = 128  # of a row that are decoded together, at most
LEAST = 16  # of a product's axis


@dataclass(frozen=True)
class Slice:
    """Columns `first` to `first` + `count` of a row, padded to `span`, a power of two."""

    first: int
    count: int
    span: int


def slices_of(
    width: int, formats: Iterable[ElementType], most: int
) -> tuple[Slice, ...]:
    """Cut a row into slices of `most` columns, none with both codes and a tail in any format."""
    tails = {f.tail for f in formats if isinstance(f, BlockFormat)}
    ends = sorted({width - tail for tail in tails} | {width})
    found, first = [], 0
    for end in ends:
        while first < end:
            count = min(most, end - first)
            found.append(Slice(first, count, max(LEAST, power_of_two(count))))
            first += count
    return tuple(found)


def row_cells(dtype: ElementType, width: int) -> int:
    """Cells of a row in memory: bytes of a packed one."""
    return dtype.row_bytes(width) if isinstance(dtype, BlockFormat) else width


def decoded(
    state: str, start: str, seen: str, dtype: ElementType, width: int, cut: Sequence[Slice]
) -> list[str]:
    """Return for each slice the rows that begin at cell `start` [n], as [n, span]; rows that are
    not `seen` are 0."""
    return [_decoded(state, start, seen, dtype, width, s) for s in cut]


def _decoded(
    state: str, start: str, seen: str, dtype: ElementType, width: int, s: Slice
) -> str:
    shape = f"{s.first}, {s.count}, {s.span}"
    if not isinstance(dtype, BlockFormat):
        return f"tw_plain({state}, {start}, {seen}, {shape})"
    coded = width - dtype.tail
    code_bytes = coded * dtype.code.bits // 8
    if s.first >= coded:
        at = code_bytes + 2 * (s.first - coded)
        return f"tw_tail({state}, {start}, {seen}, {at}, {s.count}, {s.span})"
    e4m3 = dtype.scale.name == "fp8_e4m3"
    facts = f"{dtype.code.bits}, {dtype.block[1]}, {e4m3}, {code_bytes + 2 * dtype.tail}"
    return f"tw_coded({state}, {start}, {seen}, {shape}, {facts})"


def product_type(operands: Iterable[ElementType]) -> str:
    """Return the type in which products of these are taken without loss: bf16, or fp32."""
    exact = all(isinstance(t, BlockFormat) or t == BF16 for t in operands)
    return "bfloat16" if exact else "float32"
