"""Contractions on NVIDIA chips: what is accepted, schedules, scratch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tilewright.codegen.emit.cuda_chip import SHARED_BYTES
from tilewright.codegen.emit.cuda_scaled import SCALED, refuses_scaled, sums_meet
from tilewright.codegen.emit.triton_contract import contractions, workspace_parts
from tilewright.codegen.numerics import CODE_ATOMS
from tilewright.codegen.pack_gpu import refuses_format
from tilewright.codegen.pack_tiles import SPAN, TILE_BITS
from tilewright.codegen.sections import sections_of
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate, from_json, symbols_of
from tilewright.graph.types import BlockFormat
from tilewright.targets.nvidia.decoded_contract import decoded_schedules
from tilewright.targets.nvidia.shared_memory import Tile, code_bytes, value_bytes
from tilewright.targets.nvidia.tile_contract import tile_schedules

SECTION = 256  # alignment of buffers in the workspace


def accepts_contract(body: Graph) -> str | None:
    """Return why a body is refused, or None."""
    anchors = contractions(body)
    for node in anchors:
        x, w = (body.type_of(i) for i in node.inputs[:2])
        if node.inputs[1] not in body.weight:
            return "second operand is computed, want a weight"
        if symbols_of(w.shape):
            return f"weight extents are symbolic: {w}"
        if refusal := refuses_format(w):
            return refusal
        if node.op == "linear":
            if x.rank != 2:
                return f"activation has rank {x.rank}, want 2"
        elif refusal := _refuses_stack(body, node, anchors):
            return refusal
    return None


def _refuses_stack(body: Graph, node: Node, anchors: list[Node]) -> str | None:
    """Say why rows cannot be brought to the matrices of a node's weight."""
    if any(n.op != node.op or n.inputs[2:] != node.inputs[2:] for n in anchors):
        return f"'{node.op}' stands beside rows that are routed otherwise"
    if node.inputs[0] in body.node:
        return "activation is computed inside, want rows in memory"
    return None


_LED_ROWS = 256
# Programs in TileLang lead where rows are so long, or two products of many rows meet: on an H200
# their pipelines win there, and lose else, where what follows the sums is most of the time.
_LED_BY_TILELANG = 2048
_FEW_ROWS = 32
_FEW_SLOTS = 64  # more have blocks enough without segments beside each other


def contract_schedules(
    body: Graph, numerics: Numerics, rows: int, *, cores: int, in_memory: bool = False
) -> tuple[Schedule, ...]:
    """Narrow tiles fill the chip with few rows, wide ones reuse what they load with many.

    Segments run beside each other (split) where rows are few: what they give is the same. `rows`
    are tokens; of experts, how many rows one meets is known for an even load only. Streams have a
    program for each of the chip's `cores`. `in_memory`: sums may lie in tensor memory.
    """
    anchors = contractions(body)
    first = anchors[0]
    meets = rows
    if first.op == "expert_linear":
        slots, matrices = int(first.type.shape[1]), int(body.type_of(first.inputs[1]).shape[0])
        meets = -(-rows * slots // matrices)
    few = meets <= _FEW_ROWS
    if first.op == "expert_linear":
        few = few and rows * slots <= _FEW_SLOTS
    ordered = _tiles(body, anchors, numerics, meets, cores, few=few)
    beside = few or _plain(body, anchors) or _leaves_cores(
        body, anchors, rows, ordered[0], cores
    )
    streamed = [
        Schedule.of(**s.values, cores=cores) for s in _streams(body, anchors, numerics, rows)
    ]
    least = 0 if numerics.atom in CODE_ATOMS else 256
    found = [
        Schedule.of(
            bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, row_warps=4, split=split,
            listed=listed,
        )
        for split, listed in _forms(first, numerics, rows, beside=beside)
        for bm, bn, bk, warps, stages in ordered
    ]
    early = 3 if rows >= least else 0
    tiles = tile_schedules(body, numerics, anchors, rows, cores=cores, in_memory=in_memory)
    found = [*decoded_schedules(body, anchors, rows, cores=cores), *found]
    in_triton = [*streamed[:early], *found[:8], *streamed[early:], *found[8:]]
    many, met = rows > 64, len(anchors) > len(sections_of(body, anchors))
    long = _LED_BY_TILELANG <= int(body.type_of(first.inputs[0]).shape[-1])
    lead = tiles if (long and (many or not in_memory)) or (met and many) else []
    return tuple(dict.fromkeys([*lead, *in_triton[:8], *tiles, *in_triton[8:]]))


_FEW_SCALED = 64  # rows of which half of a block would be empty
# Rows, columns of a tile; stages. Two groups of warps share the rows, or the columns.
_STREAMS = ((128, 128, 6), (64, 256, 5), (128, 128, 4), (64, 256, 3))


def _streams(
    body: Graph, anchors: list[Node], numerics: Numerics, rows: int
) -> list[Schedule]:
    """Tiles that the copy engine brings, for products of fp8 codes of a whole number of spans.
    Segments lie beside each other: two products in turn leave no registers for their sums."""
    formats = _formats(body, anchors)
    if not formats:
        return _plain_streams(body, anchors, numerics)
    k = int(body.type_of(anchors[0].inputs[0]).shape[-1])
    fits = (
        numerics.atom == "wgmma_e4m3"
        and k % SPAN == 0
        and all(n.op == "linear" for n in anchors)
        and all(f.name == "fp8_e4m3" and f.block[0] % 32 == 0 for f in formats)
    )
    if not fits:
        return []
    alone = len(sections_of(body, anchors)) == len(anchors)
    split = int(not alone or numerics.segments > 1)
    tiles = sorted(_STREAMS, key=lambda tile: tile[0] == 128) if rows <= 64 else _STREAMS
    few = [
        Schedule.of(bm=bm, bn=64, bk=SPAN, warps=4, stages=stages, row_warps=4, split=split,
                    listed=0, stream=2)
        for bm, stages in ((8, 4), (16, 4), (8, 6))
        if rows <= bm
    ]  # fmt: skip
    return few + _scaled(body, anchors, numerics, rows) + [
        Schedule.of(bm=bm, bn=bn, bk=SPAN, warps=4, stages=stages, row_warps=4, split=split,
                    listed=0, stream=1)
        for bm, bn, stages in tiles
    ]  # fmt: skip


def _scaled(
    body: Graph, anchors: list[Node], numerics: Numerics, rows: int
) -> list[Schedule]:
    """The kernel in CUDA, whose blocks are of many rows."""
    if refuses_scaled(body, numerics, anchors) or rows <= _FEW_SCALED:
        return []
    split = int(numerics.segments > 1 or not sums_meet(body, anchors))
    return [
        Schedule.of(bm=128, bn=256, bk=SPAN, warps=4, stages=3, row_warps=4, split=split, listed=0,
                    stream=SCALED)
    ]  # fmt: skip


_PLAIN_STREAMS = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4))
_PAIR_STREAMS = ((128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 3))


def _plain_streams(body: Graph, anchors: list[Node], numerics: Numerics) -> list[Schedule]:
    """The same of bf16 rows and weights, of sums that are not cut and meet in one epilogue."""
    types = [body.type_of(i) for n in anchors for i in n.inputs[:2]]
    fits = (
        numerics.segments == 1
        and all(t.dtype.name == "bf16" and int(t.shape[-1]) % 8 == 0 for t in types)
        and all(n.op == "linear" for n in anchors)
        and len(sections_of(body, anchors)) == 1
        and len(anchors) <= 2
    )
    # On their way out fp32 results of a wide tile take as much memory as its stages.
    narrow = len(anchors) > 1 or any(body.type_of(v).dtype.name == "f32" for _, v in body.outputs)
    tiles = _PAIR_STREAMS if narrow else _PLAIN_STREAMS
    return [
        Schedule.of(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, row_warps=4, split=0,
                    listed=0, stream=1)
        for bm, bn, bk, warps, stages in tiles
        if fits
    ]  # fmt: skip


def _forms(
    first: Node, numerics: Numerics, rows: int, *, beside: bool
) -> list[tuple[int, int]]:
    """Whether segments are split, and whether rows that meet a stack of matrices are listed.

    `beside`: few rows, products in fp32 on the plain cores, or so few columns that a few hundred
    rows do not fill the chip either: segments run beside each other.

    Lists take two kernels more; without them every program looks through all the ids.
    """
    splits = [0] if numerics.segments == 1 else [1, 0] if beside else [0, 1]
    lists = [0]
    if first.op == "expert_linear":
        lists = [0, 1] if rows * int(first.type.shape[1]) <= _LED_ROWS else [1, 0]
    return [(split, listed) for listed in lists for split in splits]


def _formats(body: Graph, anchors: list[Node]) -> list[BlockFormat]:
    types = [body.type_of(n.inputs[1]).dtype for n in anchors]
    return [t for t in types if isinstance(t, BlockFormat)]


def _leaves_cores(
    body: Graph, anchors: list[Node], rows: int, tile: Tile, cores: int
) -> bool:
    """Whether tiles of bf16 weights are fewer than the cores of the chip."""
    columns = sum(int(n.type.shape[-1]) for n in anchors)
    return not _formats(body, anchors) and -(-rows // tile[0]) * -(-columns // tile[1]) < cores


def _plain(body: Graph, anchors: list[Node]) -> bool:
    types = {body.type_of(i).dtype.name for n in anchors for i in n.inputs[:2]}
    return not types.isdisjoint(("f32", "f16"))


def _tiles(
    body: Graph, anchors: list[Node], numerics: Numerics, meets: int, cores: int, *, few: bool
) -> list[Tile]:
    """Tiles for that many rows first, then the others."""
    formats, sections = _formats(body, anchors), len(sections_of(body, anchors))
    if _plain(body, anchors):
        return _FP32
    if any(f.name not in TILE_BITS for f in formats):
        found = [*_FEW_CODES, *_MANY_CODES] if few else [*_MANY_CODES, *_FEW_CODES]
        return [t for t in found if code_bytes(t, sections, len(anchors)) <= SHARED_BYTES]
    if formats:
        least = 8 if len(formats) == len(anchors) else 16  # rows are the left operand of values
        met = max(len([n for n in nodes if n in anchors]) for nodes in sections_of(body, anchors))
        tiles = [
            (bm, bn, bk, warps, stages)
            for bm, bn, bk, warps, stages in _TILES
            if bm >= least and met * bm * bn <= _SUMS * warps * 32
        ]
        return sorted(tiles, key=lambda tile: _tile_cost(tile, meets))
    whole = _FEW_WHOLE if numerics.segments == 1 else []
    if few:
        found = [*whole, *_FEW, *_MANY]
    elif meets <= 64:
        found = [*([(64, 32, 128, 4, 5), (64, 64, 128, 4, 4)] if whole else []), *_MANY, *_FEW]
    else:
        # An H200 runs 512 rows up to 1.5 times faster on this tile than on 64 x 64.
        wide: Tile = (128, 128, 64, 8, 3)
        leads = meets >= 256 and not _leaves_cores(body, anchors, meets, wide, cores)
        found = [*([wide] if leads else []), *_MANY, *_FEW]
    return [t for t in found if value_bytes(t, sections, len(anchors)) <= SHARED_BYTES]


def _tile_cost(tile: Tile, rows: int) -> int:
    """What a column costs in tiles of that many rows, fitted to times on an H200: to bring and
    decode weights for a tile takes as long as to multiply them by 24 rows."""
    return -(-rows // tile[0]) * (24 + tile[0])


# Without segments few columns a block fill the chip, with long steps: measured on an H200 at 4,096
# columns and more.
_FEW_WHOLE: list[Tile] = [(16, 16, 256, 1, 4), (16, 16, 256, 2, 4), (16, 32, 128, 4, 5)]
_FEW: list[Tile] = [
    (16, bn, bk, warps, stages)
    for bk, stages in ((128, 4), (256, 3), (64, 5))
    for bn, warps in ((32, 4), (16, 1), (32, 2), (64, 4), (16, 4), (128, 4))
]
_MANY: list[Tile] = [
    (bm, bn, bk, warps, stages)
    for bk, stages in ((64, 3), (64, 4), (32, 4))
    for bm, bn, warps in ((64, 64, 4), (128, 128, 8), (64, 128, 4), (128, 64, 4), (32, 64, 4),
                          (64, 32, 4))
]  # fmt: skip
# Integer codes come as words, so that tiles of any height meet the values of k in their own order
# (templates/triton/tw_words.triton). Orders are those of a sweep on an H200 over SmolLM2's layers.
_FEW_CODES: list[Tile] = [
    (16, 16, 256, 4, 2), (16, 32, 256, 8, 2), (16, 32, 128, 4, 3), (16, 16, 128, 2, 3),
    (16, 16, 128, 4, 3), (32, 32, 128, 4, 3), (16, 32, 128, 8, 2), (16, 16, 256, 2, 2),
]  # fmt: skip
_MANY_CODES: list[Tile] = [
    (64, 64, 64, 4, 3), (64, 32, 128, 8, 2), (64, 32, 64, 4, 3), (128, 64, 64, 8, 3),
    (128, 32, 64, 8, 3), (32, 32, 128, 4, 3),
]  # fmt: skip
_SUMS = 64  # of products that meet, a thread: more leave no registers for the products themselves
# Steps are spans, whatever `bk` says. With 64 columns or more, on four warps or eight, float
# codes meet the matrix instruction of groups of warps in every schedule.
_TILES: list[Tile] = [
    (bm, bn, 128, warps, stages)
    for bm, bn, warps, stages in (
        (8, 64, 4, 4), (8, 128, 4, 3), (8, 64, 4, 3), (8, 128, 8, 3), (16, 64, 4, 4),
        (16, 128, 4, 3), (32, 64, 4, 3), (32, 128, 8, 3), (64, 64, 4, 3), (64, 128, 8, 3),
        (128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2),
    )
]  # fmt: skip
# Products in fp32 run on the plain cores: tiles that their registers hold.
_FP32: list[Tile] = [
    (16, 32, 32, 4, 2), (16, 16, 32, 2, 2), (16, 64, 32, 4, 2), (32, 32, 32, 4, 2),
    (32, 64, 32, 4, 2), (16, 32, 64, 4, 2), (16, 32, 32, 2, 2), (16, 16, 64, 2, 2),
    (16, 16, 128, 4, 3), (16, 32, 128, 4, 2),
]  # fmt: skip


def contract_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes of the rows a prologue makes, the lists of routed rows, and the sums of segments."""
    parts = workspace_parts(body, numerics, schedule)
    sizes = [evaluate(from_json(size), bounds) for _, size in parts.values()]
    return sum(-(-size // SECTION) * SECTION for size in sizes) or SECTION


def contract_template(cores: int, *, in_memory: bool = False) -> KernelTemplate:
    """Return the template for a chip of so many cores, with tensor memory or without."""
    return KernelTemplate(
        "contract", "contract", "triton/contract.py.j2", accepts_contract,
        partial(contract_schedules, cores=cores, in_memory=in_memory), contract_scratch,
    )  # fmt: skip
