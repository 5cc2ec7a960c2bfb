"""Contractions of bf16 in TileLang: schedules, for warp groups of SM90 and the tensor memory of
SM100. What has no program here keeps to Triton; `refuses_tilelang` says why."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.emit.tilelang import (
    SUM_COLUMNS,
    TENSOR_MEMORY,
    TENSOR_MEMORY_TURNED,
    TURNED,
    UPRIGHT,
    met_weights,
    refuses_tilelang,
    shared_bytes,
)
from tilewright.codegen.numerics import segment_length
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.graph import Graph, Node

SHARED_BYTES = 226 << 10  # of a block, beside its barriers
SUMS = 128  # of a thread that multiplies: more leave no registers for its products


@dataclass(frozen=True)
class Tile:
    """Rows, columns and values of k of a stage; groups of warps that multiply; stages."""

    form: int
    bm: int
    bn: int
    bk: int
    groups: int
    stages: int


MANY = (
    Tile(UPRIGHT, 128, 256, 64, 2, 4), Tile(UPRIGHT, 128, 128, 64, 2, 4),
    Tile(UPRIGHT, 64, 128, 64, 1, 4),
)  # fmt: skip
FEW = (
    Tile(TURNED, 8, 64, 128, 1, 8), Tile(TURNED, 8, 64, 128, 1, 6), Tile(TURNED, 16, 64, 128, 1, 6),
    Tile(TURNED, 32, 64, 128, 1, 5), Tile(TURNED, 64, 64, 128, 1, 4),
)  # fmt: skip
# The same for SM100: a group of warps finishes sums, another brings and issues.
MANY_IN_MEMORY = (
    Tile(TENSOR_MEMORY, 128, 256, 64, 1, 4), Tile(TENSOR_MEMORY, 128, 128, 64, 1, 6),
    Tile(TENSOR_MEMORY, 128, 64, 64, 1, 6),
)  # fmt: skip
FEW_IN_MEMORY = (
    Tile(TENSOR_MEMORY_TURNED, 16, 128, 64, 1, 10), Tile(TENSOR_MEMORY_TURNED, 32, 128, 64, 1, 9),
    Tile(TENSOR_MEMORY_TURNED, 64, 128, 64, 1, 8), Tile(TENSOR_MEMORY_TURNED, 16, 128, 64, 1, 6),
    Tile(TENSOR_MEMORY_TURNED, 64, 128, 64, 1, 5),
)  # fmt: skip


def tile_schedules(
    body: Graph,
    numerics: Numerics,
    anchors: list[Node],
    rows: int,
    *,
    cores: int,
    in_memory: bool,
) -> list[Schedule]:
    """Tiles for that many rows, best first; none where a contraction has no program. `in_memory`:
    of a chip whose sums lie in tensor memory."""
    if refuses_tilelang(body, numerics, anchors):
        return []
    many = MANY_IN_MEMORY if in_memory else MANY
    few = sorted(FEW_IN_MEMORY if in_memory else FEW, key=lambda t: (t.bm < min(rows, 64), t.bm))
    found = [*few[:2], many[-1]] if rows <= 64 else list(many)
    cut = numerics.segments > 1
    splits = [0] if not cut else [1, 0] if rows <= 64 else [0, 1]
    return [
        Schedule.of(bm=t.bm, bn=t.bn, bk=t.bk, warps=t.groups * 4, stages=t.stages, row_warps=4,
                    split=split, listed=0, cores=cores, tilelang=t.form)
        for split in splits
        for t in found
        if _fits(t, body, numerics, anchors, split=bool(split))
    ]  # fmt: skip


def _fits(
    tile: Tile, body: Graph, numerics: Numerics, anchors: list[Node], *, split: bool
) -> bool:
    """Say whether a block's stages fit its shared memory, its sums its registers, and steps a
    segment; sums of segments that a block adds need as many registers again."""
    met = met_weights(body, anchors, split=split)
    k = int(body.type_of(anchors[0].inputs[0]).shape[-1])
    values = {"bm": tile.bm, "bn": tile.bn, "bk": tile.bk, "stages": tile.stages}
    cut = numerics.segments > 1
    if tile.form >= TENSOR_MEMORY:
        columns = met * (tile.bm if tile.form == TENSOR_MEMORY_TURNED else tile.bn)
        fits = 0 < met and columns <= SUM_COLUMNS and (split or not cut)
        return fits and shared_bytes(values, met) <= SHARED_BYTES
    held = met * (2 if cut and not split else 1)
    sums = held * tile.bm * tile.bn // (tile.groups * 128)
    whole = not cut or segment_length(k, numerics.segments) % tile.bk == 0
    return 0 < met and whole and sums <= SUMS and shared_bytes(values, met) <= SHARED_BYTES
