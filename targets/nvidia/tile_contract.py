"""Contractions of bf16 in TileLang: schedules, for warp groups of SM90 and the tensor memory of
SM100. What has no program here keeps to Triton; `refuses_tilelang` says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.emit.tilelang import (
    BOX,
    SUM_COLUMNS,
    TENSOR_MEMORY,
    TENSOR_MEMORY_TURNED,
    TURNED,
    UPRIGHT,
    met_weights,
    refuses_staging,
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
    """Rows, columns and values of k of a stage; groups of warps that multiply; stages; whether
    results leave by the copy engine; teams that take tiles in turn."""

    form: int
    bm: int
    bn: int
    bk: int
    groups: int
    stages: int
    staged: int = 0
    teams: int = 1


MANY = (
    Tile(UPRIGHT, 128, 256, 64, 2, 3, 1), Tile(UPRIGHT, 128, 256, 64, 2, 4),
    Tile(UPRIGHT, 128, 128, 64, 2, 6), Tile(UPRIGHT, 128, 128, 64, 2, 4, 1),
    Tile(UPRIGHT, 128, 128, 64, 2, 5, 1, 2), Tile(UPRIGHT, 64, 128, 64, 2, 6, 1, 2),
    Tile(UPRIGHT, 64, 128, 64, 1, 4),
)  # fmt: skip
FEW = (
    Tile(TURNED, 8, 64, 128, 1, 8), Tile(TURNED, 8, 64, 128, 1, 6), Tile(TURNED, 16, 64, 128, 1, 6),
    Tile(TURNED, 32, 64, 128, 1, 5), Tile(UPRIGHT, 64, 32, 128, 1, 8),
    Tile(TURNED, 64, 64, 128, 1, 4), Tile(UPRIGHT, 64, 64, 128, 1, 6),
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
    cut = numerics.segments > 1
    splits = [0] if not cut else [1, 0] if rows <= 64 else [0, 1]
    return [
        schedule
        for split in splits
        for schedule in (
            Schedule.of(bm=t.bm, bn=t.bn, bk=t.bk, warps=t.groups * 4, stages=t.stages,
                        row_warps=4, split=split, listed=0, cores=cores, tilelang=t.form,
                        staged=t.staged, teams=t.teams)
            for t in (few[:3] if rows <= 64 else many)
        )
        if _fits(schedule.values, body, numerics, anchors)
    ]  # fmt: skip


def _fits(
    values: Mapping[str, int], body: Graph, numerics: Numerics, anchors: list[Node]
) -> bool:
    """Say whether a block's stages fit its shared memory, its sums its registers, and steps a
    segment; sums of segments that a block adds need as many registers again."""
    split, form, cut = bool(values["split"]), values["tilelang"], numerics.segments > 1
    met = met_weights(body, anchors, split=split)
    if not met or shared_bytes(values, met) > SHARED_BYTES:
        return False
    if form >= TENSOR_MEMORY:
        across = values["bm"] if form == TENSOR_MEMORY_TURNED else values["bn"]
        return met * across <= SUM_COLUMNS and (split or not cut)
    if values["staged"] and (split or values["bn"] % BOX or refuses_staging(body, anchors)):
        return False
    k = int(body.type_of(anchors[0].inputs[0]).shape[-1])
    held = met * (2 if cut and not split else 1)
    sums = held * values["bm"] * values["bn"] * values["teams"] // (values["warps"] * 32)
    return sums <= SUMS and (not cut or segment_length(k, numerics.segments) % values["bk"] == 0)
