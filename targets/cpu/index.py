"""Selection of entries on the CPU: what the template accepts, its schedules, its workspace."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.spec import Numerics, Schedule
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate
from tilewright.targets.cpu.latent import refused_row

HEAD_LANES, MOST_ROWS, RADIX_BINS = 16, 12, 1 << 11  # as in tw_index.h and tw_select.h


def accepts_select(body: Graph) -> str | None:
    """Return why the template cannot express a body, or None."""
    if len(body.nodes) != 1:
        return f"a selection stands alone: got {len(body.nodes)} nodes"
    keys = body.type_of(body.nodes[0].inputs[2])
    return refused_row(keys.dtype, int(keys.shape[2]))


def select_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Long rows of few tokens are split over threads; many tokens are not."""
    splits = (4096, 0, 1024, 16384) if rows <= 16 else (0, 16384)
    found = [
        Schedule.of(
            partial_bytes=8 << 20, register_rows=registers, stage_entries=stage,
            split_entries=split, ahead=ahead,
        )
        for registers, ahead in ((6, 8), (4, 0), (3, 4))
        for stage in (96, 192, 48)
        for split in splits
    ]  # fmt: skip
    return tuple(dict.fromkeys(found))


def select_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes per thread, as `select_bytes` of tw_index.h counts them for one thread."""
    (node,) = body.nodes
    s, q = schedule.values, body.type_of(node.inputs[0])
    tokens = evaluate(q.shape[0], bounds)
    heads, width = (int(d) for d in q.shape[1:])
    k, blocks = (int(str(node.attr.get(name, 0))) for name in ("k", "blocks"))
    listed = evaluate(body.type_of(node.inputs[6]).shape[1], bounds) if len(node.inputs) > 6 else 0
    panels, columns, stage = -(-heads // HEAD_LANES), -(-width // 16) * 16, s["stage_entries"]
    q_floats = panels * HEAD_LANES * (columns + 1) + HEAD_LANES * columns
    keys = (stage + MOST_ROWS + 1) * columns
    scores = (stage + MOST_ROWS) * HEAD_LANES + _up(stage + MOST_ROWS) + _up(stage)
    streams = _stream_words(k) + (_stream_words(blocks) if blocks else 0)
    thread = (q_floats + keys + scores + streams + _up(listed)) * 4 + -(-stage // 8) * 64
    partials = 0
    if s["split_entries"]:
        per_part = _part_words(k) + (_part_words(blocks) if blocks else 0)
        partials = s["partial_bytes"] // (per_part * 4) * per_part * 4
    return thread + -(-tokens * 32 // 64) * 64 + partials


def _stream_words(k: int) -> int:
    return RADIX_BINS + 2 * (4 * k + 1024)


def _part_words(k: int) -> int:
    return 2 * _up(k) + 16


def _up(n: int) -> int:
    return -(-n // 16) * 16
