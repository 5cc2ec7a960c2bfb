"""Kernel templates of NVIDIA chips: what they accept, their schedules, their scratch."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.pack_gpu import BLOCK_LAYOUTS
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate, symbols_of
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat
from tilewright.targets.nvidia.index import accepts_select, select_schedules, select_scratch
from tilewright.targets.nvidia.latent import accepts_latent, latent_schedules, latent_scratch

SECTION = 256  # alignment of buffers in the workspace


def _anchors(body: Graph, kind: Kind) -> list[Node]:
    return [n for n in body.nodes if op_def(n.op).kind is kind]


# --- row kernels --------------------------------------------------------------------------------


def accepts_row(body: Graph) -> str | None:
    for kind in (Kind.CONTRACT, Kind.ATTEND, Kind.COMPOSITE):
        if found := _anchors(body, kind):
            return f"holds a {kind.value} node '{found[0].op}'"
    return None


def row_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    return tuple(Schedule.of(warps=w) for w in (4, 2, 8, 1))


# --- contractions -------------------------------------------------------------------------------


def accepts_contract(body: Graph) -> str | None:
    for node in _anchors(body, Kind.CONTRACT):
        x, w = (body.type_of(i) for i in node.inputs)
        if x.rank != 2:
            return f"activation has rank {x.rank}, want 2"
        if node.inputs[1] not in body.weight:
            return "second operand is computed, want a weight"
        if symbols_of(w.shape):
            return f"weight extents are symbolic: {w}"
        if isinstance(w.dtype, BlockFormat):
            if w.dtype.name not in BLOCK_LAYOUTS or w.dtype.block[0] != 1:
                return f"weight format {w.dtype} has no packed layout"
            if int(w.shape[1]) % w.dtype.block[1]:
                return f"k = {w.shape[1]} is no multiple of the group of {w.dtype.block[1]}"
    return None


def contract_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Narrow tiles fill the chip with few rows, wide ones reuse what they load with many.

    Quantised weights take the same matrix instruction in every schedule, that of tiles of at most
    32 rows: larger ones meet another, which groups the products of decoded codes otherwise.
    """
    types = {body.type_of(i).dtype for n in _anchors(body, Kind.CONTRACT) for i in n.inputs}
    if any(t.name in ("f32", "f16") for t in types):
        ordered = _FP32
    elif any(isinstance(t, BlockFormat) for t in types):
        ordered = [*_FEW_CODES, *_MANY_CODES] if rows <= 128 else [*_MANY_CODES, *_FEW_CODES]
    else:
        ordered = [*_FEW, *_MANY] if rows <= 32 else [*_MANY, *_FEW]
        # An H200 runs 512 rows up to 1.5 times faster on this tile than on 64 x 64.
        ordered = [(128, 128, 64, 8, 3), *ordered] if rows >= 256 else ordered
    found = [
        Schedule.of(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, row_warps=4)
        for bm, bn, bk, warps, stages in ordered
    ]
    return tuple(dict.fromkeys(found))


# Rows, columns, values of k of a tile; warps; stages of its loads.
_Tile = tuple[int, int, int, int, int]
_FEW: list[_Tile] = [
    (16, bn, bk, warps, stages)
    for bk, stages in ((128, 4), (256, 3), (64, 5))
    for bn, warps in ((32, 4), (16, 1), (32, 2), (64, 4), (16, 4), (128, 4))
]
_MANY: list[_Tile] = [
    (bm, bn, bk, warps, stages)
    for bk, stages in ((64, 3), (64, 4), (32, 4))
    for bm, bn, warps in ((64, 64, 4), (128, 128, 8), (64, 128, 4), (128, 64, 4), (32, 64, 4),
                          (64, 32, 4))
]  # fmt: skip
# Proven on an H200 to give one result, for Q4_1 and Q8_0; a step of 32 values of k gave another.
_FEW_CODES: list[_Tile] = [
    (16, 32, 128, 2, 3), (16, 16, 256, 2, 2), (16, 16, 128, 1, 3), (16, 16, 256, 1, 2),
    (16, 16, 64, 4, 4), (16, 32, 128, 2, 4), (16, 16, 256, 2, 3), (16, 16, 128, 1, 4),
]  # fmt: skip
_MANY_CODES: list[_Tile] = [
    (32, 64, 64, 4, 3), (32, 128, 64, 4, 3), (32, 64, 64, 4, 4), (32, 64, 64, 4, 2),
]  # fmt: skip
# Products in fp32 run on the plain cores: tiles that their registers hold.
_FP32: list[_Tile] = [
    (16, 32, 32, 4, 2), (16, 16, 32, 2, 2), (16, 64, 32, 4, 2), (32, 32, 32, 4, 2),
    (32, 64, 32, 4, 2), (16, 32, 64, 4, 2), (16, 32, 32, 2, 2), (16, 16, 64, 2, 2),
]  # fmt: skip


def contract_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """The rows that a prologue makes."""
    anchor = _anchors(body, Kind.CONTRACT)[0]
    value = anchor.inputs[0]
    if value not in body.node:
        return SECTION
    return _up(evaluate(body.type_of(value).num_bytes, bounds)) or SECTION


def _up(num_bytes: int) -> int:
    return -(-num_bytes // SECTION) * SECTION


# --- attention ----------------------------------------------------------------------------------


_TILE_ROWS = 32  # query heads of a kv head, of several tokens


def accepts_attend(body: Graph) -> str | None:
    (node,) = _anchors(body, Kind.ATTEND)
    if node.op != "attend":
        return f"'{node.op}' reads rows that are keys and values"
    cache = body.type_of(node.inputs[1])
    if str(cache.dtype) not in ("f32", "bf16"):
        return f"cache is {cache.dtype}, want f32 or bf16"
    width = int(cache.shape[3])
    return None if width <= 256 else f"head width {width} is more than 256"


def attend_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Few tokens split a long context over the chip; many fill it with a program each; steps so
    large that they are prompts share the keys of neighbours.

    Tiles have at most 32 rows: more meet another matrix instruction than a token alone.
    """
    (node,) = _anchors(body, Kind.ATTEND)
    each = int(node.type.shape[1]) // int(body.type_of(node.inputs[1]).shape[1])
    tile = max(1, _TILE_ROWS // each)
    forms = [(1, 1), (0, 1)] if rows <= 16 else [(0, 1)]
    if rows > 256:
        forms = [(0, tile), (0, 1)]
    return tuple(
        dict.fromkeys(
            Schedule.of(split=split, tile=tile, warps=warps, stages=stages)
            for split, tile in forms
            for stages in (2, 1, 3)
            for warps in (4, 8, 2)
        )
    )


def attend_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Maxima, sums and mixed values of every chunk, where chunks are split."""
    if not schedule.values["split"]:
        return SECTION
    (node,) = _anchors(body, Kind.ATTEND)
    cache, tables = body.type_of(node.inputs[1]), body.type_of(node.inputs[5])
    tokens, heads = evaluate(node.type.shape[0], bounds), int(node.type.shape[1])
    positions = evaluate(tables.shape[1], bounds) * int(cache.shape[2])
    parts = tokens * heads * -(-positions // numerics.chunk) * 4
    return 2 * _up(parts) + _up(parts * int(cache.shape[3])) or SECTION


def no_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    return 0


CONTRACT = KernelTemplate(
    "contract", "contract", "triton/contract.py.j2", accepts_contract, contract_schedules,
    contract_scratch,
)  # fmt: skip
ATTEND = KernelTemplate(
    "attend", "attend", "triton/attend.py.j2", accepts_attend, attend_schedules, attend_scratch
)
LATENT = KernelTemplate(
    "latent", "attend", "triton/latent.py.j2", accepts_latent, latent_schedules, latent_scratch
)
SELECT = KernelTemplate(
    "select", "select", "triton/select.py.j2", accepts_select, select_schedules, select_scratch
)
ROW = KernelTemplate("row", "row", "triton/row.py.j2", accepts_row, row_schedules, no_scratch)
