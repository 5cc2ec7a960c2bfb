"""Contractions of codes for Hopper's cores in CUDA: what is accepted, schedules, scratch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tilewright.codegen.emit.cuda_chip import CORE_BYTES, MULTIPROCESSORS, SHARED_BYTES
from tilewright.codegen.emit.cuda_contract import shared_bytes
from tilewright.codegen.emit.cuda_sums import refuses_epilogue
from tilewright.codegen.emit.triton_contract import contractions
from tilewright.codegen.emit.triton_hopper import (
    WIDE,
    fits,
    linear_bytes,
    met_weights,
    refuses_hopper,
)
from tilewright.codegen.emit.triton_route import route_parts
from tilewright.codegen.pack_tiles import SPAN, TILE_ROWS
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate, from_json
from tilewright.graph.types import BlockFormat
from tilewright.targets.nvidia.contract import SECTION, accepts_contract, contract_template

_LED_ROWS = 256


def accepts_hopper(body: Graph) -> str | None:
    """Return why a body is refused, or None."""
    anchors = contractions(body)
    if any(n.op != "expert_linear" for n in anchors):
        return "rows are not sorted by their matrix"
    if refusal := accepts_contract(body):
        return refusal
    if len(anchors) > 2 or len({(n.inputs[0], n.type.shape) for n in anchors}) > 1:
        return "more than two weights of one size meet"
    x, weights = body.type_of(anchors[0].inputs[0]), [body.type_of(n.inputs[1]) for n in anchors]
    if any(w.dtype.name != "fp4_e2m1" for w in weights):
        return "weights are not fp4 codes"
    if not isinstance(x.dtype, BlockFormat) and x.dtype.name != "bf16":
        return f"rows are {x.dtype}, want what bf16 holds"
    if int(x.shape[-1]) % SPAN:
        return f"k = {x.shape[-1]} is no multiple of {SPAN}"
    return refuses_epilogue(body, body.nodes)


# Rows of a block; stages; blocks of a core at least. What measured best for as many rows first.
_FEW_OF_TWO = ((8, 4, 5), (8, 6, 3), (16, 5, 3), (32, 4, 2), (64, 3, 2))
_FEW_OF_ONE = ((8, 8, 4), (8, 6, 5), (16, 6, 4), (32, 4, 4), (64, 4, 2))
# Groups of warps; tiles of each; rows; stages.
_WIDE = ((3, 2, 80, 4), (2, 4, 80, 4), (4, 1, 96, 5))


def hopper_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Blocks of few rows where weights are most of what is read, wide ones where one weight meets
    many; `rows` are tokens, and how many rows a matrix meets is known for an even load only."""
    anchors = contractions(body)
    slots = int(anchors[0].type.shape[1])
    matrices = int(body.type_of(anchors[0].inputs[1]).shape[0])
    meets = -(-rows * slots // matrices)
    forms = _FEW_OF_TWO if len(anchors) == 2 else _FEW_OF_ONE
    few = [
        Schedule.of(bm=bm, stages=stages, blocks=blocks, wide=0, each=1, listed=listed)
        for listed in ((0, 1) if rows * slots <= _LED_ROWS else (1,))
        for bm, stages, blocks in sorted(
            forms, key=lambda f: -(-meets * 2 // f[0]) * (16 + f[0])
        )
    ]
    wide = [
        Schedule.of(bm=bm, stages=stages, blocks=1, wide=groups, each=each, listed=1)
        for groups, each, bm, stages in _WIDE
    ]
    found = few + wide if meets < 8 else wide + few
    return tuple(s for s in found if shared_bytes(body, s) <= SHARED_BYTES)


def hopper_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes of the lists of routed rows."""
    parts = route_parts(body, contractions(body)[0], schedule.values)
    sizes = [evaluate(from_json(size), bounds) for _, size in parts.values()]
    return sum(-(-size // SECTION) * SECTION for size in sizes) or SECTION


# Groups of warps that multiply many rows, or 1; tiles of each; rows of a block; stages; blocks of a
# core at least.
_LINEAR = (
    (1, 1, 8, 6, 3), (1, 1, 8, 4, 5), (1, 1, 8, 8, 2), (1, 1, 16, 6, 2), (1, 1, 16, 4, 4),
    (1, 1, 32, 5, 2), (1, 1, 64, 4, 2), (2, 1, 192, 3, 1), (2, 1, 128, 4, 1), (2, 1, 96, 4, 1),
    (3, 1, 128, 3, 1), (3, 1, 32, 6, 1),
    (3, 1, 64, 5, 1), (2, 1, 64, 3, 2), (2, 1, 64, 6, 1), (2, 1, 32, 4, 2), (2, 1, 32, 6, 1),
    (2, 2, 64, 4, 1), (2, 2, 96, 3, 1), (2, 2, 128, 3, 1),
)  # fmt: skip
_ON_ALL_CHIPS = contract_template(MULTIPROCESSORS)


def linear_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Those of all chips where the kernel in CUDA does not fit. Blocks of few rows read weights
    once, wide ones multiply them with more rows at a time. Segments lie beside each other where
    few blocks would not fill the chip."""
    anchors = contractions(body)
    if refuses_hopper(body, numerics, anchors):
        return _ON_ALL_CHIPS.schedules(body, numerics, rows)
    many = rows > 1024 and met_weights(body, anchors, split=False) > 0
    splits = [0] if numerics.segments == 1 else [0, 1] if many else [1, 0]
    found = [
        Schedule.of(bm=bm, bn=64, bk=SPAN, warps=4, stages=stages, row_warps=4, split=split,
                    listed=0, hopper=groups, each=each, blocks=blocks)
        for split in splits
        for groups, each, bm, stages, blocks in _LINEAR
        # Sums of segments and their total share the registers of wide blocks.
        if split or numerics.segments == 1 or (groups == WIDE and bm * each <= 128)
    ]  # fmt: skip
    found = [s for s in found if fits(body, anchors, s.values)]
    panels = sum(-(-math.prod(int(d) for d in a.type.shape[1:]) // TILE_ROWS) for a in anchors)

    def order(schedule: Schedule) -> tuple[int, ...]:
        """Blocks that take all rows at once, the smallest first; of many rows the largest. Among
        those of as many rows the core that has most should have few tiles, in few turns."""
        values = schedule.values
        wide, bm = values["hopper"] >= WIDE, values["bm"]
        waste = -(-rows // bm) * (bm + 48)
        tiles = values["hopper"] * values["each"]
        segments = numerics.segments if values["split"] else 1
        blocks = -(-rows // bm) * -(-panels // tiles) * segments
        each = CORE_BYTES // (linear_bytes(body, anchors, values) + 1024)
        waves = -(-blocks // (MULTIPROCESSORS * (values["blocks"] if wide else each)))
        most = -(-blocks // MULTIPROCESSORS) * tiles if wide else 0
        return (splits.index(values["split"]), int(wide != (rows > 16)), waste, most, waves)

    return tuple(sorted(found, key=order))


LINEAR = replace(_ON_ALL_CHIPS, schedules=linear_schedules)
CONTRACT_HOPPER = KernelTemplate(
    "contract_hopper", "contract", "cuda/contract.cu.j2", accepts_hopper, hopper_schedules,
    hopper_scratch,
)  # fmt: skip
