"""Where the operands and intermediate rows of a row kernel stand in the unified buffer.

A tile is a number of rows. Operands and results have one copy per stage, so that transfers overlap
with computing; intermediates and what all rows share have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.spec import KernelSpec
from tilewright.graph.errors import LowerError

UB_BYTES = 221184  # what a kernel with SIMT functions may use: their cache takes the rest
BLOCK = 32  # alignment of transfers, in bytes


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def stacked(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return where each part of these sizes in bytes starts, one after the other."""
    places, at = {}, 0
    for part, num_bytes in sizes.items():
        places[part] = at
        at += aligned(num_bytes)
    return places


def stacked_bytes(sizes: Mapping[str, int]) -> int:
    """Return what all parts take together."""
    return sum(map(aligned, sizes.values()))


def places_of(spec: KernelSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return where each part of these sizes in bytes starts, one after the other.

    Raises LowerError where they do not fit the unified buffer.
    """
    total = stacked_bytes(sizes)
    if total > UB_BYTES:
        raise LowerError(
            f"{spec.kind} kernel '{spec.symbol}': does not fit the unified buffer: got {total} "
            f"bytes, want at most {UB_BYTES}"
        )
    return stacked(sizes)


@dataclass(frozen=True)
class Region:
    """`row_bytes` hold `width` bytes of each row (0: one copy for all rows)."""

    name: str
    ctype: str
    width: int
    staged: bool
    shared: bool = False

    @property
    def row_bytes(self) -> int:
        return aligned(self.width)


@dataclass(frozen=True)
class Layout:
    """Regions with their offsets, for `rows` rows a tile and `stages` copies of staged ones."""

    rows: int
    stages: int
    offsets: dict[str, int]
    stage_bytes: int
    total: int


def plan(regions: list[Region], *, name: str, most_rows: int = 32) -> Layout:
    """Choose the largest tile that fits, two stages if they cost no more than half of it.

    Raises LowerError if one row does not fit.
    """
    rows = most_rows
    while rows >= 1:
        for stages in (2, 1):
            layout = _place(regions, rows, stages)
            if layout.total <= UB_BYTES:
                return layout
        rows //= 2
    raise LowerError(
        f"row kernel '{name}': one row does not fit the unified buffer: got "
        f"{_place(regions, 1, 1).total} bytes, want at most {UB_BYTES}"
    )


def fits(regions: list[Region]) -> bool:
    """Say whether one row of all regions fits."""
    return _place(regions, 1, 1).total <= UB_BYTES


def _place(regions: list[Region], rows: int, stages: int) -> Layout:
    offsets: dict[str, int] = {}
    at = 0
    for region in (r for r in regions if r.staged):
        offsets[region.name] = at
        at += region.row_bytes * rows
    stage_bytes = at
    at *= stages
    for region in (r for r in regions if not r.staged):
        offsets[region.name] = at
        at += region.row_bytes * (1 if region.shared else rows)
    return Layout(rows, stages, offsets, stage_bytes, at)
