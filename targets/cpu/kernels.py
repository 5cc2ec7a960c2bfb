"""Kernel table of the CPU: templates in order of preference, what they accept, their schedules."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.emit.cpp_types import PANEL_FORMATS
from tilewright.codegen.pack_cpu import FORMATS
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, evaluate, product, symbols_of
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, TensorType
from tilewright.targets.cpu.index import accepts_select, select_schedules, select_scratch
from tilewright.targets.cpu.latent import accepts_latent, latent_schedules, latent_scratch
from tilewright.targets.cpu.routed import refuses_routed, route_bytes, routed_schedules

PANEL = 16  # output columns of a packed panel
BLOCK_FLOATS = (52, 36)  # sizes of `digit_block` and `word_block` of tw_exact.h: 32 values of a row


def _anchors(body: Graph, kind: Kind) -> list[Node]:
    return [n for n in body.nodes if op_def(n.op).kind is kind]


def _bound(extent: Dim, bounds: Mapping[str, int]) -> int:
    return evaluate(extent, bounds)


# --- row kernels --------------------------------------------------------------------------------


def _accepts_row(body: Graph) -> str | None:
    for kind in (Kind.CONTRACT, Kind.ATTEND, Kind.COMPOSITE):
        if found := _anchors(body, kind):
            return f"holds a {kind.value} node '{found[0].op}'"
    return None


def _row_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    choices = [n for n in (4, 1, 2, 8, 16, 32) if n <= max(rows, 1)]
    return tuple(Schedule.of(rows_per_item=n) for n in choices)


# --- contractions -------------------------------------------------------------------------------


def _accepts_contract(body: Graph) -> str | None:
    anchors = _anchors(body, Kind.CONTRACT)
    for node in anchors:
        x, w = (body.type_of(i) for i in node.inputs[:2])
        if any(n.op != "linear" for n in anchors):
            if refusal := refuses_routed(body, node, anchors) or _refuses_format(w):
                return refusal
            continue
        if x.rank != 2:
            return f"activation has rank {x.rank}, want 2"
        if node.inputs[1] not in body.weight:
            return "second operand is computed, want a weight"
        if symbols_of(w.shape):
            return f"weight extents are symbolic: {w}"
        if refusal := _refuses_format(w):
            return refusal
    return None


def _refuses_format(w: TensorType) -> str | None:
    """Say why a weight cannot be multiplied from panels."""
    name = PANEL_FORMATS.get(str(w.dtype), "")
    if name not in FORMATS:
        return f"weight format {w.dtype} has no packed layout"
    if int(w.shape[-1]) % FORMATS[name].group:
        return f"k = {w.shape[-1]} is no multiple of the group of {FORMATS[name].group}"
    return None


_STREAM = {"form": 0, "row_block": 16, "k_block": 128, "phase": 0, "split": 1}
_SLAB = {"form": 1, "prefetch": 0, "phase": 1}


def _stream(rows: int, row_tile: int, panel_tile: int, per_item: int, prefetch: int) -> Schedule:
    return Schedule.of(
        **{
            **_STREAM,
            "row_tile": min(row_tile, max(rows, 1)),
            "panel_tile": panel_tile,
            "panels_per_item": per_item,
            "prefetch": prefetch,
        }
    )


def _slab(
    row_tile: int, panel_tile: int, per_item: int, row_block: int, k_block: int, split: int
) -> Schedule:
    return Schedule.of(
        **_SLAB,
        row_tile=row_tile,
        panel_tile=panel_tile,
        panels_per_item=per_item,
        row_block=row_block,
        k_block=k_block,
        split=split,
    )


def _contract_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Streaming forms for few rows, slabs of decoded weights for many; all give the same bits.

    Four rows by one panel, and six by one from a slab, are what fits AVX2's sixteen registers.
    """
    first = _anchors(body, Kind.CONTRACT)[0]
    if first.op != "linear":
        return routed_schedules(body, first, rows)
    layout = FORMATS[PANEL_FORMATS[str(body.type_of(first.inputs[1]).dtype)]]
    tiles: tuple[tuple[int, int], ...] = ((4, 1), (3, 1), (2, 2))
    ahead = (4096, 8192, 2048)
    if rows == 1:
        # Plain weights take so little work that more panels at once keep more lines on their way;
        # codes of floats, the opposite: one panel after the other is read as one stream.
        one = 1 if layout.float_codes else 2 if layout.words else 4
        tiles = ((1, one), *((1, n) for n in (2, 1) if n != one))
        ahead = ahead if one == 2 else (2048, 4096, 8192)
    # A narrow matrix gives few items: of one panel each, so that every thread has some.
    narrow = int(body.type_of(first.inputs[1]).shape[0]) <= 8 * PANEL
    streams = [
        _stream(rows, tile, panels, per_item, prefetch)
        for prefetch in ahead
        for per_item in ((1, 2, 4, 8) if narrow else (4, 8, 2))
        for tile, panels in tiles
        if panels <= per_item
    ]
    slabs = [
        _slab(row_tile, 1, per_item, row_block, k_block, split)
        for row_tile in ((6, 4) if rows > 16 else (4, 6))
        for k_block in (256, 128)
        for row_block in (48, 96, 192)
        for split in (1, 0)
        for per_item in ((1, 2) if narrow else (4, 8))
    ]
    ordered = streams if rows <= 4 else [*slabs, *streams] if rows > 16 else [*streams, *slabs]
    return tuple(dict.fromkeys(ordered))


def contract_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes per thread, as `workspace_bytes` of tw_contract.h counts them for one thread."""
    s, anchors = schedule.values, _anchors(body, Kind.CONTRACT)
    k = int(body.type_of(anchors[0].inputs[0]).shape[-1])
    rows = _bound(product(body.type_of(anchors[0].inputs[0]).shape[:-1]), bounds)
    formats = [body.type_of(a.inputs[1]) for a in anchors]
    group = _group(formats[0])
    exact = numerics.atom == "integer"
    factored = numerics.scale_order == "factored" and group > 1 and not exact
    stride = _up(k // group * BLOCK_FLOATS[s["form"]] if exact else k) + PANEL
    has_min = isinstance(formats[0].dtype, BlockFormat) and formats[0].dtype.minimum is not None
    sums = -(-(k // group) // PANEL) * PANEL if factored and has_min else 0
    row_bytes = (stride + sums) * 4
    slab = acc = 0
    if s["form"] == 1:
        scales = s["k_block"] // group * 32 if factored else 0
        floats = s["k_block"] * PANEL // 2 + s["k_block"] // group * PANEL
        floats = floats if exact else s["k_block"] * PANEL + scales
        slab = s["panel_tile"] * floats * 4
        floats = (s["row_block"] + s["row_tile"]) * s["panel_tile"] * PANEL
        acc = floats * (len(anchors) + (numerics.segments > 1)) * 4
    per_thread = slab + acc + (0 if s["phase"] else s["row_block"] * row_bytes)
    shared = route_bytes(body, anchors[0], bounds)
    return per_thread + shared + (rows * row_bytes if s["phase"] else 0)


def _group(type_: TensorType) -> int:
    return FORMATS[PANEL_FORMATS[str(type_.dtype)]].group


# --- attention ----------------------------------------------------------------------------------


def _accepts_attend(body: Graph) -> str | None:
    (node,) = _anchors(body, Kind.ATTEND)
    if node.op != "attend":
        return f"'{node.op}' reads rows that are keys and values at once"
    cache = body.type_of(node.inputs[1])
    if str(cache.dtype) not in ("f32", "bf16"):
        return f"cache is {cache.dtype}, want f32 or bf16"
    width = int(cache.shape[3])
    return None if width % 8 == 0 else f"head width {width} is no multiple of 8"


def _attend_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Few tokens split a long context over threads; many are tiled. 6 rows fill AVX2 registers."""
    base = {"partial_bytes": 1 << 20, "paired": 0, "prefetch": 0, "inline_units": 3}
    tiles, splits = ((1, 4), (4, 0, 8, 1)) if rows <= 16 else ((32, 16, 64, 8), (0, 4))
    found = [
        Schedule.of(**base, tile_tokens=tile, register_rows=registers, split_units=split)
        for registers in (6, 4, 3)
        for tile in tiles
        for split in splits
    ]
    return tuple(dict.fromkeys(found))


def attend_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes per thread, as `attend_bytes` of tw_attend.h counts them for one thread."""
    (node,) = _anchors(body, Kind.ATTEND)
    s, q = schedule.values, body.type_of(node.inputs[0])
    cache = body.type_of(node.inputs[1])
    heads, width, kv_heads = int(q.shape[1]), int(cache.shape[3]), int(cache.shape[1])
    tokens = _bound(q.shape[0], bounds)
    positions = _bound(body.type_of(node.inputs[5]).shape[1], bounds) * int(cache.shape[2])
    rows = s["tile_tokens"] * (heads // kv_heads)
    stride, columns = _up(numerics.chunk), _up(width)
    floats = _up(rows * width) + width * stride + stride * columns + rows * stride
    thread = (floats + rows * columns + 7 * _up(rows)) * 4 + stride * 8
    tiles = -(-tokens * 48 // 64) * 64
    partials = 0
    if s["split_units"]:
        size = (columns + 16) * 4
        units = -(-positions // numerics.chunk)
        partials = min(tokens * heads * units, s["partial_bytes"] // size) * size
    return thread + tiles + partials


def _up(n: int) -> int:
    return -(-n // 16) * 16


def _no_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    return 0


KERNELS = (
    KernelTemplate(
        "contract",
        "contract",
        "cpp/contract.cpp.j2",
        _accepts_contract,
        _contract_schedules,
        contract_scratch,
    ),
    KernelTemplate(
        "attend", "attend", "cpp/attend.cpp.j2", _accepts_attend, _attend_schedules, attend_scratch
    ),
    KernelTemplate(
        "latent", "attend", "cpp/latent.cpp.j2", accepts_latent, latent_schedules, latent_scratch
    ),
    KernelTemplate(
        "select", "select", "cpp/select.cpp.j2", accepts_select, select_schedules, select_scratch
    ),
    KernelTemplate("row", "row", "cpp/row.cpp.j2", _accepts_row, _row_schedules, _no_scratch),
)
