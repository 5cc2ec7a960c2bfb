"""Kernel templates of NVIDIA chips: what they accept, their schedules, their scratch.

contract.py has those of contractions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright.codegen.emit.cpp import row_extent
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate, symbols_of
from tilewright.graph.ops import Kind, op_def
from tilewright.targets.nvidia import index
from tilewright.targets.nvidia.contract import SECTION
from tilewright.targets.nvidia.index import accepts_select, select_schedules, select_scratch
from tilewright.targets.nvidia.latent import (
    accepts_hopper,
    accepts_latent,
    hopper_schedules,
    latent_schedules,
    latent_scratch,
)


def _anchors(body: Graph, kind: Kind) -> list[Node]:
    return [n for n in body.nodes if op_def(n.op).kind is kind]


# --- row kernels --------------------------------------------------------------------------------


def accepts_row(body: Graph) -> str | None:
    for kind in (Kind.CONTRACT, Kind.ATTEND, Kind.COMPOSITE):
        if found := _anchors(body, kind):
            return f"holds a {kind.value} node '{found[0].op}'"
    return None


_NARROW, _WIDE = 256, 16384  # elements of a row


def row_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Wide rows want many warps: the code of each is shorter, and few rows run it once."""
    widest = _widest(body)
    order = (8, 16, 4, 32)
    if widest >= _WIDE and _anchors(body, Kind.SELECT):
        return tuple(Schedule.of(warps=w) for w in (32, 16, 8, 4))  # many loads on their way
    if widest < _WIDE:
        order = (4, 8, 2, 1) if widest > _NARROW else (2, 1, 4, 8)
    return tuple(Schedule.of(warps=w) for w in order)


def _widest(body: Graph) -> int:
    """The most elements that a value of a body has in one row."""
    rows, found = row_extent(body), 1
    for value in (*body.node, *(i.name for i in body.inputs)):
        shape = body.type_of(value).shape
        if shape and shape[0] == rows and not symbols_of(list(shape[1:])):
            found = max(found, math.prod(int(d) for d in shape[1:]))
    return found


def _up(num_bytes: int) -> int:
    return -(-num_bytes // SECTION) * SECTION


# --- attention ----------------------------------------------------------------------------------


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
    cache = body.type_of(node.inputs[1])
    row_bytes = int(cache.shape[3]) * (4 if cache.dtype.name == "f32" else 2)
    if rows > 256:
        tile_rows = (16, 32) if row_bytes <= 128 else (32, 16)
        forms = [(0, max(1, n // each), 1) for n in tile_rows] + [(0, 1, 1)]
    elif rows > 64:
        forms = [(0, 1, 1)]
    elif rows > 16:
        forms = [(0, 1, 1), (1, 1, 8)]
    elif rows > 8:
        forms = [(1, 1, 16), (1, 1, 8), (0, 1, 1)]
    elif rows > 4:
        forms = [(1, 1, 8), (1, 1, 4), (0, 1, 1)]
    else:
        forms = [(1, 1, 1), (1, 1, 2), (0, 1, 1)]
    return tuple(
        dict.fromkeys(
            Schedule.of(split=split, tile=tile, span=span, warps=warps, stages=stages)
            for stages in ((3, 2, 1) if 4 < rows <= 256 >= row_bytes else (2, 1, 3))
            for split, tile, span in forms
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


ATTEND = KernelTemplate(
    "attend", "attend", "triton/attend.py.j2", accepts_attend, attend_schedules, attend_scratch
)
LATENT = KernelTemplate(
    "latent", "attend", "triton/latent.py.j2", accepts_latent, latent_schedules, latent_scratch
)
LATENT_HOPPER = KernelTemplate(
    "latent_hopper", "attend", "cuda/latent.cu.j2", accepts_hopper, hopper_schedules, latent_scratch
)
SELECT = KernelTemplate(
    "select", "select", "triton/select.py.j2", accepts_select, select_schedules, select_scratch
)
SELECT_HOPPER = KernelTemplate(
    "select_hopper", "select", "cuda/select.cu.j2",
    index.accepts_hopper, index.hopper_schedules, index.hopper_scratch,
)  # fmt: skip
ROW = KernelTemplate("row", "row", "triton/row.py.j2", accepts_row, row_schedules, no_scratch)
