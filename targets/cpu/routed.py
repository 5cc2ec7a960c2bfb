"""Contractions with a stack of matrices on the CPU: what is accepted, schedules, route tables."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.spec import Schedule
from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate, product, symbols_of

PANEL = 16


def refuses_routed(body: Graph, node: Node, anchors: list[Node]) -> str | None:
    """Say why rows cannot be routed to the matrices of a node's weight."""
    if any(n.op != node.op or n.inputs[2:] != node.inputs[2:] for n in anchors):
        return f"'{node.op}' stands beside rows that are routed otherwise"
    x, w = (body.type_of(i) for i in node.inputs[:2])
    if node.inputs[1] not in body.weight or symbols_of(w.shape):
        return "second operand is computed, want a weight"
    if node.inputs[0] in body.node:
        return "activation is computed inside, want rows in memory"
    if node.op == "grouped_linear" and int(node.type.shape[2]) % PANEL:
        return f"groups of {node.type.shape[2]} columns, want a multiple of {PANEL}"
    return None if x.rank in (2, 3) else f"activation has rank {x.rank}, want 2 or 3"


def routed_schedules(body: Graph, node: Node, rows: int) -> tuple[Schedule, ...]:
    """Streaming forms where a matrix meets few rows; else slabs, but few rows are streamed.

    `rows` are tokens; how many of them a matrix meets is known for an even load only.
    """
    slots = int(node.type.shape[1])
    count = int(body.type_of(node.inputs[1]).shape[0]) if node.op == "expert_linear" else slots
    mean = -(-rows * slots // count)
    most = rows * (slots if node.op == "expert_linear" else 1)
    two_digits = str(body.type_of(node.inputs[1]).dtype).startswith("fp4")  # two sums a row
    tiles: tuple[tuple[int, int], ...] = ((4, 1), (2, 2))
    if mean <= 4:  # of one token, a matrix meets one row at most
        tiles = ((2, 1), (2, 2), (1, 2), (1, 4)) if rows > 1 else ((1, 1), (1, 2), (1, 4))
    streams = [
        Schedule.of(
            form=0, row_tile=tile, panel_tile=panels, panels_per_item=per_item, row_block=16,
            k_block=128, prefetch=prefetch, phase=1, split=split, few_rows=0,
        )
        for per_item in (8, 16, 4)
        for prefetch in (2048, 4096, 8192)
        for tile, panels in tiles
        for split in (1,)
    ]
    slabs = [
        Schedule.of(
            form=1, row_tile=row_tile, panel_tile=1, panels_per_item=per_item, row_block=row_block,
            k_block=k_block, prefetch=0, phase=phase, split=1, few_rows=few,
        )
        for few in (4, 2)
        for row_block in (48, 24, 96)
        for k_block in (256, 128)
        for per_item in (4, 8)
        for row_tile in ((4, 6) if two_digits else (6, 4))
        for phase in (1, 0)
    ]
    ordered = streams if most <= 2 else [*slabs, *streams] if mean > 4 else [*streams, *slabs]
    return tuple(dict.fromkeys(ordered))


def route_bytes(body: Graph, node: Node, bounds: Mapping[str, int]) -> int:
    """Bytes that rows are sorted in, as tw_route.h counts them."""
    if node.op != "expert_linear":
        return 0
    rows = evaluate(product(node.type.shape[:-1]), bounds)
    matrices = int(body.type_of(node.inputs[1]).shape[0])
    return _align((matrices + 2) * 4) + _align(rows * 4) + _align(rows * 12)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
