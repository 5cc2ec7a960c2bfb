"""Contractions of bf16 in TileLang: schedules, for warp groups of SM90 and the tensor memory of
SM100. What has no program here keeps to Triton; `refuses_tilelang` says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.emit.cuda_chip import SHARED_BYTES
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

TILE_BYTES = SHARED_BYTES - (1 << 10)  # of a block, beside its barriers
SUMS = 128  # of a thread that multiplies: more leave no registers for its products


@dataclass(frozen=True)
class Tile:
    """Rows, columns and values of k of a stage; groups of warps that multiply; stages; `cost`:
    nanoseconds that 64 values of k of it took on an H200 whose cores were all busy; whether
    results leave by the copy engine; teams that take tiles in turn."""

    form: int
    bm: int
    bn: int
    bk: int
    groups: int
    stages: int
    cost: int
    staged: int = 0
    teams: int = 1


TILES = (
    Tile(UPRIGHT, 128, 256, 64, 2, 3, 730, 1), Tile(UPRIGHT, 128, 256, 64, 2, 4, 731),
    Tile(UPRIGHT, 128, 128, 64, 2, 5, 378, 1, 2), Tile(UPRIGHT, 128, 128, 64, 2, 5, 385),
    Tile(UPRIGHT, 128, 128, 64, 2, 4, 394, 1), Tile(UPRIGHT, 128, 128, 64, 2, 4, 448),
    Tile(UPRIGHT, 64, 128, 64, 1, 4, 333), Tile(UPRIGHT, 128, 64, 64, 2, 6, 290, 1),
    Tile(UPRIGHT, 64, 64, 64, 2, 6, 160, 1, 2), Tile(UPRIGHT, 64, 64, 128, 1, 6, 165, 1),
    Tile(UPRIGHT, 64, 64, 128, 1, 6, 166), Tile(TURNED, 64, 64, 128, 1, 6, 167),
    Tile(TURNED, 64, 64, 128, 1, 4, 183), Tile(UPRIGHT, 64, 32, 128, 1, 8, 147),
    Tile(TURNED, 32, 64, 128, 1, 5, 150), Tile(TURNED, 16, 64, 128, 1, 6, 115),
    Tile(TURNED, 8, 64, 256, 1, 5, 77), Tile(TURNED, 8, 64, 128, 1, 8, 105),
    Tile(TURNED, 8, 64, 128, 1, 6, 106),
)  # fmt: skip
# The same for SM100, where a group of warps finishes sums and another brings and issues; nobody has
# run them: costs are what products of so many columns take, and a little.
TILES_IN_MEMORY = (
    Tile(TENSOR_MEMORY, 128, 256, 64, 1, 4, 280), Tile(TENSOR_MEMORY, 128, 128, 64, 1, 6, 160),
    Tile(TENSOR_MEMORY, 128, 64, 64, 1, 6, 100), Tile(TENSOR_MEMORY_TURNED, 64, 128, 64, 1, 8, 101),
    Tile(TENSOR_MEMORY_TURNED, 64, 128, 64, 1, 5, 102),
    Tile(TENSOR_MEMORY_TURNED, 32, 128, 64, 1, 9, 70),
    Tile(TENSOR_MEMORY_TURNED, 16, 128, 64, 1, 10, 60),
    Tile(TENSOR_MEMORY_TURNED, 16, 128, 64, 1, 6, 61),
)  # fmt: skip
COUNT = 6  # so many leave room for Triton's among those that are measured
ADDING = 3000  # nanoseconds of the kernel that adds segments
MOVED = 10500  # bytes a nanosecond that tiles come at, from the L2 for the most part


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
    found: list[tuple[int, Schedule]] = []
    for split in (0, 1) if numerics.segments > 1 else (0,):
        for tile in TILES_IN_MEMORY if in_memory else TILES:
            schedule = _schedule(tile, split=split, cores=cores)
            if _fits(schedule.values, body, numerics, anchors):
                found.append((_cost(tile, body, numerics, anchors, rows, schedule), schedule))
    return [schedule for _, schedule in sorted(found, key=lambda f: f[0])][:COUNT]


def _schedule(tile: Tile, *, split: int, cores: int) -> Schedule:
    return Schedule.of(
        bm=tile.bm, bn=tile.bn, bk=tile.bk, warps=tile.groups * 4, stages=tile.stages, row_warps=4,
        split=split, listed=0, cores=cores, tilelang=tile.form, staged=tile.staged,
        teams=tile.teams,
    )  # fmt: skip


def _cost(
    tile: Tile,
    body: Graph,
    numerics: Numerics,
    anchors: list[Node],
    rows: int,
    schedule: Schedule,
) -> int:
    """Return the nanoseconds that waves of tiles take, or bringing them."""
    values, k = schedule.values, int(body.type_of(anchors[0].inputs[0]).shape[-1])
    beside = numerics.segments if values["split"] else 1
    met = met_weights(body, anchors, split=bool(values["split"]))
    columns = sum(-(-int(a.type.shape[-1]) // tile.bn) for a in anchors) // met
    tiles, steps = -(-rows // tile.bm) * columns * beside, -(-k // (64 * beside))
    taken = -(-tiles // values["cores"]) * tile.cost * met * steps
    taken = max(taken, tiles * (tile.bm + met * tile.bn) * steps * 128 // MOVED)
    return taken + (ADDING + rows * columns * tile.bn * beside // 500 if beside > 1 else 0)


def _fits(
    values: Mapping[str, int], body: Graph, numerics: Numerics, anchors: list[Node]
) -> bool:
    """Say whether a block's stages fit its shared memory, its sums its registers, and steps a
    segment; sums of segments that a block adds need as many registers again."""
    split, form, cut = bool(values["split"]), values["tilelang"], numerics.segments > 1
    met = met_weights(body, anchors, split=split)
    if not met or shared_bytes(values, met) > TILE_BYTES:
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
