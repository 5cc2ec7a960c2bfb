"""Contractions with a stack of matrices in Triton: which rows of results there are, and the lists
of rows by matrix that kernels of the same source build. Rows of results are token * slots + slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import Launch, Pointer
from tilewright.codegen.emit.triton_rows import power_of_two
from tilewright.graph import Graph, Node
from tilewright.graph.dims import DimJson, to_json


def num_slots(anchor: Node) -> int:
    """Return the rows of results a token has in a stack of matrices, 0 where there is no stack."""
    return 0 if anchor.op == "linear" else constant(anchor.type.shape[1])


def stacked(anchor: Node) -> bool:
    """Say whether rows are sorted by their matrix."""
    return anchor.op == "expert_linear"


def result_rows(anchor: Node) -> DimJson:
    """Return the number of rows of results."""
    tokens, slots = to_json(anchor.type.shape[0]), num_slots(anchor)
    return ["mul", tokens, slots] if slots else tokens


def num_blocks(body: Graph, anchor: Node, schedule: Mapping[str, int]) -> DimJson:
    """Return how many blocks of rows there may be: one a row, or full ones and a part of one for
    each matrix (ids that name none are one more)."""
    rows, matrices = result_rows(anchor), constant(body.type_of(anchor.inputs[1]).shape[0])
    if not schedule["listed"]:
        return rows
    return ["min", rows, ["add", ["ceildiv", rows, schedule["bm"]], matrices + 1]]


def route_parts(
    body: Graph, anchor: Node, schedule: Mapping[str, int]
) -> Mapping[str, tuple[str, DimJson]]:
    """Return the buffers of the lists: first place of each matrix, rows in order, blocks."""
    if not stacked(anchor) or not schedule["listed"]:
        return {}
    matrices = constant(body.type_of(anchor.inputs[1]).shape[0])
    return {
        "starts": ("i32", (matrices + 2) * 4),
        "order": ("i32", ["mul", result_rows(anchor), 4]),
        "table": ("i32", ["mul", num_blocks(body, anchor, schedule), 16]),
    }


def route_texts(
    body: Graph, anchor: Node, schedule: Mapping[str, int]
) -> Mapping[str, Any] | None:
    """Return the template's `route`."""
    if not stacked(anchor):
        return None
    x, w, ids = anchor.inputs
    matrices, block = constant(body.type_of(w).shape[0]), schedule["bm"]
    rows = f"({to_json(anchor.type.shape[0])} * {num_slots(anchor)})"
    full = f"({rows} + {block - 1}) // {block} + {matrices + 1}"
    return {
        "listed": bool(schedule["listed"]),
        "ids": ids,
        "matrices": matrices,
        "padded": power_of_two(matrices + 1),
        "num_rows": rows,
        "num_blocks": f"tl.minimum({rows}, {full})",
        "shared": body.type_of(x).rank == 2,
    }


def route_launches(
    body: Graph, anchor: Node, schedule: Mapping[str, int], work: tuple[Pointer, ...]
) -> list[Launch]:
    """Return the kernels that build the lists."""
    if not stacked(anchor) or not schedule["listed"]:
        return []
    matrices = constant(body.type_of(anchor.inputs[1]).shape[0])
    return [
        Launch("route_rows", (matrices + 1, 1, 1), 4, 1, work),
        Launch("route_blocks", (1, 1, 1), 4, 1, work),
    ]
