"""The most shared memory that a contraction's tiles take. Sections do not share their stages."""

from __future__ import annotations

# Rows, columns, values of k of a tile; warps; stages of its loads.
Tile = tuple[int, int, int, int, int]


def value_bytes(tile: Tile, sections: int, weights: int) -> int:
    """Of bf16 rows and weights."""
    bm, bn, bk, _, stages = tile
    return stages * (sections * bm + weights * bn) * bk * 2


def code_bytes(tile: Tile, sections: int, weights: int) -> int:
    """Of bf16 rows and integer codes, counted as a byte each, and of both bf16 parts of what a step
    decodes."""
    bm, bn, bk, _, stages = tile
    return stages * (2 * sections * bm + weights * bn) * bk + weights * 2 * bn * bk * 2
