"""Latent attention on the CPU: what the template accepts, its schedules, its workspace."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.spec import Numerics, Schedule
from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, DType

LATENT_OPS = ("attend_window", "attend_compressed", "attend_selected")
HEAD_LANES, MOST_ROWS, SHARED_MOST = 16, 12, 512  # as in tw_latent.h


def anchor(body: Graph) -> Node:
    """Return the attention of a body."""
    (found,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    return found


def refused_row(dtype: DType | BlockFormat, width: int) -> str | None:
    """Say why rows of a paged state cannot be decoded, or None."""
    if width % 8:
        return f"width {width} is no multiple of 8"
    if isinstance(dtype, BlockFormat):
        known = dtype.block[0] == 1 and dtype.block[1] % 16 == 0 and dtype.minimum is None
        named = (dtype.code.name, dtype.scale.name)
        rules = (("fp8_e4m3", "ue8m0"), ("fp4_e2m1", "ue8m0"), ("fp4_e2m1", "fp8_e4m3"))
        return None if known and named in rules else f"row format {dtype} is unknown"
    return None if dtype.name in ("f32", "bf16") else f"rows are {dtype}, want f32 or bf16"


def accepts_latent(body: Graph) -> str | None:
    """Return why the template cannot express a body, or None."""
    node = anchor(body)
    if node.op not in LATENT_OPS:
        return f"'{node.op}' has keys and values of its own"
    states = [body.type_of(i) for i in (node.inputs[1], *node.inputs[6:7])]
    found = [refused_row(s.dtype, int(s.shape[2])) for s in states]
    return next((reason for reason in found if reason), None)


def latent_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Few tokens are split over heads and units; of many, neighbours share decoded windows."""
    panels = _panels(int(anchor(body).type.shape[1]))
    base = {"partial_bytes": 8 << 20, "inline_units": 2}
    groups = tuple(dict.fromkeys(min(n, panels) for n in (2, panels, 1)))
    choices = (
        [(1, g, split) for split in (1, 0, 2) for g in groups]
        if rows <= 16
        else [(tile, g, 0) for tile in (4, 1, 8, 16) for g in (panels, *groups[:1])]
    )
    found = [
        Schedule.of(
            **base, tile_tokens=tile, head_panels=g, split_units=split, register_rows=registers,
            width_panels=width, ahead=ahead,
        )
        for registers, width, ahead in ((6, 16, 4), (4, 8, 0), (3, 32, 2), (6, 1, 8))
        for tile, g, split in choices
    ]  # fmt: skip
    return tuple(dict.fromkeys(found))


def latent_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes per thread, as `latent_bytes` of tw_latent.h counts them for one thread."""
    node, s, chunk = anchor(body), schedule.values, numerics.chunk
    tokens = evaluate(node.type.shape[0], bounds)
    heads, width = (int(d) for d in node.type.shape[1:])
    window, columns = int(str(node.attr["window"])), _up(width)
    out = HEAD_LANES * columns
    shared = window + s["tile_tokens"] - 1 if s["tile_tokens"] > 1 else 0
    shared = shared if shared <= SHARED_MOST else 0
    per_head = 2 * out + (chunk + MOST_ROWS) * HEAD_LANES + 6 * HEAD_LANES
    keys = _panel_floats(chunk) * columns // 16
    keys += _panel_floats(shared) * columns // 16 if shared else 0
    offsets = -(-max(shared, chunk) // 8) * 64
    thread = (s["head_panels"] * per_head + keys + out) * 4 + offsets
    partials = 0
    if s["split_units"]:
        size = (out + 2 * HEAD_LANES) * 4
        units = -(-window // chunk) + -(-_most_entries(body, node, bounds) // chunk)
        partials = min(tokens * _panels(heads) * units, s["partial_bytes"] // size) * size
    return thread + -(-tokens * 48 // 64) * 64 + partials


def _most_entries(body: Graph, node: Node, bounds: Mapping[str, int]) -> int:
    match len(node.inputs):
        case 6:
            return 0
        case 8:
            state, tables = (body.type_of(i) for i in node.inputs[6:])
            return evaluate(tables.shape[1], bounds) * int(state.shape[1])
        case _:
            return evaluate(body.type_of(node.inputs[8]).shape[1], bounds)


def _panel_floats(rows: int) -> int:
    return (rows + MOST_ROWS + 1) * 16


def _panels(heads: int) -> int:
    return -(-heads // HEAD_LANES)


def _up(n: int) -> int:
    return -(-n // 16) * 16
