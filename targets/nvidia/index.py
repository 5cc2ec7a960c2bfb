"""Selection of entries on NVIDIA chips: what the template accepts, its schedules, its workspace."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.emit.cuda_index import WIDTH, index_parts, segment_of
from tilewright.codegen.emit.triton_index import selection_parts, streams_of
from tilewright.codegen.emit.triton_paged import product_type
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.graph import Graph
from tilewright.graph.dims import DimJson, evaluate, symbols_of
from tilewright.graph.types import element_type
from tilewright.targets.nvidia.latent import SECTION, refused_row

MOST_CHOSEN = 4096
MOST_SLAB = 128  # tokens whose scores are kept at once
MXFP4_ROWS = element_type("fp4_e2m1[g=32,axis=1,scale=ue8m0]")
_MOST_HEADS, _TILES = 128, (128, 256)
_KEYS_A_WARP = 1024  # of a full buffer, held in registers while it is cut


def accepts_select(body: Graph) -> str | None:
    """Return why the template cannot express a body, or None."""
    if len(body.nodes) != 1:
        return f"a selection stands alone: got {len(body.nodes)} nodes"
    (node,) = body.nodes
    q, keys = body.type_of(node.inputs[0]), body.type_of(node.inputs[2])
    if reason := refused_row(keys.dtype, int(keys.shape[2])):
        return reason
    if int(q.shape[1]) > _MOST_HEADS:
        return f"{q.shape[1]} heads: want at most {_MOST_HEADS}"
    if product_type([q.dtype, keys.dtype]) == "float32" and int(q.shape[2]) > _TILES[0]:
        return f"fp32 keys are {q.shape[2]} wide, want at most {_TILES[0]}"
    chosen = max(int(str(node.attr.get(name, 0))) for name in ("k", "blocks"))
    if chosen > MOST_CHOSEN:
        return f"{chosen} are selected, want at most {MOST_CHOSEN}"
    size = int(str(node.attr.get("block_size", 1)))
    if size & (size - 1) or size > _TILES[0]:
        return f"blocks of {size} entries: want a power of two up to {_TILES[0]}"
    if len(node.inputs) > 6 and symbols_of(body.type_of(node.inputs[6]).shape[1:]):
        return "the count of candidate blocks is symbolic"
    return None


def accepts_hopper(body: Graph) -> str | None:
    """Return why the kernels for Hopper's matrix cores cannot express a body, or None."""
    if reason := accepts_select(body):
        return reason
    (node,) = body.nodes
    q, w, keys = (body.type_of(i) for i in node.inputs[:3])
    if q.shape[1] not in (32, 64) or q.shape[2] != WIDTH:
        return f"{q.shape[1]} heads of {q.shape[2]}: want 32 or 64 heads of {WIDTH}"
    if keys.dtype != MXFP4_ROWS:
        return f"keys are {keys.dtype}, want {MXFP4_ROWS}"
    if product_type([q.dtype, keys.dtype]) != "bfloat16":
        return f"queries are {q.dtype}, want bf16"
    if w.dtype.name not in ("f32", "bf16"):
        return f"weights are {w.dtype}, want f32 or bf16"
    if segment_of(body) is None:
        return f"pages of {keys.shape[1]} entries: want multiples of 4, and of blocks likewise"
    return None


def hopper_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Few tokens are scored in short spans; the workspace holds the scores of one slab."""
    slab = 4
    while slab < min(rows, MOST_SLAB):
        slab *= 2
    spans = (256,) if rows <= 16 else (1024,) if rows <= 64 else (4096,)
    return tuple(Schedule.of(slab=slab, span=span) for span in spans)


def hopper_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Keys of a slab's scores, and its lists of candidates."""
    (node,) = body.nodes
    listed = int(body.type_of(node.inputs[6]).shape[1]) if len(node.inputs) > 6 else 0
    limit = (
        listed * int(str(node.attr["block_size"]))
        if listed
        else evaluate(body.type_of(node.inputs[5]).shape[1], bounds)
        * int(body.type_of(node.inputs[2]).shape[1])
    )
    parts = index_parts(node, schedule, limit, listed).values()
    return sum(-(-_number(size) // SECTION) * SECTION for _, size in parts)


def _number(size: DimJson) -> int:
    return int(size[1]) * int(size[2]) if isinstance(size, list) else int(size)


def select_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Long rows of few tokens are split over the chip; many tokens fill it with a program each.

    Buffers are cut in registers, so that large ones need more warps.
    """
    (node,) = body.nodes
    few = rows <= 16
    splits = (32, 8, 1) if rows <= 4 else (8, 32, 1) if few else (1, 2, 4)[: 1 if rows > 128 else 3]
    found = []
    for tile in _TILES:
        most = max(s.capacity for s in streams_of(node, tile))
        least = min(16, max(4, most // _KEYS_A_WARP))
        for warps in dict.fromkeys((least, min(16, 2 * least))):
            found += [
                Schedule.of(tile=tile, parts=parts, warps=warps, stages=1) for parts in splits
            ]
    return tuple(dict.fromkeys(found))


def select_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Buffers of the choices, and lists of candidates."""
    (node,) = body.nodes
    listed = int(body.type_of(node.inputs[6]).shape[1]) if len(node.inputs) > 6 else 0
    tokens = evaluate(node.type.shape[0], bounds)
    parts = selection_parts(node, schedule, tokens, listed)
    sizes = (int(size[1]) * int(size[2]) for _, size in parts.values() if isinstance(size, list))
    return sum(-(-size // SECTION) * SECTION for size in sizes)
